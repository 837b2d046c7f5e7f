"""Questions in the schemas that the field publishes, and in what people make of them."""

import gzip
import json
import warnings

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mempo_trl.data import read_questions, readers
from mempo_trl.data.readers import SCHEMAS, read_answers


VERL = [  # Search-R1's nq_hotpotqa_train
    {
        "id": "train_0",
        "question": "total number of death row inmates in the us?",
        "golden_answers": ["2,718"],
        "data_source": "nq",
        "prompt": [{"role": "user", "content": "Answer the given question. … Question: total number of …?\n"}],
        "ability": "fact-reasoning",
        "reward_model": {"style": "rule", "ground_truth": {"target": ["2,718"]}},
        "extra_info": {"index": 0, "split": "train"},
    }
]
COMPOSED = [  # several objectives, the question in the prompt alone
    {
        "data_source": "nq_hotpotqa_train_multi_2",
        "prompt": [
            {"role": "system", "content": "Question: not this one"},
            {
                "role": "user",
                "content": "Question: neither this. Answer all.\nQuestion: who wrote Dune?; where is Lima?\nGo!",
            },
        ],
        "ability": "fact-reasoning",
        "reward_model": {"style": "rule", "ground_truth": {"target": [["Frank Herbert", "Herbert"], ["Peru"]]}},
        "extra_info": {"index": 7, "split": "train"},
    }
]
FLASHRAG = [
    {"id": "test_0", "question": "who got the first nobel prize in physics", "golden_answers": ["Röntgen", "W. R."]}
]
HOTPOTQA_HUB = [
    {
        "id": "5a7a06935542990198eaf050",
        "question": "Which magazine was started first, A or B?",
        "answer": "A",
        "type": "comparison",
        "level": "medium",
        "supporting_facts": {"title": ["A", "B"], "sent_id": [0, 0]},
        "context": {"title": ["A"], "sentences": [["A is a magazine."]]},
    }
]
HOTPOTQA_FILE = [
    {
        "_id": "5a8b57f25542995d1e6f1371",
        "answer": "yes",
        "question": "Were they of the same nationality?",
        "supporting_facts": [["Scott", 0]],
        "context": [["Scott", ["…"]]],
        "type": "comparison",
        "level": "hard",
    }
]
NQ_OPEN = [
    {"question": "when was the last time anyone was on the moon", "answer": ["14 December 1972 UTC", "December 1972"]}
]


def natural_question(short_answers, yes_no):
    return {
        "id": "797803103760793766",
        "document": {"title": "Google", "url": "https://…"},
        "question": {"text": "who founded google", "tokens": ["who", "founded", "google"]},
        "annotations": {
            "id": ["1", "2"],
            "long_answer": [{"start_token": 1}, {"start_token": 1}],
            "short_answers": short_answers,
            "yes_no_answer": yes_no,
        },
    }


NATURAL = [
    natural_question(
        [{"start_token": [1], "text": ["Larry Page", "Sergey Brin"]}, {"start_token": [], "text": []}], [-1, -1]
    )
]
TWO_WIKI = [
    {
        "_id": "8813f87c0bdd11eba7f7acde48001122",
        "type": "compositional",
        "question": "Who is the mother of the director of film Polish-Russian War?",
        "context": [["Xawery Żuławski", ["…"]]],
        "supporting_facts": [["Xawery Żuławski", 0]],
        "evidences": [["Polish-Russian War", "director", "Xawery Żuławski"]],
        "answer": "Małgorzata Braunek",
    }
]
MUSIQUE = [
    {
        "id": "2hop__482757_12019",
        "paragraphs": [{"idx": 0, "title": "t", "paragraph_text": "p", "is_supporting": False}],
        "question": "When was the institute founded?",
        "question_decomposition": [{"id": 1, "question": "q", "answer": "a", "paragraph_support_idx": None}],
        "answer": "1960",
        "answer_aliases": ["in 1960", "1960"],
        "answerable": True,
    }
]
OWN = [{"id": "a", "question": "q?", "answers": [["x"], ["y", "z"]]}]
SQUAD = [
    {"id": "s", "title": "t", "context": "c", "question": "q?", "answers": {"text": ["x", "y"], "answer_start": [1, 2]}}
]


