"""Questions of several objectives: no part twice in one, all used about equally often, the same everywhere."""

import json
import re
import subprocess
import sys
from collections import Counter
from math import perm

import pyarrow.parquet as pq
import pytest
from datasets import load_dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from support import SMOLLM2_TEMPLATE, byte_tokenizer, tiny_llama

from mempo_trl import MemPOConfig, MemPOTrainer
from mempo_trl.data import compose, question_statistics, read_questions, write_questions
from mempo_trl.data.composing import part_questions, question_key, without
from mempo_trl.rewards import exact_match
from mempo_trl.runs import check_questions


def questions(number, source="nq"):
    return [
        {"id": f"{source}-{n}", "question": f"question {n} of {source}", "answers": [[f"a{n}"]], "source": source}
        for n in range(number)
    ]


class TestCompose:
    def test_in_one_line(self):
        rows = [
            {"id": "a", "question": "who wrote dune", "answers": [["Frank Herbert", "Herbert"]], "source": "nq"},
            {"id": "b", "question": "Where is\nit set?", "answers": [["Arrakis"]], "source": "hotpotqa"},
        ]
        (row,) = compose([rows], 2, across_sources=True).rows
        first, second = (0, 1) if row["part_ids"] == ["a", "b"] else (1, 0)
        asked = ["who wrote dune?", "Where is it set?"]
        assert row["question"] == f"{asked[first]}; {asked[second]}"
        assert row["answers"] == [rows[first]["answers"][0], rows[second]["answers"][0]]
        assert row["source"] == f"{rows[first]['source']}+{rows[second]['source']}"
        assert row["part_sources"] == [rows[first]["source"], rows[second]["source"]]
        (row,) = compose([rows], 2, across_sources=True, style="numbered").rows
        assert row["question"] == f"1. {asked[first]}\n2. {asked[second]}"
        assert compose([rows[:1]], 1).rows[0]["question"] == "who wrote dune"

    @settings(deadline=None, max_examples=200)
    @given(
        sizes=st.lists(st.integers(1, 30), min_size=1, max_size=4),
        counts=st.lists(st.integers(2, 6), min_size=1, max_size=3, unique=True),
        number=st.integers(1, 40),
        seed=st.integers(0, 5),
        across=st.booleans(),
    )
    def test_properties(self, sizes, counts, number, seed, across):
        sets = [questions(size, f"s{place}") for place, size in enumerate(sizes)]
        parts = {row["question"]: row for rows in sets for row in rows}
        pools = [sum(sizes)] if across else sizes
        options = {"number": number, "seed": seed, "across_sources": across}
        if max(counts) > max(pools):
            with pytest.raises(ValueError, match="objectives need as many questions, but"):
                compose(sets, counts, **options)
            return
        try:
            composition = compose(sets, counts, **options)
        except ValueError as error:
            # Of two questions only so many pairs can be made. For numbers as small as these, half of them is found.
            assert "is too many for so few questions" in str(error)
            assert 2 * number > min(perm(pool, count) for pool in pools for count in counts if pool >= count)
            return
        assert composition.rows == compose(iter(sets), iter(counts), **options).rows
        assert len(composition.rows) == number
        assert (
            len({row["id"] for row in composition.rows}) == len({row["question"] for row in composition.rows}) == number
        )
        shares = Counter(len(row["answers"]) for row in composition.rows)
        assert all(number // len(counts) <= shares[count] <= -(-number // len(counts)) for count in counts)
        used = Counter()
        for row in composition.rows:
            asked = row["part_questions"]
            assert len(set(asked)) == len(asked) == len(row["answers"])
            assert row["answers"] == [parts[question]["answers"][0] for question in asked]
            assert row["part_ids"] == [parts[question]["id"] for question in asked]
            assert row["part_sources"] == [parts[question]["source"] for question in asked]
            assert row["question"] == "; ".join(f"{question}?" for question in asked)
            assert across or len(set(row["part_sources"])) == 1
            used.update(asked)
        groups = [list(parts)] if across else [[row["question"] for row in rows] for rows in sets]
        for group in groups:
            times = [used[question] for question in group]
            assert max(times) - min(times) <= 1
        assert composition.uses == Counter(used[question] for question in parts)

    @settings(deadline=None)
    @given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=3), counts=st.sets(st.integers(1, 5), min_size=1))
    def test_each_once_by_default(self, sizes, counts):
        sets = [questions(size, f"s{place}") for place, size in enumerate(sizes)]
        try:
            composition = compose(sets, counts, across_sources=True)
        except ValueError:
            assert sum(sizes) < sum(counts)
            return
        used = Counter(question for row in composition.rows for question in row["part_questions"])
        assert set(used.values()) == {1}
        shares = Counter(len(row["answers"]) for row in composition.rows)
        assert set(shares.values()) == {sum(sizes) // sum(counts)}

    def test_sources_get_their_share(self):
        sets = [questions(900, "large"), questions(100, "small"), questions(3, "tiny")]
        rows = compose(sets, [2, 4], number=300).rows
        used = Counter(source for row in rows for source in row["part_sources"])
        assert abs(used["large"] / 900 - used["small"] / 100) < 0.05
        assert {len(row["answers"]) for row in rows if row["source"] == "tiny"} <= {2}

    def test_the_same_on_every_machine(self):
        """The ids are digests of the questions, so that these name all of it."""
        rows = compose([questions(6, "a"), questions(5, "b")], [2, 3], number=4, seed=1, across_sources=True).rows
        assert [row["id"] for row in rows] == PINNED
        code = (
            "import json, sys; from mempo_trl.data import compose;"
            "sets = json.load(sys.stdin);"
            "assert 'torch' not in sys.modules;"
            "print(*[r['id'] for r in compose(sets, [2, 3], number=4, seed=1, across_sources=True).rows])"
        )
        given = json.dumps([questions(6, "a"), questions(5, "b")])
        done = subprocess.run([sys.executable, "-c", code], input=given, capture_output=True, text=True, check=True)
        assert done.stdout.split() == PINNED

    def test_few_questions_are_dealt_anew(self):
        for pool in range(3, 9):
            number = pool * (pool - 1) // 2
            assert len({row["question"] for row in compose([questions(pool)], 2, number=number).rows}) == number

    def test_seeds_differ(self):
        made = {tuple(row["question"] for row in compose([questions(50)], 2, seed=seed).rows) for seed in range(5)}
        assert len(made) == 5

    def test_what_is_left_out(self):
        rows = [
            *questions(4),
            {"id": "several", "question": "a?; b?", "answers": [["x"], ["y"]], "source": "nq"},
            {"id": "own", "question": "c?", "answers": [["x"]], "prompt": [{"role": "user", "content": "c?"}]},
            {"id": "semicolon", "question": "d?", "answers": [["x; y", "x；y"]], "source": "nq"},
            {"id": "some", "question": "e?", "answers": [["x; y", "x"]], "source": "nq"},
            {"id": "again", "question": "Question 1, of the NQ?", "answers": [["x"]], "source": "other"},
            {"id": "tested", "question": "Who wrote Dune?", "answers": ["x"], "source": "nq"},
            {"id": "part", "question": "who is that", "answers": ["x"], "source": "nq"},
        ]
        tests = [
            [{"question": "who wrote dune", "answers": ["x"]}],
            compose([[*questions(1, "t"), rows[-1]]], 2, across_sources=True).rows,
        ]
        composition = compose([rows], 2, exclude=tests, across_sources=True)
        assert composition.dropped == {
            "it has several objectives already": 1,
            "it has a conversation of its own": 1,
            "all its accepted answers have a semicolon, which separates answers": 1,
            "another one asks it, too": 1,
            "a test set asks it, too": 2,
        }
        assert composition.notes == {"with accepted answers left out that have a semicolon": 1}
        assert composition.parts == 5
        accepted = {
            name: accepted
            for row in compose([rows], 2, number=5, across_sources=True).rows
            for name, accepted in zip(row["part_ids"], row["answers"], strict=True)
        }
        assert accepted["some"] == ["x"]
        assert "  not used: 2: a test set asks it, too\n    tested: Who wrote Dune?\n    part: who is that" in str(
            composition
        )
        assert "2 questions are made of 5 (1 0×, 4 1×)" in str(composition)
        # Alone, an answer may have a semicolon: nothing is separated.
        assert compose([[rows[6]]], 1).rows[0]["answers"] == [["x; y", "x；y"]]

    def test_the_answers_can_be_matched(self):
        for row in compose([questions(20)], [2, 4], number=10).rows:
            assert exact_match(" ; ".join(accepted[0] for accepted in row["answers"]), row["answers"]) == 1

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"objectives": 0}, "`objectives=0` is not allowed"),
            ({"objectives": []}, r"`objectives=\[\]` is not allowed"),
            ({"objectives": [2, 2]}, "each once"),
            ({"objectives": [True]}, "whole numbers"),
            ({"objectives": 2, "number": 0}, "`number=0` is not allowed"),
            (
                {"objectives": 2, "style": "rhymed"},
                "`style='rhymed'` is not allowed: it must be 'joined' or 'numbered'",
            ),
            (
                {"objectives": 5},
                r"source 'nq' has only 4. Mix sources \(`across_sources`\), or make `objectives` small",
            ),
            ({"objectives": 9, "across_sources": True}, "all sources together has only 7. Make `objectives` smaller"),
            ({"objectives": [2, 3, 4]}, "give `number`, to use some twice"),
            (
                {"objectives": 1, "number": 9, "across_sources": True},
                "`number=9` is too many for so few questions: 9 different ones were not found",
            ),
        ],
        ids=lambda value: str(value)[:50],
    )
    def test_bad_arguments(self, options, message):
        with pytest.raises(ValueError, match=message):
            compose([questions(4), questions(3, "b")], **options)

    @pytest.mark.parametrize(
        ("row", "message"),
        [
            ("Who?", 'Row 1 is no dictionary, but "Who?"'),
            ({"answers": ["a"]}, "Row 1 has no text in `question`"),
            ({"question": "Who?"}, "The column `answers` is None, not a list in row 1"),
            ({"question": "Who?", "answers": []}, "The column `answers` is empty in row 1"),
        ],
        ids=repr,
    )
    def test_rows_that_are_no_questions(self, row, message):
        good = {"question": "Where?", "answers": ["b"]}
        with pytest.raises(ValueError, match=re.escape(message)):
            compose([[good, row]], 1)

    def test_test_sets_without_answers(self):
        rows = [{"question": f"{n}?", "answers": ["a"]} for n in range(3)]
        assert len(compose([rows], 1, exclude=[[{"question": "1?"}]]).rows) == 2

    def test_nothing_to_compose_of(self):
        with pytest.raises(ValueError, match=r"There is no question to compose of \(none was given\)"):
            compose([], 2)
        with pytest.raises(ValueError, match=r"no question to compose of \(3: a test set asks it, too\)"):
            compose([questions(3)], 2, exclude=[questions(3)])

    def test_many_questions_and_many_sources(self):
        # A pass over all sources for each question would take minutes here.
        sets = [questions(4, f"source-{n}") for n in range(10_000)]
        assert len(compose(sets, 2).rows) == 20_000


