"""Questions of several objectives."""

from collections import Counter

import pyarrow.parquet as pq
import pytest
from datasets import load_dataset
from hypothesis import given, settings
from hypothesis import strategies as st

from mempo_trl.data import compose, read_questions, to_table, write_questions
from mempo_trl.data.columns import prepare_dataset


def questions(number, source="a"):
    return [
        {"id": f"{source}{n}", "question": f"{source} {n}?", "answers": [[f"{n}", f"no. {n}"]], "source": source}
        for n in range(number)
    ]


@given(
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=3),
    pools=st.lists(st.integers(6, 15), min_size=1, max_size=3),
    number=st.one_of(st.none(), st.integers(1, 60)),
    across=st.booleans(),
    seed=st.integers(0, 2**40),
)
@settings(max_examples=200, deadline=None)
def test_rows(sizes, pools, number, across, seed):
    rows = [row for n, pool in enumerate(pools) for row in questions(pool, "abc"[n])]
    by_id = {row["id"]: row for row in rows}
    composed = compose(rows, sizes, number=number, seed=seed, across_sources=across).rows
    assert composed == compose(rows, sizes, number=number, seed=seed, across_sources=across).rows
    if number is not None:
        assert len(composed) == number
        lengths = Counter(len(row["parts"]) for row in composed)
        share = Counter(sizes)
        for size, weight in share.items():
            assert abs(lengths[size] - number * weight / len(sizes)) <= weight
    for row in composed:
        assert len(set(row["parts"])) == len(row["parts"]) in sizes
        parts = [by_id[part] for part in row["parts"]]
        assert row["question"] == "; ".join(part["question"] for part in parts)
        assert row["answers"] == [part["answers"][0] for part in parts]
        sources = {part["source"] for part in parts}
        assert set(row["source"].split("+")) == sources
        if not across:
            assert len(sources) == 1
    uses = Counter(part for row in composed for part in row["parts"])
    for source in {"all"} if across else {row["source"] for row in rows}:
        pool = [row["id"] for row in rows if source in ("all", row["source"])]
        counts = [uses[name] for name in pool]
        assert max(counts) - min(counts) <= 1
        if number is None:
            assert max(counts) == 1 or len(pool) < max(sizes)
            assert counts.count(0) < max(sizes)
    assert len({row["id"] for row in composed}) == len(composed)


def test_the_same_on_every_machine():
    composed = compose(questions(6), 2, seed=3).rows
    assert [row["parts"] for row in composed] == [["a3", "a5"], ["a0", "a2"], ["a4", "a1"]]


def test_other_seeds_give_other_rows():
    assert compose(questions(20), 2, seed=1).rows != compose(questions(20), 2, seed=2).rows


def test_what_is_not_used_is_counted():
    rows = questions(4)
    rows += [
        {"id": "semicolon", "question": "which?", "answers": [["a; b"]], "source": "a"},
        {"id": "rescued", "question": "whose?", "answers": [["a; b", "ab"]], "source": "a"},
        {"id": "two", "question": "two?", "answers": [["a"], ["b"]], "source": "a"},
        {"id": "again", "question": " a  1?", "answers": [["1"]], "source": "b"},
    ]
    composition = compose(rows, 2, exclude=[{"question": "a 0?"}])
    assert composition.dropped == {
        "excluded": 1,
        'with ";" in every answer': 1,
        "with several objectives already": 1,
        "a second time": 1,
    }
    used = {
        part: answers for row in composition.rows for part, answers in zip(row["parts"], row["answers"], strict=True)
    }
    assert set(used) == {"a1", "a2", "a3", "rescued"}
    assert used["rescued"] == ["ab"]
    assert str(composition).startswith("2 rows; questions not used: 1 ")
    with pytest.raises(ValueError, match=r"There is no question to compose: 2 excluded"):
        compose(questions(2), 2, exclude=questions(2))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"objectives": 0}, "`objectives=0` is not allowed"),
        ({"objectives": []}, r"`objectives=\[\]` is not allowed"),
        ({"objectives": [2, "3"]}, "`objectives="),
        ({"objectives": 2, "number": 0}, "`number=0` is not allowed"),
        ({"objectives": 4}, "4 objectives need as many questions, but a has 3"),
        ({"objectives": 4, "across_sources": True}, "but all sources together have 3"),
    ],
)
def test_wrong_arguments(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        compose(questions(3), **arguments)


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_files_are_read_back_and_trained_on(tmp_path, kind):
    file = tmp_path / "new" / f"train.{kind}"
    rows = compose([*questions(9), *questions(8, "b")], [2, 3], seed=1).rows
    write_questions(rows, file)
    columns = ("id", "question", "answers", "source")
    assert read_questions(file).rows == [{name: row[name] for name in columns} for row in rows]
    loaded = load_dataset("parquet" if kind == "parquet" else "json", data_files=str(file), split="train")
    prepared = prepare_dataset(loaded, "train_dataset")
    assert prepared["answers"][:] == [row["answers"] for row in rows]
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_a_file_appears_whole_or_not_at_all(tmp_path, monkeypatch):
    file = tmp_path / "train.parquet"
    write_questions(questions(2), file)

    def fail(table, path, *more):
        path.write_bytes(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr(pq, "write_table", fail)
    with pytest.raises(OSError, match="No space left"):
        write_questions(questions(3), file)
    assert len(read_questions(file).rows) == 2
    assert [path.name for path in tmp_path.iterdir()] == [file.name]
    with pytest.raises(ValueError, match=r"must end in \.parquet or \.jsonl"):
        write_questions(questions(1), tmp_path / "x.csv")


def test_table():
    rows = compose([*questions(5), *questions(4, "b")], 2, seed=1).rows
    table = to_table(rows, [rows[0]])
    for line in (
        "| rows | 4 |",
        "| from a | 2 |",
        "| with 2 objectives | 4 |",
        "| words of a question: median, most | 4, 4 |",
        "| accepted answers of an objective: mean, most | 2.00, 2 |",
        "| uses of a question: least, most | 1, 1 |",
        "| in the other set too | 1 |",
    ):
        assert line in table.splitlines()
