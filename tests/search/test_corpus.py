import gzip
import json

import pytest

from mempo_trl.search import Document, SearchResult, read_corpus


def write(path, *lines):
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text, encoding="utf-8")
    return path


class TestDocument:
    @pytest.mark.parametrize(
        ("contents", "title", "text"),
        [
            (
                '"Kathryn Bigelow"\nAn American director.\nBorn 1951.',
                "Kathryn Bigelow",
                "An American director.\nBorn 1951.",
            ),
            ('"Title"\r\ntext', "Title", "text"),
            ('"Title"', "Title", ""),
            ('"Weird Al" Yankovic\ntext', '"Weird Al" Yankovic', "text"),
            ('""Heroes" (song)"\ntext', '"Heroes" (song)', "text"),
            ("Title\ntext", "Title", "text"),
            ("only text", "", "only text"),
            ('"', "", '"'),
            ("", "", ""),
        ],
    )
    def test_title_and_text(self, contents, title, text):
        for document in (Document("1", contents), SearchResult("1", contents, 0.5)):
            assert (document.title, document.text) == (title, text)


class TestReadCorpus:
    @pytest.mark.parametrize("name", ["corpus.jsonl", "corpus.jsonl.gz"])
    def test_reads(self, tmp_path, name):
        record = {"id": "b", "contents": '"Tōkyō"\n東\u2028京', "title": "unused"}
        path = write(
            tmp_path / name, {"id": 7, "contents": "a"}, "", json.dumps(record, ensure_ascii=False), "  \t", ""
        )
        expected = [Document("7", "a"), Document("b", '"Tōkyō"\n東\u2028京')]
        assert list(read_corpus(path)) == expected
        assert list(read_corpus(str(path))) == expected

    def test_byte_order_mark_and_windows_lines(self, tmp_path):
        path = tmp_path / "corpus.jsonl"
        path.write_bytes(b'\xef\xbb\xbf{"id": 1, "contents": "a"}\r\n{"id": 2, "contents": "b"}\r\n')
        assert list(read_corpus(path)) == [Document("1", "a"), Document("2", "b")]

    def test_streams(self, tmp_path):
        path = write(tmp_path / "corpus.jsonl", {"id": 1, "contents": "a"}, "not JSON")
        assert next(read_corpus(path)) == Document("1", "a")

    @pytest.mark.parametrize(
        ("line", "reason"),
        [
            ("not JSON", "the line is not JSON"),
            ('{"id": 1, "contents": "cut', "the line is not JSON"),
            ("[1]", "got a list"),
            ('"text"', "got a str"),
            ("null", "got a NoneType"),
            ({"id": 1}, '"contents" is missing'),
            ({"contents": "a"}, '"id" is missing'),
            ({"id": 1, "contents": ["a"]}, '"contents" must be a string, got a list'),
            ({"id": 1, "contents": None}, '"contents" must be a string, got a NoneType'),
            ({"id": None, "contents": "a"}, '"id" must be a string or an integer, got None'),
            ({"id": True, "contents": "a"}, '"id" must be a string or an integer, got True'),
        ],
    )
    @pytest.mark.parametrize("name", ["corpus.jsonl", "corpus.jsonl.gz"])
    def test_bad_line(self, tmp_path, name, line, reason):
        path = write(tmp_path / name, {"id": 1, "contents": "a"}, "", line)
        with pytest.raises(ValueError, match=reason) as error:
            list(read_corpus(path))
        assert str(error.value).startswith(f"{path}, line 3: ")
        assert "\n" not in str(error.value)

    def test_broken_utf8(self, tmp_path):
        path = tmp_path / "corpus.jsonl"
        path.write_bytes(b'{"id": 1, "contents": "\xff"}\n')
        with pytest.raises(ValueError, match=r"line 1: .* not JSON in UTF-8"):
            list(read_corpus(path))

    @pytest.mark.parametrize("damage", [lambda data: data[:-12], lambda data: b"plain" + data])
    def test_damaged_gzip(self, tmp_path, damage):
        path = write(tmp_path / "corpus.jsonl.gz", *[{"id": i, "contents": f"text {i}"} for i in range(100)])
        path.write_bytes(damage(path.read_bytes()))
        with pytest.raises(ValueError, match=r"cut short or damaged after line \d+"):
            list(read_corpus(path))

    def test_bad_path_fails_before_iteration(self, tmp_path):
        with pytest.raises(FileNotFoundError, match=r"There is no corpus file .*missing\.jsonl\."):
            read_corpus(tmp_path / "missing.jsonl")
        with pytest.raises(ValueError, match=r"A corpus is a \.jsonl or \.jsonl\.gz file, got .*corpus\.csv\."):
            read_corpus(write(tmp_path / "corpus.csv", "id,contents"))
