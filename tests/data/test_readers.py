"""Question sets as they are published, and files that somebody has broken."""

import gzip
import json
import os
import subprocess
import sys
import warnings

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from served_data_sets import DataSets

from mempo_trl.data import FilesIgnored, QuestionsDropped, read_answers, read_questions
from mempo_trl.data.answers import Unusable, parse_answers, read_printed
from mempo_trl.data.schemas import SCHEMAS
from mempo_trl.evaluation.evaluator import load_questions
from mempo_trl.runs import check_questions


SEARCH_R1 = (
    "Answer the given question. You must conduct reasoning inside <think> and </think> first every time you get new "
    "information. If you find no further external knowledge needed, you can provide the answer inside <answer> "
    "and </answer>, without detailed illustrations. For example, <answer> Beijing </answer>. Question: "
)
MEM1 = (
    "You will answer multiple complex questions using iterative reasoning, summarization, and web search.\n\n"
    "Important:\n- Do not search multiple queries or questions simultaneously.\n\nAnswer the following questions: "
)
TEXT, TEXTS = pa.string(), pa.list_(pa.string())
PROMPT = pa.list_(pa.struct([("role", TEXT), ("content", TEXT)]))


def write_lines(path, *rows):
    text = "\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text, encoding="utf-8")
    return path


def write_parquet(path, rows, **types):
    pq.write_table(pa.Table.from_pylist(rows, schema=pa.schema(types) if types else None), path)
    return path


def with_configurations(folder):
    """Lay a folder out as a data set on the Hub."""
    card = "---\nconfigs:\n"
    for config in ("distractor", "fullwiki"):
        (folder / config).mkdir(parents=True)
        card += f"- config_name: {config}\n  data_files:\n"
        for split in ("train", "validation"):
            card += f"  - split: {split}\n    path: {config}/{split}-*\n"
            row = {"id": config, "question": f"{config} {split}?", "answer": "a", "level": "hard"}
            write_parquet(folder / config / f"{split}-00000-of-00001.parquet", [row])
    (folder / "README.md").write_text(card + "---\n")