def write(folder, rows, kind="jsonl", name="questions"):
    file = folder / f"{name}.{kind}"
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), file)
    elif kind == "json":
        file.write_text(json.dumps(rows))
    elif kind == "jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif kind == "jsonl.gz":
        file.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    return file


@pytest.mark.parametrize(
    ("rows", "kinds", "schema", "name", "question", "answers"),
    [
        (VERL, "parquet jsonl", "verl", "train_0", "total number of death row inmates in the us?", [["2,718"]]),
        (COMPOSED, "parquet", "verl", "0", "who wrote Dune?; where is Lima?", [["Frank Herbert", "Herbert"], ["Peru"]]),
        (FLASHRAG, "jsonl jsonl.gz", "flashrag", "test_0", FLASHRAG[0]["question"], [["Röntgen", "W. R."]]),
        (HOTPOTQA_HUB, "parquet", "hotpotqa", HOTPOTQA_HUB[0]["id"], HOTPOTQA_HUB[0]["question"], [["A"]]),
        (HOTPOTQA_FILE, "json", "hotpotqa", HOTPOTQA_FILE[0]["_id"], HOTPOTQA_FILE[0]["question"], [["yes"]]),
        (NQ_OPEN, "jsonl parquet", "plain", "0", NQ_OPEN[0]["question"], [["14 December 1972 UTC", "December 1972"]]),
        (
            NATURAL,
            "parquet",
            "natural_questions",
            NATURAL[0]["id"],
            "who founded google",
            [["Larry Page", "Sergey Brin"]],
        ),
        (TWO_WIKI, "json", "2wikimultihopqa", TWO_WIKI[0]["_id"], TWO_WIKI[0]["question"], [["Małgorzata Braunek"]]),
        (MUSIQUE, "jsonl parquet", "musique", MUSIQUE[0]["id"], MUSIQUE[0]["question"], [["1960", "in 1960"]]),
        (OWN, "jsonl parquet json", "own", "a", "q?", [["x"], ["y", "z"]]),
        (SQUAD, "parquet", "own", "s", "q?", [["x", "y"]]),
    ],
)
def test_published_schemas(tmp_path, rows, kinds, schema, name, question, answers):
    for kind in kinds.split():
        file = write(tmp_path, rows, kind)
        for asked in ("auto", schema):
            found = read_questions(file, schema=asked)
            assert found.report.schema == schema
            [row] = found.rows
            assert (row["id"], row["question"], row["answers"]) == (name, question, answers)
    if schema == "verl":
        assert row["source"] == rows[0]["data_source"]
    else:
        assert row["source"] == file.name


@pytest.mark.parametrize("truth", ["x", ["x"], {"target": "x"}, {"target": ["x"]}, '["x"]'])
def test_ways_to_write_a_ground_truth(tmp_path, truth):
    row = {"prompt": "who?", "reward_model": {"style": "rule", "ground_truth": truth}}
    [found] = read_questions(write(tmp_path, [row], "parquet")).rows
    assert (found["question"], found["answers"]) == ("who?", [["x"]])


def test_prompts_and_answers_of_mem1(tmp_path):
    prompt = (
        "You will answer multiple questions. <answer>one; two</answer>\nAnswer the following questions: who?; where?\n"
    )
    row = {
        "prompt": [{"role": "user", "content": prompt}],
        "reward_model": {"style": "rule", "ground_truth": "x<|answer_split|>y"},
    }
    [found] = read_questions(write(tmp_path, [row], "parquet")).rows
    assert (found["question"], found["answers"]) == ("who?; where?", [["x"], ["y"]])


def test_yes_and_no_of_natural_questions(tmp_path):
    nothing = {"start_token": [], "text": []}
    rows = [natural_question([nothing, nothing], yes_no) for yes_no in ([-1, 1], [0, -1], [-1, -1])]
    for number, row in enumerate(rows):
        row["question"]["text"] += str(number)
    with pytest.warns(UserWarning, match="1 without a short answer"):
        found = read_questions(write(tmp_path, rows, "parquet"))
    assert [row["answers"] for row in found.rows] == [[["yes"]], [["no"]]]
    # Google's own files have a list of annotations
    row = {
        "example_id": 5,
        "question": "who?",
        "annotations": [{"short_answers": [{"text": "me"}], "yes_no_answer": "NONE"}],
    }
    [read] = read_questions(write(tmp_path, [row], "jsonl", "google")).rows
    assert (read["id"], read["answers"]) == ("5", [["me"]])


