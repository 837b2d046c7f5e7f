import json

import pytest
from support import encoder

from mempo_trl.cli import main
from mempo_trl.search import BM25Index, open_index


RECORDS = [
    {"id": "1", "contents": '"Dune"\nA novel by Frank Herbert.'},
    {"id": "2", "contents": '"Emma"\nThe novels of Jane Austen.'},
]


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    return path


def ids(path, query):
    return [result.id for result in BM25Index.load(path).search([query])[0]]


def test_builds_and_adds(tmp_path, corpus, capsys):
    out = tmp_path / "deep" / "index"
    assert main(["index", str(corpus), str(out)]) == 0
    assert capsys.readouterr().out == f"{out}: 2 documents\n"
    assert ids(out, "austen") == ["2"]
    more = tmp_path / "more.jsonl"
    more.write_text(json.dumps({"key": 3, "name": "Persuasion", "body": "Austen again."}))
    columns = ["--id-column", "key", "--title-column", "name", "--text-column", "body"]
    assert main(["index", str(more), str(out), "--add", *columns]) == 0
    assert capsys.readouterr().out == f"{out}: 3 documents\n"
    assert sorted(ids(out, "austen")) == ["2", "3"]
    assert BM25Index.load(out).search(["persuasion"])[0][0].contents == '"Persuasion"\nAusten again.'


def test_does_not_replace_unless_told(tmp_path, corpus, capsys):
    out = tmp_path / "index"
    BM25Index.build([{"id": 9, "contents": "austen"}], out)
    assert main(["index", str(corpus), str(out)]) == 1
    assert "use --overwrite to replace it, or --add" in capsys.readouterr().err
    assert ids(out, "austen") == ["9"]
    assert main(["index", str(corpus), str(out), "--overwrite"]) == 0
    assert ids(out, "austen") == ["2"]


def test_bad_lines(tmp_path, corpus, capsys):
    with corpus.open("a") as file:
        file.write("not JSON\n")
    out = tmp_path / "index"
    assert main(["index", str(corpus), str(out)]) == 1
    error = capsys.readouterr().err
    assert f"{corpus}, line 3: " in error
    assert not out.exists()
    assert main(["index", str(corpus), str(out), "--skip-bad-lines"]) == 0
    assert "1 lines or rows" in capsys.readouterr().err
    assert ids(out, "austen") == ["2"]


def test_options(tmp_path, corpus, capsys):
    (tmp_path / "stop.txt").write_text("by\nherbert")
    out = tmp_path / "index"
    options = ["--stem", "english", "--stop-words", str(tmp_path / "stop.txt"), "--no-store-text", "--ngram", "3"]
    assert main(["index", str(corpus), str(out), *options]) == 0
    assert sorted(ids(out, "novel")) == ["1", "2"]
    assert ids(out, "herbert") == []
    assert main(["index", str(corpus), str(out), "--add", "--stem", "english"]) == 1
    assert "--stem cannot be given with --add" in capsys.readouterr().err


def test_passages_of_a_folder(tmp_path, capsys):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.md").write_text("# Title\n\none two three four five\n")
    out = tmp_path / "index"
    assert main(["index", str(tmp_path / "notes"), str(out), "--passage-words", "3", "--overlap-words", "1"]) == 0
    (result,) = BM25Index.load(out).search(["five"])[0]
    assert (result.id, result.title, result.text) == ("a.md#2", "Title", "three four five")


def test_what_is_not_there(tmp_path, capsys):
    assert main(["index", str(tmp_path / "corpus.jsonl"), str(tmp_path / "index")]) == 1
    assert "There is no corpus file" in capsys.readouterr().err
    (tmp_path / "corpus.jsonl").write_text(json.dumps(RECORDS[0]))
    assert main(["index", str(tmp_path / "corpus.jsonl"), str(tmp_path / "index"), "--add"]) == 1
    assert "There is no BM25 index at" in capsys.readouterr().err


def test_what_is_nothing_to_index(tmp_path, corpus, capsys):
    empty, folder = tmp_path / "empty.jsonl", tmp_path / "folder"
    empty.touch()
    folder.mkdir()
    for source, message in ((empty, f"{empty} holds no documents."), (folder, f"The folder {folder} holds no .jsonl")):
        assert main(["index", str(source), str(tmp_path / "index")]) == 1
        assert capsys.readouterr().err.startswith(f"mempo index: {message}")
    assert main(["index", str(corpus), str(corpus / "index")]) == 1
    assert capsys.readouterr().err == f"mempo index: {corpus / 'index'}: Not a directory.\n"
    assert main(["index", str(corpus), str(corpus)]) == 1
    assert "exists and is not a BM25 index; choose another path." in capsys.readouterr().err
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["corpus.jsonl", "empty.jsonl", "folder"]


def test_bad_options_are_refused_before_the_corpus_is_read(tmp_path, corpus, capsys):
    corpus.write_text("not JSON\n")
    (tmp_path / "stop.txt").write_bytes(b"\xff\xfe")
    for options, message in (
        (["--ngram", "0"], "`ngram=0` is not allowed"),
        (["--stem", "klingon"], "stem must be one of"),
        (["--stop-words", "klingon"], "stop_words must be one of"),
        (["--stop-words", str(tmp_path / "stop.txt")], f"--stop-words: {tmp_path / 'stop.txt'} is not text in UTF-8"),
        (["--kind", "hybrid", "--model", str(encoder()), "--stem", "klingon"], "stem must be one of"),
        (["--kind", "dense", "--model", str(encoder()), "--parameters", "x=1"], "parameters must be faiss search"),
    ):
        assert main(["index", str(corpus), str(tmp_path / "index"), *options]) == 1
        assert f"mempo index: {message}" in capsys.readouterr().err


def test_dense_and_hybrid(tmp_path, corpus, capsys):
    for kind in ("dense", "hybrid"):
        assert main(["index", str(corpus), str(tmp_path / kind), "--kind", kind, "--model", str(encoder())]) == 0
        assert str(tmp_path / kind) in capsys.readouterr().out
        assert open_index(tmp_path / kind).search(["books of Austen"], 1)[0][0].id == "2"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kind", "dense"], "--kind dense needs --model"),
        (["--kind", "dense", "--model", "m", "--stem", "english"], "--stem cannot be given with --kind dense"),
        (["--model", "m", "--no-normalize"], "--model, --normalize cannot be given with --kind bm25"),
        (["--kind", "hybrid", "--model", "m", "--add"], "--add cannot be given with --kind hybrid"),
        (["--kind", "dense", "--model", "/nowhere"], "/nowhere"),
    ],
)
def test_options_that_do_not_go_together(tmp_path, corpus, capsys, arguments, message):
    assert main(["index", str(corpus), str(tmp_path / "out"), *arguments]) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
