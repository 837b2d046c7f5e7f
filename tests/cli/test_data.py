import json
import subprocess
import sys

import pytest

from mempo_trl.cli import main
from mempo_trl.data import read_questions


@pytest.fixture
def nq(tmp_path):
    return write(
        tmp_path / "nq.jsonl", *[{"id": n, "question": f"nq {n}", "golden_answers": [f"a{n}"]} for n in range(8)]
    )


@pytest.fixture
def hotpotqa(tmp_path):
    rows = [{"_id": f"h{n}", "question": f"hotpot {n}?", "answer": f"b{n}", "level": "hard"} for n in range(6)]
    return write(tmp_path / "hotpot.jsonl", *rows, {"_id": "x", "question": "Which?", "answer": "", "level": "hard"})


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(*command):
    return main(["data", *map(str, command)])


def test_show(nq, hotpotqa, tmp_path, capsys):
    assert run("show", hotpotqa, "--rows", 1, "--test", write(tmp_path / "t.csv")) == 1
    assert "t.csv has no rows" in capsys.readouterr().err
    test = write(tmp_path / "t.jsonl", {"question": "Hotpot 3", "answer": "x"})
    assert run("show", hotpotqa, "--rows", 1, "--test", test) == 0
    out, err = capsys.readouterr()
    assert out.startswith(
        f"{hotpotqa}: 6 of 7 rows are kept, schema hotpotqa (HotpotQA)\n  dropped: 1: it has no answer"
    )
    assert f"    {hotpotqa}, line 7: " in out
    assert "| questions | 6 |\n| source hotpot | 6 (100.0%) |\n| 1 objective | 6 (100.0%) |" in out
    assert "| ask what the test set asks | 1 (16.7%) |" in out
    assert "Both ask: hotpot 3?" in out
    assert json.loads(out.splitlines()[-1])["id"] == "h0"
    assert err == ""


def test_convert(nq, tmp_path, capsys):
    for name in ("a.parquet", "b.jsonl"):
        out = tmp_path / "deep" / name
        assert run("convert", nq, out) == 0
        assert capsys.readouterr().out.endswith(f"{out}: 8 questions\n")
        assert read_questions(out).rows == read_questions(nq).rows
        assert run("convert", nq, out) == 1
        assert capsys.readouterr().err == f"mempo data: {out} exists: name another file, or overwrite it.\n"
    test = write(tmp_path / "t.jsonl", {"question": "NQ 3?", "answer": "x"})
    assert run("convert", nq, out, "--overwrite", "--exclude", test) == 0
    assert "  left out: 1: a test set asks it, too" in capsys.readouterr().out
    assert [row["id"] for row in read_questions(out).rows] == list("0124567")
    assert run("convert", nq, out, "--overwrite", "--exclude", nq) == 1
    assert "no question is left: --exclude asks all of them" in capsys.readouterr().err
    assert len(read_questions(out).rows) == 7


def test_convert_by_columns(tmp_path, capsys):
    source = write(tmp_path / "q.jsonl", {"ask": {"text": "Who?"}, "gold": "Ann", "key": "k"})
    columns = ["--question-column", "ask.text", "--answers-column", "gold", "--id-column", "key"]
    assert run("convert", source, tmp_path / "o.jsonl") == 1
    assert "The columns are ask, gold, key: no known schema has those" in capsys.readouterr().err
    assert run("convert", source, tmp_path / "o.jsonl", *columns) == 0
    assert read_questions(tmp_path / "o.jsonl").rows == [
        {"id": "k", "question": "Who?", "answers": [["Ann"]], "source": "q"}
    ]


def test_compose(nq, hotpotqa, tmp_path, capsys):
    out = tmp_path / "train.parquet"
    test = write(tmp_path / "t.jsonl", {"question": "Hotpot 3", "answer": "x"})
    command = ["compose", nq, hotpotqa, "--objectives", 2, 4, "--number", 6, "--across-sources", "--exclude", test]
    assert run(*command, "--out", out) == 0
    said = capsys.readouterr().out
    assert f"{hotpotqa}: 6 of 7 rows are kept" in said
    assert "6 questions are made of 13 (8 1×, 5 2×)\n  not used: 1: a test set asks it, too" in said
    assert "| 2 objectives | 3 (50.0%) |" in said
    rows = read_questions(out).rows
    assert sorted(len(row["answers"]) for row in rows) == [2, 2, 2, 4, 4, 4]
    assert any(len(set(row["part_sources"])) == 2 for row in rows)
    again = tmp_path / "again.jsonl"
    assert run(*command, "--out", again) == 0
    assert read_questions(again).rows == rows
    assert run(*command, "--out", again, "--overwrite", "--seed", 1, "--style", "numbered") == 0
    assert read_questions(again).rows[0]["question"].startswith("1. ")