PINNED = ["2-9879204c366e46f8", "2-12d63980e83fefe6", "3-d9d01843097abde7", "3-c0fd2969da598753"]


class TestFiles:
    @pytest.mark.parametrize("ending", ["parquet", "jsonl"])
    def test_are_read_back_as_they_were(self, tmp_path, ending):
        path = tmp_path / "deep" / f"train.{ending}"
        composition = compose([questions(30), questions(20, "ü\u2028x")], [2, 3], number=25, across_sources=True)
        composition.write(path)
        assert read_questions(path).rows == composition.rows
        assert read_questions(path).report.schema == "mempo"
        assert check_questions(composition.rows)[0]["answers"] == composition.rows[0]["answers"]
        with pytest.raises(FileExistsError, match=r"exists: name another file, or overwrite it"):
            composition.write(path)
        composition.write(path, overwrite=True)
        assert list(path.parent.iterdir()) == [path]

    @pytest.mark.parametrize("ending", ["parquet", "jsonl"])
    def test_conversations(self, tmp_path, ending):
        row = {
            "question": "Why?",
            "prompt": [{"role": "user", "content": "Why?"}],
            "answers": [["x"], ["y"]],
            "id": "a",
        }
        rows = [{**row, "source": "s"}]
        write_questions(rows, tmp_path / f"q.{ending}")
        assert read_questions(tmp_path / f"q.{ending}").rows == rows

    def test_where_they_cannot_be_written(self, tmp_path):
        with pytest.raises(ValueError, match=r"written to .parquet or .jsonl files, but .*q.csv is neither"):
            write_questions(questions(1), tmp_path / "q.csv")
        (tmp_path / "q.jsonl").mkdir()
        with pytest.raises(FileExistsError, match="is a folder"):
            write_questions(questions(1), tmp_path / "q.jsonl", overwrite=True)

    @pytest.mark.parametrize("ending", ["parquet", "jsonl"])
    def test_a_kill_leaves_the_old_file_or_the_new(self, tmp_path, ending):
        path = tmp_path / f"q.{ending}"
        write_questions(questions(3), path)
        code = (
            "import os, sys; from mempo_trl.data import write_questions\n"
            "class Rows(list):\n"
            "    def __iter__(self):\n"
            "        yield from super().__iter__()\n"
            "        if sys.argv[2] == 'jsonl': os._exit(9)\n"
            "    def __getitem__(self, where):\n"
            "        if where.start: os._exit(9)\n"
            "        return super().__getitem__(where)\n"
            "row = {'id': 'x', 'question': 'q', 'answers': [['a']], 'source': 's'}\n"
            "write_questions(Rows([row] * 20_000), sys.argv[1], overwrite=True)\n"
        )
        done = subprocess.run([sys.executable, "-c", code, str(path), ending], check=False)
        assert done.returncode == 9
        assert read_questions(path).rows == questions(3)
        assert len(list(tmp_path.iterdir())) == 2  # what was being written is there, too, under a hidden name
        assert len(read_questions(tmp_path).rows) == 3
        write_questions(questions(2), path, overwrite=True)
        assert list(tmp_path.iterdir()) == [path]

    def test_the_trainer_takes_them(self, tmp_path):
        path = tmp_path / "train.parquet"
        compose([questions(8)], [2, 3], number=4).write(path)
        tokenizer = byte_tokenizer(SMOLLM2_TEMPLATE)
        args = MemPOConfig(
            str(tmp_path / "run"),
            use_cpu=True,
            bf16=False,
            report_to="none",
            num_generations=2,
            per_device_train_batch_size=2,
            max_turn_length=8,
            max_steps=1,
        )
        dataset = load_dataset("parquet", data_files=str(path), split="train", cache_dir=str(tmp_path / "cache"))
        trainer = MemPOTrainer(tiny_llama(tokenizer), args=args, train_dataset=dataset, processing_class=tokenizer)
        trainer.train()
        assert trainer.state.global_step == 1

    def test_the_columns(self, tmp_path):
        compose([questions(4)], 2).write(tmp_path / "q.parquet")
        schema = pq.read_schema(tmp_path / "q.parquet")
        assert schema.names == ["id", "question", "answers", "source", "part_ids", "part_sources", "part_questions"]
        assert str(schema.field("answers").type).count("list<") == 2


