"""`mempo data`."""

import json

import pytest

from mempo_trl.cli import main
from mempo_trl.data import read_questions


@pytest.fixture
def flashrag(tmp_path):
    rows = [{"id": f"q{n}", "question": f"who is {n}?", "golden_answers": [f"{n}"]} for n in range(10)]
    rows.append({"id": "bad", "question": "", "golden_answers": ["x"]})
    file = tmp_path / "nq.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def run(*arguments):
    return main(["data", *map(str, arguments)])


def test_show(flashrag, capsys):
    assert run("show", flashrag, "--first", 2) == 0
    out, err = capsys.readouterr()
    assert "10 of 11 rows, read as flashrag; dropped: 1 without a question" in err
    assert "| rows | 10 |" in out
    assert [json.loads(line)["id"] for line in out.splitlines() if line.startswith("{")] == ["q0", "q1"]


def test_convert(flashrag, tmp_path, capsys):
    out = tmp_path / "data" / "train.parquet"
    assert run("convert", flashrag, "--out", out) == 0
    assert "1 without a question" in capsys.readouterr().err
    assert [row["answers"] for row in read_questions(out).rows] == [[[f"{n}"]] for n in range(10)]
    assert run("convert", flashrag, "--out", out) == 1
    assert "exists: name another file, or replace it with --overwrite" in capsys.readouterr().err
    assert run("convert", flashrag, "--out", out, "--overwrite") == 0


def test_compose(flashrag, tmp_path, capsys):
    other = tmp_path / "hotpot.jsonl"
    rows = [{"_id": f"h{n}", "question": f"where is {n}?", "answer": f"{n}", "supporting_facts": []} for n in range(6)]
    other.write_text("".join(json.dumps(row) + "\n" for row in rows))
    held_out = tmp_path / "test.jsonl"
    held_out.write_text('{"question": "where is 3?", "answer": "x"}\n')
    out = tmp_path / "train.parquet"
    options = ["--objectives", 2, 4, "--number", 12, "--across-sources", "--exclude", held_out, "--out", out]
    assert run("compose", flashrag, other, *options) == 0
    text, err = capsys.readouterr()
    assert "questions not used: 1 excluded." in err
    assert "| with 2 objectives | 6 |" in text
    assert "| with 4 objectives | 6 |" in text
    rows = read_questions(out).rows
    assert len(rows) == 12
    assert not any("where is 3?" in row["question"] for row in rows)
    assert any("+" in row["source"] for row in rows)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["show", "missing.jsonl"], "There is no file, folder or data set missing.jsonl."),
        (["convert", "{file}", "--out", "x.csv"], "must end in .parquet or .jsonl"),
        (["show", "{file}", "--schema", "verl"], "is not in the schema verl: there is no column reward_model"),
        (["show", "{file}", "--answers-column", "x"], "There is no column 'x'"),
        (
            ["compose", "{file}", "--objectives", "99", "--out", "{file}.parquet"],
            "99 objectives need as many questions",
        ),
        (["compose", "{file}", "--objectives", "0", "--out", "{file}.parquet"], "is not allowed"),
    ],
)
def test_one_sentence(flashrag, capsys, arguments, sentence):
    assert run(*(argument.replace("{file}", str(flashrag)) for argument in arguments)) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("mempo data: ")
    assert sentence in last