def read(source, **options):
    """Read what must be read without a drop."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", QuestionsDropped)
        warnings.simplefilter("error", FilesIgnored)
        return read_questions(source, **options)


def read_dropping(source, **options):
    with pytest.warns(QuestionsDropped) as caught:
        questions = read_questions(source, **options)
    assert len(caught) == 1
    report = questions.report
    assert report.read == report.kept + report.dropped.total()
    assert report.kept == len(questions.rows)
    assert str(caught[0].message) == report.summary()
    return questions


def verl_row(prompt, target, **extra_info):
    return {
        "data_source": "nq",
        "prompt": [{"role": "user", "content": prompt}],
        "ability": "fact-reasoning",
        "reward_model": {"ground_truth": {"target": target}, "style": "rule"},
        "extra_info": {"split": "train", **extra_info},
    }


def verl_types(target=TEXTS, **extra_info):
    return {
        "data_source": TEXT,
        "prompt": PROMPT,
        "ability": TEXT,
        "reward_model": pa.struct([("ground_truth", pa.struct([("target", target)])), ("style", TEXT)]),
        "extra_info": pa.struct([("split", TEXT), *extra_info.items()]),
    }


class TestPublishedSchemas:
    def test_search_r1(self, tmp_path):
        # `datasets.map` keeps FlashRAG's columns beside the new ones.
        rows = [
            {
                "id": f"train_{n}",
                "question": question,
                "golden_answers": answers,
                **verl_row(f"{SEARCH_R1}{question}\n", answers, index=n),
            }
            for n, (question, answers) in enumerate(
                [("who wrote dune?", ["Frank Herbert"]), ("when did it appear?", ["1965", "August 1965"])]
            )
        ]
        types = {"id": TEXT, "question": TEXT, "golden_answers": TEXTS, **verl_types(index=pa.int64())}
        questions = read(write_parquet(tmp_path / "train.parquet", rows, **types))
        assert questions.report.schema == "verl"
        assert questions.rows == [
            {"id": "train_0", "question": "who wrote dune?", "answers": [["Frank Herbert"]], "source": "nq"},
            {"id": "train_1", "question": "when did it appear?", "answers": [["1965", "August 1965"]], "source": "nq"},
        ]
        without = [{name: row[name] for name in verl_types()} for row in rows]
        path = write_parquet(tmp_path / "bare.parquet", without, **verl_types(index=pa.int64()))
        assert [(row["id"], row["question"]) for row in read(path).rows] == [
            ("nq-0", "who wrote dune?"),
            ("nq-1", "when did it appear?"),
        ]

    def test_mem1(self, tmp_path):
        asked = "who wrote dune?; where is it set?; Question: what is this?"
        row = verl_row(f"{MEM1}{asked}\n", [["Frank Herbert"], ["Arrakis", "Dune"], ["a question"]], indices=[0, 1, 2])
        types = verl_types(pa.list_(TEXTS), indices=pa.list_(pa.int64()))
        (read_row,) = read(write_parquet(tmp_path / "train.parquet", [row], **types)).rows
        assert read_row["question"] == asked
        assert read_row["answers"] == [["Frank Herbert"], ["Arrakis", "Dune"], ["a question"]]
        assert "prompt" not in read_row

    def test_verl_with_tools(self, tmp_path):
        prompt = [
            {"role": "system", "content": "You are a helpful and harmless assistant."},
            {"role": "user", "content": f"{SEARCH_R1}who wrote dune?"},
        ]
        search = {"create_kwargs": {"ground_truth": {"target": ["Frank Herbert"]}, "question": "who wrote dune?"}}
        row = verl_row("", ["Frank Herbert"], index=7, question="who wrote dune?", tools_kwargs={"search": search})
        path = write_parquet(tmp_path / "train.parquet", [{**row, "prompt": prompt}])
        assert read(path).rows[0]["question"] == "who wrote dune?"
        del row["extra_info"]["question"]
        path = write_parquet(tmp_path / "other.parquet", [{**row, "prompt": prompt}])
        assert read(path).rows[0]["question"] == "who wrote dune?"

    @pytest.mark.parametrize(
        "truth",
        [
            {"target": "Paris"},
            {"target": ["Paris"]},
            {"target": [["Paris"]]},
            "Paris",
            json.dumps({"target": ["Paris"]}),
            json.dumps(["Paris"]),
            {"target": np.array(["Paris"], dtype=object)},
            {"target": np.array([np.array(["Paris"], dtype=object)], dtype=object)},
        ],
        ids=repr,
    )
    def test_verl_targets(self, truth):
        row = {**verl_row("Where?", None), "reward_model": {"ground_truth": truth}}
        questions = read([row])
        assert (questions.rows[0]["question"], questions.rows[0]["answers"]) == ("Where?", [["Paris"]])
        assert questions.report.notes["its whole prompt is taken for the question: no instructions were found in it"]

    def test_verl_from_pandas(self, tmp_path):
        types = verl_types(pa.list_(TEXTS), index=pa.int64())
        path = write_parquet(tmp_path / "a.parquet", [verl_row("a?; b?", [["x"], ["y", "z"]], index=0)], **types)
        frame = pq.read_table(path).to_pandas()
        assert isinstance(frame["reward_model"][0]["ground_truth"]["target"], np.ndarray)
        assert read(frame.to_dict("records")).rows[0]["answers"] == [["x"], ["y", "z"]]

    @pytest.mark.parametrize("written", ["pandas", "json", "python"])
    def test_verl_as_a_table_of_texts(self, tmp_path, written):
        types = verl_types(pa.list_(TEXTS), index=pa.int64())
        rows = [
            verl_row(f"{SEARCH_R1}a's?\n", [["x", 'the "y"'], ["it's"]], index=0),
            verl_row(f"{MEM1}b?; c?", [["p q"], ["r"]], index=1),
        ]
        path = write_parquet(tmp_path / "a.parquet", rows, **types)
        if written == "pandas":
            pq.read_table(path).to_pandas().to_csv(tmp_path / "a.csv", index=False)
        else:
            spell = json.dumps if written == "json" else repr
            cells = [{name: spell(value) for name, value in row.items()} for row in rows]
            cells = [{**cell, "data_source": "nq"} for cell in cells]
            pa.Table.from_pylist(cells).to_pandas().to_csv(tmp_path / "a.csv", index=False)
        questions = read(tmp_path / "a.csv")
        assert [(row["question"], row["answers"], row["source"]) for row in questions.rows] == [
            ("a's?", [["x", 'the "y"'], ["it's"]], "nq"),
            ("b?; c?", [["p q"], ["r"]], "nq"),
        ]

    def test_mem1_for_web_search(self):
        row = {**verl_row("Who?", None), "reward_model": {"ground_truth": "Ann<|answer_split|>Ann Lee"}}
        assert read([row]).rows[0]["answers"] == [["Ann", "Ann Lee"]]

    def test_flashrag(self, tmp_path):
        row = {"id": "dev_0", "question": "Who?", "golden_answers": ["Ann", "Bea"], "metadata": {"type": "bridge"}}
        for name in ("dev.jsonl", "dev.jsonl.gz"):
            questions = read(write_lines(tmp_path / name, row))
            assert questions.report.schema == "flashrag"
            assert questions.rows[0]["id"] == "dev_0"
            assert questions.rows[0]["answers"] == [["Ann", "Bea"]]

    def test_hotpotqa(self, tmp_path):
        row = {
            "question": "Were Scott Derrickson and Ed Wood of the same nationality?",
            "answer": "yes",
            "type": "comparison",
            "level": "hard",
        }
        published = {
            **row,
            "_id": "5a8b57f25542995d1e6f1371",
            "supporting_facts": [["Scott Derrickson", 0], ["Ed Wood", 0]],
            "context": [["Ed Wood (film)", ["Ed Wood is a 1994 film.", " It is in colour."]]],
        }
        path = tmp_path / "hotpot_dev_fullwiki_v1.json"
        path.write_text(json.dumps([published]))
        on_the_hub = {
            **row,
            "id": "5a8b57f25542995d1e6f1371",
            "supporting_facts": {"title": ["Scott Derrickson", "Ed Wood"], "sent_id": [0, 0]},
            "context": {"title": ["Ed Wood (film)"], "sentences": [["Ed Wood is a 1994 film."]]},
        }
        for source in (path, write_parquet(tmp_path / "hub.parquet", [on_the_hub])):
            questions = read(source)
            assert questions.report.schema == "hotpotqa"
            assert questions.rows[0]["id"] == "5a8b57f25542995d1e6f1371"
            assert questions.rows[0]["answers"] == [["yes"]]
        test = [{"_id": "1", "question": "Which?", "context": []}]
        path.write_text(json.dumps(test))
        with pytest.raises(ValueError, match=r"columns are _id, question, context: no known schema.*answers_column"):
            read_questions(path)

    def test_nq_open(self, tmp_path):
        row = {"question": "when was dune published", "answer": ["August 1965", "1965"]}
        questions = read(write_parquet(tmp_path / "validation-00000-of-00001.parquet", [row]))
        assert questions.report.schema == "nq_open"
        assert questions.rows[0]["answers"] == [["August 1965", "1965"]]
        assert questions.rows[0]["source"] == tmp_path.name

    @pytest.mark.parametrize("lists", [True, False])
    def test_natural_questions(self, tmp_path, lists):
        def row(name, text, annotations):
            spans = [
                {"text": texts, "start_token": [3] * len(texts)}
                if lists
                else [{"text": part, "start_token": 3} for part in texts]
                for texts, _ in annotations
            ]
            yes_no = [value for _, value in annotations]
            if lists:
                found = {"id": ["7"] * len(spans), "short_answers": spans, "yes_no_answer": yes_no}
            else:
                found = [
                    {"id": "7", "short_answers": span, "yes_no_answer": value}
                    for span, value in zip(spans, yes_no, strict=True)
                ]
            document = {"title": "T", "html": "<p>"}
            return {"id": name, "document": document, "question": {"text": text, "tokens": []}, "annotations": found}

        rows = [
            row("1", "who wrote dune", [(["Frank Herbert"], -1), ([], -1), (["Herbert", "Frank Herbert"], -1)]),
            row("2", "is dune a novel", [([], 1), ([], -1), ([], 0)]),
            row("3", "what is dune about", [([], -1)]),
        ]
        questions = read_dropping(write_parquet(tmp_path / "default.parquet", rows))
        assert questions.report.schema == "natural_questions"
        assert [(r["id"], r["question"], r["answers"]) for r in questions.rows] == [
            ("1", "who wrote dune", [["Frank Herbert", "Herbert"]]),
            ("2", "is dune a novel", [["yes", "no"]]),
        ]
        assert questions.report.dropped == {"it has neither a short answer nor yes or no": 1}

    @pytest.mark.parametrize("simplified", [True, False])
    def test_natural_questions_as_google_has_them(self, tmp_path, simplified):
        """Short answers are spans of tokens there; the simplified files have the tokens in one text."""
        html = "<P> <B>Dune</B> appeared in August 1, 1965 .</P>"
        tokens = []
        pieces = ["<P>", "<B>", "Dune", "</B>", "appeared", "in", "August", "1", ",", "1965", ".", "</P>"]
        for piece in pieces:
            start = html.index(piece, tokens[-1]["end_byte"] if tokens else 0)
            tokens.append(
                {"token": piece, "html_token": "<" in piece, "start_byte": start, "end_byte": start + len(piece)}
            )
        if simplified:
            document = {"document_text": " ".join(pieces)}
        else:
            document = {"document_tokens": tokens, "document_html": html}

        def row(number, text, spans, yes_no="NONE"):
            short = [{"start_token": start, "end_token": end} for start, end in spans]
            annotation = {"annotation_id": 5, "short_answers": short, "yes_no_answer": yes_no}
            return {"example_id": number, "question_text": text, "annotations": [annotation], **document}

        path = write_lines(
            tmp_path / "v1.0-simplified.jsonl.gz",
            row(-7, "when did dune appear", [(6, 10)]),
            row(8, "what appeared", [(1, 4), (2, 3)]),
            row(9, "is dune a novel", [], "YES"),
            row(10, "who wrote dune", []),
            row(11, "what is outside", [(99, 100)]),
        )
        questions = read_dropping(path)
        assert questions.report.schema == "natural_questions"
        assert [(r["id"], r["question"], r["answers"]) for r in questions.rows] == [
            ("-7", "when did dune appear", [["August 1 , 1965" if simplified else "August 1, 1965"]]),
            ("8", "what appeared", [["Dune"]]),
            ("9", "is dune a novel", [["yes"]]),
        ]
        assert questions.report.dropped == {
            "it has neither a short answer nor yes or no": 1,
            "it has no answer": 1,
        }

    def test_2wiki(self, tmp_path):
        row = {
            "_id": "8813f87c0bdd11eba7f7acde48001122",
            "type": "compositional",
            "question": "Who is the mother of the director of film Polish-Russian War (Film)?",
            "context": [["Maheen Khan", ["Maheen Khan is a designer."]]],
            "entity_ids": "Q7226416_Q980",
            "supporting_facts": [["Polish-Russian War (film)", 1]],
            "evidences": [["Polish-Russian War", "director", "Xawery Żuławski"]],
            "answer": "Małgorzata Braunek",
            "evidences_id": [["Q7226416", "P57", "Q980"]],
            "answer_id": "Q274277",
        }
        path = tmp_path / "dev.json"
        path.write_text(json.dumps([row, {**row, "_id": "2", "question": "And who?", "answer_id": None}]))
        questions = read(path)
        assert questions.report.schema == "2wiki"
        assert questions.rows[0]["id"] == row["_id"]
        assert questions.rows[0]["answers"] == [["Małgorzata Braunek"]]
        names = write_lines(
            tmp_path / "id_aliases.json",
            {"Q_id": "Q274277", "aliases": ["Braunek", "Małgorzata Braunek"], "demonyms": []},
            {"Q_id": "Q36", "aliases": ["PL"], "demonyms": ["Pole"]},
        )
        assert [r["answers"] for r in read(path, aliases=names).rows] == [
            [["Małgorzata Braunek", "Braunek"]],
            [["Małgorzata Braunek"]],
        ]
        with pytest.raises(ValueError, match=r"`aliases=.*dev.json` needs the columns Q_id and aliases"):
            read_questions(path, aliases=path)
        path.write_text(json.dumps([{**row, "answer": "", "supporting_facts": [], "evidences": []}]))
        with pytest.raises(ValueError, match=r"1 of 1 rows are dropped \(1: it has no answer\). No question is left"):
            read_questions(path)

    def test_musique(self, tmp_path):
        row = {
            "id": "2hop__482757_12019",
            "paragraphs": [{"idx": 0, "title": "A", "paragraph_text": "B", "is_supporting": False}],
            "question": "When was the institute that owned The Collegian founded?",
            "question_decomposition": [{"id": 482757, "question": "The Collegian >> owned by", "answer": "HBU"}],
            "answer": "1960",
            "answer_aliases": ["the year 1960", "1960"],
            "answerable": True,
        }
        path = write_lines(
            tmp_path / "musique_full_v1.0_dev.jsonl",
            row,
            {**row, "answerable": False},
            {**row, "id": "2", "question": "Another?", "answer_aliases": []},
        )
        questions = read_dropping(path)
        assert questions.report.schema == "musique"
        assert [r["answers"] for r in questions.rows] == [[["1960", "the year 1960"]], [["1960"]]]
        assert questions.report.dropped == {"it is marked as not answerable": 1}
        assert "line 2: " in questions.report.examples["it is marked as not answerable"][0]

    def test_our_own(self, tmp_path):
        rows = [
            {"id": "a", "question": "Who?", "answers": ["Ann", "Bea"], "source": "mine"},
            {"id": "b", "question": "Who, and where?", "answers": [["Ann"], ["Rome", "Roma"]], "source": "mine"},
        ]
        questions = read(write_lines(tmp_path / "q.jsonl", *rows))
        assert questions.report.schema == "mempo"
        assert questions.rows == [{**rows[0], "answers": [["Ann", "Bea"]]}, rows[1]]
        assert [row["answers"] for row in check_questions(questions.rows)] == [[["Ann", "Bea"]], rows[1]["answers"]]
        conversation = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who?"}]
        (row,) = read([{"prompt": conversation, "answers": ["Ann"]}]).rows
        assert (row["question"], row["prompt"]) == ("Who?", conversation)
        (row,) = read([{"prompt": "Who?", "answers": ["Ann"]}]).rows
        assert row["question"] == "Who?"
        assert "prompt" not in row
        followups = [[{"role": "user", "content": opening}, {"role": "user", "content": "Why?"}] for opening in "ab"]
        assert len(read([{"prompt": prompt, "answers": ["x"]} for prompt in followups]).rows) == 2

    def test_squad_and_triviaqa(self):
        squad = {"id": "1", "question": "Who?", "answers": {"text": ["Ann", "Ann"], "answer_start": [3, 9]}}
        assert read([squad]).rows[0]["answers"] == [["Ann"]]
        trivia = {"question_id": "1", "question": "Who?", "answer": {"value": "Ann", "aliases": ["Ann Lee"]}}
        assert read([trivia]).rows[0]["answers"] == [["Ann", "Ann Lee"]]


class TestChoosing:
    def test_named_columns(self, tmp_path):
        rows = [{"ask": {"text": "Who?"}, "gold": {"names": ["Ann"]}, "key": 7}]
        path = write_parquet(tmp_path / "a.parquet", rows)
        options = {"question_column": "ask.text", "answers_column": "gold.names", "id_column": "key"}
        assert read(path, **options).rows == [{"id": "7", "question": "Who?", "answers": [["Ann"]], "source": "a"}]
        verl = verl_row("Who?", ["Ann"])
        assert read([verl], answers_column="reward_model.ground_truth.target").rows[0]["answers"] == [["Ann"]]
        both = {"question": "Who?", "query": "Who is it?", "answer": "Ann"}
        assert read([both], question_column="query").rows[0]["question"] == "Who is it?"
        assert read([{"query": "Who is it?", "answer": "Ann"}], question_column="query").report.schema == "nq_open"
        assert read([{"a.b": "Who?", "c.d": "Ann"}], question_column="a.b", answers_column="c.d").rows

    def test_named_schema(self):
        row = {"question": "Who?", "answers": ["Ann"], "golden_answers": ["Bea"], "answer": "Cid"}
        assert [read([row], schema=name).rows[0]["answers"][0][0] for name in ("mempo", "flashrag", "nq_open")] == [
            "Ann",
            "Bea",
            "Cid",
        ]
        assert read([row], answers_column="golden_answers").rows[0]["answers"] == [["Bea"]]
        with pytest.raises(ValueError, match=r"the rows: The columns are .* may be 'mempo' or 'flashrag' or 'nq_open'"):
            read_questions([row])
        with pytest.raises(ValueError, match=r"`schema=verl` needs the column reward_model, but the columns are quest"):
            read_questions([row], schema="verl")
        with pytest.raises(ValueError, match=r"`schema=nope` is not known: auto, mempo, verl"):
            read_questions([row], schema="nope")

    @pytest.mark.parametrize("name", ["question_column", "answers_column", "id_column"])
    def test_columns_that_are_not_there(self, name):
        row = {"question": "Who?", "answers": {"a": ["Ann"]}}
        for column in ("nope", "answers.nope"):
            with pytest.raises(ValueError, match=f"`{name}={column}` is not there, the columns are question, answers"):
                read_questions([row], **{name: column})

    def test_only_the_answers_are_named(self):
        with pytest.raises(ValueError, match=r"the columns are ask, gold. Name the one of the questions, too"):
            read_questions([{"ask": "Who?", "gold": "Ann"}], answers_column="gold")

    def test_answers_that_lead_on(self):
        with pytest.raises(ValueError, match=r"mapping: name the column in it \(of target, style\), with a dot"):
            read_questions([{"question": "Who?", "gt": {"target": [1], "style": "x"}}], answers_column="gt")

    def test_every_schema_is_documented(self):
        for name, schema in SCHEMAS.items():
            assert schema.name == name
            assert {c for group in schema.needs for c in group} <= set(schema.columns)


class TestRows:
    def test_what_is_dropped(self, tmp_path):
        good = {"question": "Who?", "answers": ["Ann"]}
        bad = [
            ({"question": None}, "it has no question"),
            ({"question": " \t"}, "it has no question"),
            ({"question": 5}, "its question is a int, not a text"),
            ({"answers": None}, "it has no answer"),
            ({"answers": []}, "it has no answer"),
            ({"answers": [[]]}, "it has no answer"),
            ({"answers": ["", " ", None]}, "it has no answer"),
            ({"answers": [["x"], []]}, "an objective of it has no answer"),
            ({"answers": [["x"], None]}, "an objective of it has no answer"),
            ({"answers": [["x"], "y"]}, "its answers mix texts and lists"),
            ({"answers": [[["x"]]]}, "an answer of it is a list, neither text nor number"),
            ({"answers": float("nan")}, "it has no answer"),
            ({"answers": ["\ud800"]}, "it has half a character (a lone surrogate)"),
            ({"question": "\udfff?"}, "it has half a character (a lone surrogate)"),
            (
                {"prompt": [{"role": "system", "content": "\udfff"}, {"role": "user", "content": "Who?"}]},
                "it has half a character (a lone surrogate)",
            ),
            ({"question": "Who?"}, "the question is there already, with the same answers"),
        ]
        rows = [{"id": n, **good, "question": f"Question {n}?", **change} for n, (change, _) in enumerate(bad)]
        path = write_lines(tmp_path / "q.jsonl", good, *rows, {"question": "No answers"}, {"answers": ["No question"]})
        report = read_dropping(path).report
        assert report.kept == 1
        expected = [reason for _, reason in bad] + ["it has no answer", "it has no question"]
        assert report.dropped == {reason: expected.count(reason) for reason in expected}
        shown = str(report)
        assert shown.startswith(f"{path}: 1 of 19 rows are kept, schema mempo")
        assert f'  dropped: 6: it has no answer\n    {path}, line 5: {{"id": 3, "question": "Question 3?"' in shown
        assert all(len(examples) <= 3 for examples in report.examples.values())
        assert "\ud800" not in shown

    @pytest.mark.parametrize(
        ("value", "expected"),
        [
            ("Paris", [["Paris"]]),
            (" Paris\n", [["Paris"]]),
            (1965, [["1965"]]),
            (1965.0, [["1965"]]),
            (2.5, [["2.5"]]),
            (10**30, [[str(10**30)]]),
            (0, [["0"]]),
            (True, [["yes"]]),
            ([False], [["no"]]),
            (np.bool_(True), [["yes"]]),
            (np.int64(3), [["3"]]),
            (["a", "", None, "b", "a"], [["a", "b"]]),
            (["Caf\u00e9", "Cafe\u0301"], [["Caf\u00e9"]]),
            ((["a"], ("b", "c")), [["a"], ["b", "c"]]),
            ('["a", "b"]', [["a", "b"]]),
            ('[["a"], ["b", "c"]]', [["a"], ["b", "c"]]),
            ("['a', \"b's\"]", [["a", "b's"]]),
            ("['a' 'b']", [["a", "b"]]),
            ("['a'\n \"b's\" 'c, d']", [["a", "b's", "c, d"]]),
            ("array(['a', 'b'], dtype=object)", [["a", "b"]]),
            ("array(['a', 'b'],\n      dtype='<U5')", [["a", "b"]]),
            ("[array(['a', 'b'], dtype=object) array(['c'], dtype=object)]", [["a", "b"], ["c"]]),
            ("[list(['a', 'b']) list(['c'])]", [["a", "b"], ["c"]]),
            ("[np.str_('a'), np.str_('b')]", [["a", "b"]]),
            ("[5]", [["[5]"]]),
            ("array", [["array"]]),
            ("['a' b]", [["['a' b]"]]),
            ("['a'", [["['a'"]]),
            ("'a'] 'b'", [["'a'] 'b'"]]),
            ("[sic]", [["[sic]"]]),
            ("[" * 5000, [["[" * 5000]]),
            ("{a}", [["{a}"]]),
        ],
        ids=lambda value: repr(value)[:30],
    )
    def test_answers(self, value, expected):
        assert parse_answers(value)[0] == expected

    @pytest.mark.parametrize("value", [b"Paris", {"target": ["Paris"]}, [{"a": 1}], "[]", "[[]]", {}])
    def test_no_answers(self, value):
        with pytest.raises(Unusable):
            parse_answers(value)

    @settings(deadline=None, max_examples=200)
    @given(
        value=st.recursive(
            st.text(max_size=6) | st.integers() | st.booleans() | st.none(),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
            max_leaves=8,
        )
    )
    def test_what_is_printed_is_read(self, value):
        assert read_printed(repr(value)) == value
        assert read_printed(json.dumps(value)) == value

    @given(texts=st.lists(st.lists(st.text(max_size=6), min_size=1, max_size=3), min_size=1, max_size=3))
    def test_what_numpy_prints_is_read(self, texts):
        arrays = np.empty(len(texts), dtype=object)
        for index, inner in enumerate(texts):
            arrays[index] = np.array(inner, dtype=object)
        assert read_printed(str(arrays)) == texts
        assert read_printed(repr({"target": arrays})) == {"target": texts}

    @given(text=st.text(alphabet="[](){},:'\" ab1u\\\n", max_size=30))
    def test_whatever_is_printed(self, text):
        read_printed(text)

    def test_read_answers_names_the_column(self):
        assert read_answers({"a": {"b": "Paris"}}, "a.b") == [["Paris"]]
        with pytest.raises(ValueError, match=r"`answers_column=a.c`: there is no 'c' in the row"):
            read_answers({"a": {"b": "Paris"}}, "a.c")
        with pytest.raises(ValueError, match=r"`answers_column=a`: it has no answer in the row"):
            read_answers({"a": None}, "a")

    def test_a_question_that_is_there_already(self):
        rows = [
            {"id": 1, "question": "Who is Caf\u00e9?", "answers": ["Ann"]},
            {"id": 2, "question": "Who  is Cafe\u0301? ", "answers": ["Ann"]},
            {"id": 3, "question": "Who is Caf\u00e9?", "answers": ["Bea", "Ann"]},
            {"id": 4, "question": "Who is Caf\u00e9?", "answers": [["Ann"], ["Bea"]]},
            {"id": 5, "question": "Who is cafe?", "answers": ["Cid"]},
        ]
        questions = read_dropping(rows)
        assert [(row["id"], row["answers"]) for row in questions.rows] == [("1", [["Ann", "Bea"]]), ("5", [["Cid"]])]
        assert questions.report.dropped == {
            "the question is there already, with the same answers": 1,
            "the question is there already: its other answers are accepted there, too": 1,
            "the question is there already, with another number of objectives": 1,
        }

    def test_ids(self):
        names = ["train_0", "train_0", None, "", "rows-2", 7, 7.0, "train_0-2", True, "train_0"]
        rows = [{"id": name, "question": f"{n}?", "answer": "a"} for n, name in enumerate(names)]
        questions = read(rows)
        ids = [row["id"] for row in questions.rows]
        assert ids[:2] == ["train_0", "train_0-2"]
        assert ids[2:4] == ["questions-2", "questions-3"]
        assert len(set(ids)) == len(ids)
        assert questions.report.notes == {"an id that is taken: got a number": 4}
        assert read(rows, id_column="id").report.notes["without an id: called by source and number"] == 3

    def test_many_rows_of_one_id_take_no_quadratic_time(self):
        # Twenty thousand rows that each looked through all before would need minutes.
        rows = [{"id": "x", "question": f"{n}?", "answers": [str(n)]} for n in range(20_000)]
        assert len({row["id"] for row in read(rows).rows}) == 20_000

    def test_blank_answers_beside_others_are_noted(self):
        questions = read([{"question": "Who?", "answers": ["Ann", "", None]}])
        assert "1: with blank accepted answers: left out" in str(questions.report)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["text", "value", "aliases", "target", "ground_truth", "question", "role", "content", "short_answers"]
            ),
            inner,
            max_size=3,
        )
    ),
    max_leaves=8,
)


class TestWhateverComes:
    @settings(deadline=None, max_examples=100)
    @given(data=st.data())
    @pytest.mark.parametrize("name", SCHEMAS)
    def test_rows_are_read_or_dropped(self, name, data):
        columns = st.sampled_from([*SCHEMAS[name].columns, *SCHEMAS[name].ids, SCHEMAS[name].source or "source"])
        good = {column: None for group in SCHEMAS[name].needs for column in group}
        rows = [{**good, **data.draw(st.dictionaries(columns, JSON, max_size=6))} for _ in range(3)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", QuestionsDropped)
            try:
                questions = read_questions(rows, schema=name)
            except ValueError as error:
                assert "3 of 3 rows are dropped" in str(error)
                return
        checked = check_questions(questions.rows)
        assert [row["answers"] for row in checked] == [row["answers"] for row in questions.rows]
        assert questions.report.read == 3 == questions.report.kept + questions.report.dropped.total()
        str(questions.report).encode()
        json.dumps(questions.rows, ensure_ascii=False).encode()

    def test_evaluation_is_not_silent(self, tmp_path):
        path = write_lines(tmp_path / "q.jsonl", {"question": "Who?", "answer": "Ann"}, {"question": "Where?"})
        with pytest.warns(QuestionsDropped, match=r"1 of 2 rows are dropped \(1: it has no answer\)"):
            assert len(load_questions(str(path))) == 1


class TestFiles:
    def test_byte_order_mark_windows_lines_and_blank_lines(self, tmp_path):
        path = tmp_path / "q.jsonl"
        rows = [json.dumps({"question": f"{n}?", "answer": "a"}) for n in range(2)]
        path.write_bytes(b"\xef\xbb\xbf" + f"{rows[0]}\r\n\r\n \t\n{rows[1]}".encode())
        assert len(read(path).rows) == 2
        path.write_bytes(b"\xef\xbb\xbf\n" + rows[0].encode())
        assert len(read(path).rows) == 1
        path = tmp_path / "q.json"
        path.write_bytes(b"\xef\xbb\xbf" + f"[{rows[0]},\r\n{rows[1]}]".encode())
        assert len(read(path).rows) == 2

    @pytest.mark.parametrize(
        ("line", "reason"),
        [
            ("not JSON", "is not JSON"),
            ('{"question": "cut', "is not JSON"),
            ("[" * 100_000, "is not JSON"),
            ('{"id": ' + "9" * 5000 + "}", "is not JSON"),
            ("[1]", "this is a list"),
            ("null", "this is a NoneType"),
            ('"text"', "this is a str"),
        ],
        ids=lambda value: value[:20],
    )
    @pytest.mark.parametrize("name", ["q.jsonl", "q.jsonl.gz"])
    @pytest.mark.parametrize("before", [1, 200])
    def test_bad_line(self, tmp_path, name, line, reason, before):
        good = [{"question": f"{n}?", "answer": "a"} for n in range(before)]
        path = write_lines(tmp_path / name, *good, line)
        with pytest.raises(ValueError, match=reason) as error:
            read_questions(path)
        assert str(error.value).startswith(f"{path}, line {before + 1}: ")

    def test_broken_encodings(self, tmp_path):
        path = tmp_path / "q.jsonl"
        path.write_bytes(b'{"question": "\xff", "answer": "a"}\n')
        with pytest.raises(ValueError, match=r"q.jsonl, line 1: the line is not JSON in UTF-8"):
            read_questions(path)
        path = tmp_path / "q.csv"
        path.write_bytes(b"question,answer\nWho?,\xff\n")
        with pytest.raises(ValueError, match=r"q.csv is not text in UTF-8"):
            read_questions(path)

    def test_damaged_files(self, tmp_path):
        rows = [{"question": f"{n}?", "answer": f"text {n}"} for n in range(1000)]
        path = write_lines(tmp_path / "q.jsonl.gz", *rows)
        path.write_bytes(path.read_bytes()[:-12])
        with pytest.raises(ValueError, match=r"q.jsonl.gz is cut short or damaged after line \d+"):
            read_questions(path)
        path = tmp_path / "q.json.gz"
        path.write_bytes(gzip.compress(json.dumps(rows).encode())[:-12])
        with pytest.raises(ValueError, match=r"q.json.gz is cut short or damaged"):
            read_questions(path)
        path = write_parquet(tmp_path / "q.parquet", rows)
        path.write_bytes(path.read_bytes()[:-30])
        with pytest.raises(ValueError, match=r"q.parquet is no Parquet file, or damaged"):
            read_questions(path)

    def test_json(self, tmp_path):
        row = {"question": "Who?", "answer": "Ann"}
        path = tmp_path / "q.json"
        for content in ([row], {"data": [row]}, {"version": "1", "data": [row]}, row):
            path.write_text(json.dumps(content, indent=2))
            assert [r["question"] for r in read(path).rows] == ["Who?"]
        Dataset.from_list([row, {**row, "question": "Where?"}]).to_json(path)  # one object a line
        assert [r["question"] for r in read(path).rows] == ["Who?", "Where?"]
        for content, message in (
            ("[{", "is not JSON in UTF-8"),
            ("", "is not JSON in UTF-8"),
            ("5", "must hold a list of questions, but it holds a int"),
            ("[5]", r"q.json, entry 1: a question is an object with named columns, but this is a int"),
            ("[]", "q.json has no rows"),
            ("{}", "must hold a list of questions, but it holds a dict"),
        ):
            path.write_text(content)
            with pytest.raises(ValueError, match=message):
                read_questions(path)

    def test_tables(self, tmp_path):
        path = tmp_path / "q.csv"
        path.write_bytes(
            b'\xef\xbb\xbfquestion,answer\r\n"Who, then?","[""Ann"", ""Bea""]"\r\n\r\n"Two\r\nlines?",Cid\r\n'
        )
        assert [(row["question"], row["answers"]) for row in read(path).rows] == [
            ("Who, then?", [["Ann", "Bea"]]),
            ("Two\r\nlines?", [["Cid"]]),
        ]
        path = tmp_path / "q.tsv"
        path.write_text("question\tanswer\nWho?\t['Ann', 'Bea']\n" + "x" * 200_000 + "\tlong\n")
        assert [row["answers"] for row in read(path).rows] == [[["Ann", "Bea"]], [["long"]]]
        for content, message in (
            ("question\tanswer\nWho?\tAnn\tBea\n", "line 2: the row has 3 cells, but the header names 2"),
            ('question\tanswer\n"Who?\tAnn\n', "line 2: the row cannot be read"),
            ("question\tanswer\tanswer\n", "line 1: the header names the column 'answer' twice"),
            ("", "q.tsv has no rows"),
        ):
            path.write_text(content)
            with pytest.raises(ValueError, match=message):
                read_questions(path)

    def test_rows_of_one_file_with_different_keys(self, tmp_path):
        rows = [
            {"question": "Who?", "answer": "Ann", "level": "hard"},
            {"question": "Where?", "answer": ["Rome"], "id": "x"},
            {"answer": "Ann"},
        ]
        questions = read_dropping(write_lines(tmp_path / "q.jsonl", *rows))
        assert questions.report.schema == "hotpotqa"
        assert [row["answers"] for row in questions.rows] == [[["Ann"]], [["Rome"]]]

    def test_only_the_columns_that_are_needed_are_read(self, tmp_path):
        path = tmp_path / "q.parquet"
        rows = [{"question": f"{n}?", "answer": "a", "context": "x" * 100_000} for n in range(3000)]
        pq.write_table(pa.Table.from_pylist(rows), path, compression="zstd", use_dictionary=False)
        code = (
            "import sys, resource; from mempo_trl.data import read_questions; import pyarrow.parquet;"
            "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss;"
            "assert len(read_questions(sys.argv[1]).rows) == 3000;"
            "assert 'torch' not in sys.modules;"
            "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
        )
        done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
        assert int(done.stdout) < 150_000  # kilobytes; the column alone has 300,000

    def test_what_is_not_there(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        for source in ("q.jsonl", tmp_path / "q", "../q", "a/b/c"):
            with pytest.raises(FileNotFoundError, match="There is no file or folder"):
                read_questions(source)
        with pytest.raises(ValueError, match=r"https://a.b/q.jsonl is a URL: download the file and name that"):
            read_questions("https://a.b/q.jsonl")
        (tmp_path / "q.txt").write_text("Who?")
        with pytest.raises(ValueError, match=r"Questions are in .jsonl, .* files, but q.txt is none of them"):
            read_questions("q.txt")
        path = write_lines(tmp_path / "q.jsonl", {"question": "Who?", "answer": "Ann"})
        for name in ("split", "config", "revision"):
            with pytest.raises(ValueError, match=f"`{name}=train` belongs to a folder or a data set on the Hub"):
                read_questions(path, **{name: "train"})

    def test_an_empty_file(self, tmp_path):
        (tmp_path / "q.jsonl").write_text("\n")
        with pytest.raises(ValueError, match=r"q.jsonl has no rows"):
            read_questions(tmp_path / "q.jsonl")


class TestFolders:
    def test_splits(self, tmp_path):
        row = {"question": "Who?", "answer": "Ann"}
        write_lines(tmp_path / "train.jsonl", row, {**row, "question": "Where?"})
        assert len(read(tmp_path).rows) == 2
        assert read(tmp_path).rows[0]["source"] == tmp_path.name
        write_lines(tmp_path / "dev.jsonl", row)
        with pytest.raises(ValueError, match=r"has several splits: say which to read \(`split`\): train, validation"):
            read_questions(tmp_path)
        for split in ("dev", "validation"):
            assert len(read(tmp_path, split=split).rows) == 1
        with pytest.raises(ValueError, match=r"`split=test` is not a split of .*: train, validation"):
            read_questions(tmp_path, split="test")

    def test_files_of_no_split(self, tmp_path):
        row = {"question": "Who?", "answer": "Ann"}
        for name in ("train.jsonl", "dev.jsonl", "id_aliases.json", ".hidden.jsonl"):
            write_lines(tmp_path / name, row)
        (tmp_path / "dataset_infos.json").write_text("{}")
        message = "these files belong to no split by their names and are not read: id_aliases.json. Name the file"
        with pytest.warns(FilesIgnored, match=message) as caught:
            assert len(read_questions(tmp_path, split="train").rows) == 1
        assert caught[0].filename == __file__

    def test_slices(self, tmp_path):
        for part, numbers in (("train-0", range(4)), ("train-1", range(4, 10)), ("dev", range(10, 12))):
            write_lines(tmp_path / f"{part}.jsonl", *({"question": f"{n}?", "answer": "a"} for n in numbers))
        for split, expected in (
            ("train[:2]", [0, 1]),
            ("train[3:5]", [3, 4]),
            ("train[-1:]", [9]),
            ("train[50%:]", [5, 6, 7, 8, 9]),
            ("dev[:1]", [10]),
            ("dev[:1]+train[:1]", [10, 0]),
            ("train+validation", list(range(12))),
        ):
            questions = read(tmp_path, split=split)
            assert [row["question"] for row in questions.rows] == [f"{n}?" for n in expected], split
        for split in ("train[x]", "train[:500%]", "train[2"):
            with pytest.raises(ValueError, match=r"`split=train.*` cannot be read: "):
                read_questions(tmp_path, split=split)
        with pytest.raises(ValueError, match=r"`split=test\[:2\]` is not a split of .*: train, validation"):
            read_questions(tmp_path, split="test[:2]")

    def test_a_card_that_is_no_yaml(self, tmp_path):
        write_lines(tmp_path / "train.jsonl", {"question": "Who?", "answer": "Ann"})
        (tmp_path / "README.md").write_text("---\nconfigs: [\n---\n")
        with pytest.raises(ValueError, match=r"README.md: what stands between its lines of dashes is not YAML: "):
            read_questions(tmp_path)

    def test_shards(self, tmp_path):
        for n in range(3):
            write_lines(tmp_path / f"part-{n}.jsonl", {"question": f"{n}?", "answer": "a"})
        (tmp_path / "notes.txt").write_text("text")
        questions = read(tmp_path)
        assert [row["question"] for row in questions.rows] == ["0?", "1?", "2?"]
        assert questions.report.source == f"{tmp_path} (3 files)"

    def test_a_bad_line_is_named(self, tmp_path):
        write_lines(tmp_path / "train.jsonl", {"question": "Who?", "answer": "Ann"}, "oops")
        with pytest.raises(ValueError, match=r"train.jsonl, line 2: the line is not JSON"):
            read_questions(tmp_path)

    def test_configurations(self, tmp_path):
        with_configurations(tmp_path)
        questions = read(tmp_path, config="fullwiki", split="validation")
        assert [row["question"] for row in questions.rows] == ["fullwiki validation?"]
        message = r"there are several configurations: say which to read \(`config`\): distractor, fullwiki"
        with pytest.raises(ValueError, match=message):
            read_questions(tmp_path)
        with pytest.raises(ValueError, match=r"`config=nope` is not a configuration of it: distractor, fullwiki"):
            read_questions(tmp_path, config="nope")
        with pytest.raises(ValueError, match=r"has several splits: .*: train, validation"):
            read_questions(tmp_path, config="distractor")

    def test_nothing_in_it(self, tmp_path):
        with pytest.raises(ValueError, match=r"holds no .jsonl"):
            read_questions(tmp_path)
        (tmp_path / "notes.txt").write_text("text")
        with pytest.raises(ValueError, match=r"holds no .jsonl"):
            read_questions(tmp_path)


class TestTheHub:
    """In processes that take a stand-in on the loopback for the Hub."""

    CODE = """