def test_columns_of_ones_own(tmp_path):
    rows = [{"q": {"text": "who?"}, "gold": {"all": ["x", 3, True, None, " "]}, "key": 9, "answer": "no"}]
    file = write(tmp_path, rows)
    found = read_questions(file, question_column="q.text", answers_column="gold.all", id_column="key")
    assert found.rows == [{"id": "9", "question": "who?", "answers": [["x", "3", "yes"]], "source": file.name}]
    assert found.report.schema == "columns"
    # one column may be named beside a schema that gives the other
    flashrag = write(tmp_path, [{**FLASHRAG[0], "rephrased": "whose?"}], name="both")
    [row] = read_questions(flashrag, question_column="rephrased").rows
    assert (row["question"], row["answers"]) == ("whose?", [["Röntgen", "W. R."]])
    for columns, sentence in (
        ({}, "not known which column .* has the answers: name it .answers_column.. Its columns are: q, gold, key"),
        ({"answers_column": "gold.all"}, "not known which column .* has the questions"),
        (
            {"answers_column": "gold.none"},
            "There is no column 'gold.none' in .*; its columns are: q, gold, key, answer",
        ),
        ({"schema": "verl"}, "is not in the schema verl: there is no column reward_model"),
        ({"schema": "vrel"}, "`schema='vrel'` is not allowed: it must be auto, verl"),
        ({"split": "train"}, "is a file: leave out split"),
        ({"max_rows": 0}, "`max_rows=0` is not allowed"),
    ):
        with pytest.raises(ValueError, match=sentence):
            read_questions(file, **columns)


def test_nothing_is_dropped_silently(tmp_path):
    rows = [
        {"question": "a?", "answers": ["x"]},
        {"question": " a?  ", "answers": ["x"]},  # again
        {"question": "a?", "answers": ["y"]},  # again, otherwise
        {"question": "caf\u00e9?", "answers": ["x"]},
        {"question": "cafe\u0301?", "answers": ["x"]},  # the same to a reader
        {"question": "", "answers": ["x"]},
        {"question": None, "answers": ["x"]},
        {"question": "b?", "answers": []},
        {"question": "c?", "answers": [["x"], []]},
        {"question": "d?", "answers": ["", "  ", None]},
        {"question": "e?", "answers": None},
        {"question": "f?", "answers": [{"x": 1}]},
        {"question": "g?", "answers": float("nan")},
    ]
    with pytest.warns(UserWarning, match="2 of 13 rows, read as own; dropped: ") as warned:
        found = read_questions(write(tmp_path, rows))
    assert [row["question"] for row in found.rows] == ["a?", "caf\u00e9?"]
    assert found.report.dropped == {
        "with the question of a row before": 2,
        "with the question of a row before, but other answers": 1,
        "without a question": 2,
        "without an answer": 5,
        "with answers that are no texts": 1,
    }
    assert len(warned) == 1
    assert "5 without an answer (such as {" in str(found.report)
    with pytest.raises(ValueError, match=r"No row can be used. .*1 without an answer"):
        read_questions(write(tmp_path, [{"question": "q", "answer": None}]))
    unanswerable = [MUSIQUE[0], {**MUSIQUE[0], "question": "else?", "answerable": False}]
    with pytest.warns(UserWarning, match="1 that cannot be answered"):
        assert len(read_questions(write(tmp_path, unanswerable)).rows) == 1


def test_every_id_is_used_once(tmp_path):
    ids = ["x", "x", "x#2", None, "", "x", 4]
    rows = [{"id": name, "question": f"q{n}?", "answer": "a"} for n, name in enumerate(ids)]
    assert [row["id"] for row in read_questions(write(tmp_path, rows)).rows] == [
        "x",
        "x#2",
        "x#2#2",
        "3",
        "4",
        "x#3",
        "4#2",
    ]