class TestLeaks:
    @pytest.mark.parametrize(
        ("one", "other", "same"),
        [
            ("who wrote dune", "Who wrote Dune?", True),
            ("Who wrote the “Dune”?", "who wrote dune ?", True),
            ("Caf\u00e9?", "cafe\u0301", True),
            ("who wrote dune", "who wrote emma", False),
            ("???", "!!!", False),
        ],
    )
    def test_keys(self, one, other, same):
        assert (question_key(one) == question_key(other)) is same

    def test_parts(self):
        mem1 = {"question": "who wrote dune?; where is it set?", "answers": [["a"], ["b"]]}
        assert part_questions(mem1) == ["who wrote dune?", "where is it set?"]
        assert part_questions({**mem1, "answers": [["a"]]}) == [mem1["question"]]
        assert part_questions({**mem1, "answers": ["a", "b"]}) == [mem1["question"]]
        assert part_questions({**mem1, "answers": [["a"]] * 3}) == [mem1["question"]]
        assert without([mem1], [[{"question": "Where is it set", "answers": ["x"]}]]) == []
        assert without([mem1], [[{"question": "Where is it", "answers": ["x"]}]]) == [mem1]

    def test_statistics(self):
        rows = compose([questions(6), questions(6, "b|c")], [2, 4], across_sources=True).rows
        statistics = question_statistics(rows, questions(6))
        assert statistics.rows == statistics.objectives.total() == len(statistics.words) == 4
        assert statistics.objectives == {2: 2, 4: 2}
        assert statistics.accepted == [1] * 12
        assert statistics.shared == sum("nq" in row["part_sources"] for row in rows)
        table = statistics.to_markdown()
        assert "| questions | 4 |" in table
        assert "| 2 objectives | 2 (50.0%) |" in table
        assert "b\\|c" in table
        assert "Both ask: question " in table
        assert question_statistics(rows).shared is None
        assert question_statistics(rows, questions(6, "elsewhere")).shared == 0
        with pytest.raises(ValueError, match="There are no questions"):
            question_statistics([])