import sys, json
from mempo_trl.data import read_questions

for options in json.loads(sys.argv[1]):
    try:
        print(json.dumps(read_questions("owner/hotpot", **options).rows))
    except (ValueError, OSError) as error:
        print(type(error).__name__, error)
try:
    read_questions("owner/other")
except (ValueError, OSError) as error:
    print(type(error).__name__, error)
"""

    def run(self, tmp_path, options, **environment):
        done = subprocess.run(
            [sys.executable, "-c", self.CODE, json.dumps(options)],
            env={**os.environ, "HF_HOME": str(tmp_path / "home"), **environment},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout.splitlines()

    def test_reads(self, tmp_path):
        with_configurations(tmp_path / "repo")
        options = [
            {"config": "fullwiki", "split": "validation"},
            {"config": "fullwiki", "split": "train[:1]", "revision": "main"},
            {},
            {"config": "nope"},
            {"config": "fullwiki"},
            {"config": "fullwiki", "split": "test"},
        ]
        with DataSets({"owner/hotpot": tmp_path / "repo"}) as served:
            lines = self.run(tmp_path, options, HF_ENDPOINT=served.url, HF_HUB_OFFLINE="0")
        row = {"id": "fullwiki", "question": "fullwiki validation?", "answers": [["a"]], "source": "hotpot"}
        assert json.loads(lines[0]) == [row]
        assert json.loads(lines[1]) == [{**row, "question": "fullwiki train?"}]
        assert lines[2:] == [
            "ValueError owner/hotpot: there are several configurations: say which to read (`config`): distractor, "
            "fullwiki.",
            "ValueError owner/hotpot: `config=nope` is not a configuration of it: distractor, fullwiki.",
            "ValueError owner/hotpot has several splits: say which to read (`split`): train, validation.",
            "ValueError `split=test` is not a split of owner/hotpot: train, validation.",
            lines[-1],
        ]
        assert lines[-1].startswith(
            "FileNotFoundError There is no file or folder owner/other, and no data set of that name on the Hub: "
        )
        # What was read once is read again without a network.
        assert self.run(tmp_path, options[:1], HF_HUB_OFFLINE="1")[0] == lines[0]