def test_odd_files(tmp_path):
    file = tmp_path / "odd.jsonl"
    file.write_bytes(
        b'\xef\xbb\xbf{"question": "q?", "answer": "a"}\r\n\r\n{"question": "r?", "other": 1, "answer": "b"}'
    )
    assert [row["question"] for row in read_questions(file).rows] == ["q?", "r?"]
    for content, sentence in (
        (b'{"question": "q?", "answer": "a"}\n{"question"', "Line 2 of .*odd.jsonl is no row"),
        (b'{"question": "q?", "answer": "a"}\n[1]\n', "Line 2 of .* is no row .it is no object"),
        (b'{"question": "q?", "answer": "a"}\n{"question": "q2?"}\n', "Row 1 of .* has no column 'answer'"),
        (b"[" * 100_000, "Line 1 of .*"),
        (b"\xff\xfe", "Line 1 of .*"),
        (b"", "has no rows"),
    ):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=sentence):
            read_questions(file)
    (tmp_path / "lines.json").write_text('{"question": "q?"}\n{"question": "r?"}\n')
    with pytest.raises(ValueError, match=r"it has one JSON object a line, so name it \.jsonl"):
        read_questions(tmp_path / "lines.json")
    (tmp_path / "data.json").write_text(json.dumps({"data": NQ_OPEN}))
    assert len(read_questions(tmp_path / "data.json").rows) == 1
    (tmp_path / "none.parquet").write_text("x")
    with pytest.raises(ValueError, match="is no Parquet file, or damaged"):
        read_questions(tmp_path / "none.parquet")
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"question": "q?", "answer": "a"}\n' * 99)[:-9])
    with pytest.raises(ValueError, match="is damaged after line"):
        read_questions(tmp_path / "cut.jsonl.gz")
    (tmp_path / "x.txt").write_text("x")
    with pytest.raises(ValueError, match="in no form that is known"):
        read_questions(tmp_path / "x.txt")
    for missing in (tmp_path / "missing.jsonl", "./missing", "missing.parquet"):
        with pytest.raises(FileNotFoundError, match="There is no file, folder or data set"):
            read_questions(missing)


def test_folders(tmp_path):
    write(tmp_path, NQ_OPEN, "jsonl", "train")
    assert len(read_questions(tmp_path).rows) == 1
    (tmp_path / "data").mkdir()
    for part, row in enumerate((NQ_OPEN[0], {"question": "other?", "answer": ["x"]})):
        write(tmp_path / "data", [row], "parquet", f"dev-0000{part}-of-00002")
    with pytest.raises(ValueError, match="several splits: name one of train, validation as split"):
        read_questions(tmp_path)
    with pytest.raises(ValueError, match="no split 'test': name one of train, validation"):
        read_questions(tmp_path, split="test")
    for split in ("dev", "validation"):
        assert len(read_questions(tmp_path, split=split).rows) == 2
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"There is no \.jsonl, .*file in"):
        read_questions(tmp_path / "empty")


def test_a_data_set_with_configurations(tmp_path):
    for config in ("distractor", "fullwiki"):
        (tmp_path / config).mkdir()
        for split in ("train", "validation"):
            row = {**HOTPOTQA_HUB[0], "id": f"{config} {split}"}
            write(tmp_path / config, [row], "parquet", split)
    lines = ["---", "configs:"]
    for config in ("distractor", "fullwiki"):
        lines += [f"- config_name: {config}", "  data_files:"]
        for split in ("train", "validation"):
            lines += [f"  - split: {split}", f"    path: {config}/{split}.parquet"]
    (tmp_path / "README.md").write_text("\n".join([*lines, "---", ""]))
    with pytest.raises(ValueError, match="several configurations: name one of distractor, fullwiki as config"):
        read_questions(tmp_path)
    with pytest.raises(ValueError, match="several splits: name one of train, validation as split"):
        read_questions(tmp_path, config="fullwiki")
    [row] = read_questions(tmp_path, config="fullwiki", split="validation").rows
    assert row["id"] == "fullwiki validation"


def test_only_the_first_rows(tmp_path):
    rows = [{"question": f"{n}?", "answer": "a"} for n in range(10)]
    rows[5] = {"question": "without the column"}
    assert len(read_questions(write(tmp_path, rows), max_rows=5).rows) == 5


def test_answers_that_begin_with_a_bracket(tmp_path):
    assert read_answers({"a": "[sic] x"}, "a") == [["[sic] x"]]
    assert read_answers({"a.b": "dotted name"}, "a.b") == [["dotted name"]]


def test_every_schema_is_documented():
    assert all(f"| `{name}`" in readers.__doc__ for name in SCHEMAS)


def test_a_clean_source_warns_of_nothing(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read_questions(write(tmp_path, OWN))