def test_splits_by_name(tmp_path, capsys):
    for split in ("train", "test"):
        (tmp_path / "set").mkdir(exist_ok=True)
        rows = [{"question": f"{split} {n}?", "answer": "a"} for n in range(4)]
        write(tmp_path / "set" / f"{split}.jsonl", *rows, {"question": "both?", "answer": "a"})
    folder = tmp_path / "set"
    assert run("show", folder) == 1
    assert "several splits: say which to read (`split`): train, test" in capsys.readouterr().err
    out = tmp_path / "o.jsonl"
    assert run("compose", f"{folder}:train", "--objectives", 2, "--out", out, "--exclude", f"{folder}:test") == 0
    asked = [question for row in read_questions(out).rows for question in row["part_questions"]]
    assert sorted(asked) == ["train 0?", "train 1?", "train 2?", "train 3?"]
    assert run("convert", f"{folder}:train[1:3]", tmp_path / "sliced.jsonl") == 0
    assert [row["question"] for row in read_questions(tmp_path / "sliced.jsonl").rows] == ["train 1?", "train 2?"]
    capsys.readouterr()
    assert run("show", f"{folder}:train", "--split", "test") == 1
    assert f"{folder}:train names another split than --split test: give one of them" in capsys.readouterr().err
    write(folder / "hard.jsonl", {"question": "hard?", "answer": "a"})
    assert run("show", f"{folder}:train") == 0
    assert capsys.readouterr().err.startswith(f"mempo data: {folder}: these files belong to no split by their names")


def test_what_is_dropped_of_a_test_set_is_said(nq, hotpotqa, tmp_path, capsys):
    assert run("convert", nq, tmp_path / "o.jsonl", "--exclude", hotpotqa) == 0
    assert capsys.readouterr().err == f"mempo data: {hotpotqa}: 1 of 7 rows are dropped (1: it has no answer).\n"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["show", "{}/nowhere.jsonl"], "There is no file or folder"),
        (["show", "{}/nq.jsonl", "--split", "train"], "`split=train` belongs to a folder or a data set on the Hub"),
        (["show", "https://a.b/c.jsonl"], "https://a.b/c.jsonl is a URL"),
        (["show", "{}/nq.jsonl", "--aliases", "{}"], "is no file: name the id_aliases.json"),
        (["show", "{}/nq.jsonl", "--schema", "verl"], "`schema=verl` needs the column reward_model"),
        (["convert", "{}/nq.jsonl", "{}/o.csv"], "written to .parquet or .jsonl files"),
        (["compose", "{}/nq.jsonl", "--objectives", "9", "--out", "{}/o.jsonl"], "9 objectives need as many questions"),
        (["compose", "{}/nq.jsonl", "--objectives", "2", "--number", "0", "--out", "{}/o.jsonl"], "`number=0` is not"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else None,
)
def test_errors(nq, tmp_path, capsys, command, message):
    assert run(*[part.format(tmp_path) for part in command]) == 1
    error = capsys.readouterr().err
    assert error.startswith("mempo data: ")
    assert message in error
    assert error.count("\n") == 1
    assert not list(tmp_path.glob("o.*"))


def test_needs_no_torch(nq):
    code = (
        "import sys; from mempo_trl.cli import main; main(['data', 'show', sys.argv[1]]); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(nq)], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


def test_eval_says_what_is_dropped(hotpotqa, tmp_path, capsys):
    command = ["eval", str(tmp_path / "no-model"), str(hotpotqa), "--out", str(tmp_path / "run")]
    assert main([*command, "--max-questions", "1"]) == 1
    assert f"mempo eval: {hotpotqa}: 1 of 7 rows are dropped (1: it has no answer)." in capsys.readouterr().err
