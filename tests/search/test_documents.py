import pytest

from mempo_trl.search import Document
from mempo_trl.search.documents import StoredDocuments, write_documents


DOCUMENTS = [
    Document("a", '"Ünïcode"\r\n東京 \u2028 \x00'),
    Document("lone \ud800", "surrogate \udfff"),
    Document("empty", ""),
    Document("", "x" * 100_000),
]


def test_come_back_unchanged(tmp_path):
    count, _ = write_documents(iter(DOCUMENTS), tmp_path)
    stored = StoredDocuments(tmp_path)
    assert len(stored) == count == 4
    assert [stored[number] for number in (3, 0, 2, 1)] == [DOCUMENTS[number] for number in (3, 0, 2, 1)]
    assert list(stored) == DOCUMENTS


@pytest.mark.parametrize("number", [-1, 4])
def test_no_such_number(tmp_path, number):
    write_documents(DOCUMENTS, tmp_path)
    with pytest.raises(IndexError, match="There are 4 documents"):
        StoredDocuments(tmp_path)[number]


def test_the_digest_tells_corpora_apart(tmp_path):
    corpora = [
        DOCUMENTS,
        DOCUMENTS[:3],
        DOCUMENTS[::-1],
        [Document("ab", "c")],
        [Document("a", "bc")],
        [Document("a", "b"), Document("c", "")],
    ]
    digests = [write_documents(corpus, tmp_path)[1] for corpus in corpora]
    assert len(set(digests)) == len(corpora)
    assert write_documents(DOCUMENTS, tmp_path)[1] == digests[0]


@pytest.mark.parametrize("name", ["documents.jsonl", "documents.offsets"])
@pytest.mark.parametrize("cut", [0, 1, 13])
def test_damaged(tmp_path, name, cut):
    write_documents(DOCUMENTS, tmp_path)
    content = (tmp_path / name).read_bytes()
    (tmp_path / name).unlink()
    (tmp_path / name).write_bytes(content[:cut])
    with pytest.raises(ValueError):
        StoredDocuments(tmp_path)
