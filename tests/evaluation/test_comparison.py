import json
import math
import random
import subprocess
import sys

import numpy as np
import pytest
from run_records import record

from mempo_trl.evaluation.comparison import COMPARED, compare, comparison_markdown, read_run


def write_run(folder, lines):
    folder.mkdir(exist_ok=True)
    (folder / "trajectories.jsonl").write_bytes(b"".join(lines))
    return folder


def encode(made):
    return json.dumps(made, ensure_ascii=False).encode() + b"\n"


class TestReadRun:
    def test_round_trip(self, tmp_path):
        run = [record("a", "Zürich 東京\u2028x"), record("a", None, sample=1), record("b", 'a "b" \n')]
        assert read_run(write_run(tmp_path, map(encode, run))) == run
        assert read_run(str(tmp_path)) == run

    def test_every_truncation_of_the_last_line(self, tmp_path):
        run = [record("a"), record("b", "é")]
        first, last = map(encode, run)
        for length in range(len(last)):
            assert read_run(write_run(tmp_path, [first, last[:length]])) == run[:1], length

    def test_nothing_written_yet(self, tmp_path):
        assert read_run(write_run(tmp_path, [])) == []

    @pytest.mark.parametrize("broken", [b'{"id": "a"\n', b"\n", b'"\xff"\n', b"\x00\x00\n"])
    def test_malformed_line(self, tmp_path, broken):
        write_run(tmp_path, [encode(record("a")), broken, encode(record("b"))])
        with pytest.raises(ValueError, match=r"Line 2 of .*trajectories\.jsonl is damaged"):
            read_run(tmp_path)

    def test_a_malformed_last_line_with_its_newline(self, tmp_path):
        with pytest.raises(ValueError, match="Line 2 of"):
            read_run(write_run(tmp_path, [encode(record("a")), b'{"id"\n']))

    def test_a_line_that_is_no_record(self, tmp_path):
        with pytest.raises(ValueError, match=r"Line 2 of .* is damaged \(KeyError\('sample'\)\)"):
            read_run(write_run(tmp_path, [encode(record("a")), b'{"id": "b"}\n']))
        with pytest.raises(ValueError, match=r"Line 1 of .* is damaged"):
            read_run(write_run(tmp_path, [b"[1]\n"]))
        with pytest.raises(ValueError, match=r"Line 1 of .*: The record of question 'b' has no field"):
            read_run(write_run(tmp_path, [b'{"id": "b", "sample": 0, "steps": []}\n']))

    def test_no_run(self, tmp_path):
        with pytest.raises(FileNotFoundError, match=r"There is no trajectories\.jsonl in .*nowhere"):
            read_run(tmp_path / "nowhere")


def quantile(values, share):
    values = sorted(values)
    place = share * (len(values) - 1)
    below = math.floor(place)
    above = min(below + 1, len(values) - 1)
    return values[below] + (place - below) * (values[above] - values[below])


def oracle(differences, confidence, resamples, seed):
    """Interval and p-value of one quantity, question by question."""
    rng = np.random.default_rng(seed)
    means = []
    for _ in range(resamples):
        drawn = [differences[index] for index in rng.integers(len(differences), size=len(differences))]
        means.append(math.fsum(drawn) / len(drawn))
    tail = (1 - confidence) / 2
    not_above = sum(mean <= 1e-9 for mean in means)
    not_below = sum(mean >= -1e-9 for mean in means)
    return {
        "difference": math.fsum(differences) / len(differences),
        "low": quantile(means, tail),
        "high": quantile(means, 1 - tail),
        "p_value": min(1, 2 * (min(not_above, not_below) + 1) / (resamples + 1)),
    }


def random_runs(seed):
    """Two runs with three and one to two samples, each with questions that the other lacks."""
    rng = random.Random(seed)
    runs = []
    for first, last, samples, right in ((0, 40, 3, 0.4), (5, 52, 2, 0.6)):
        run = []
        for number in range(first, last):
            for sample in range(samples if number % 7 else 1):
                prediction = "Paris" if rng.random() < right else rng.choice(["Paris town", "Rome", None])
                tokens = [(rng.randrange(500), rng.randrange(50)) for _ in range(rng.randint(1, 4))]
                run.append(record(f"q{number}", prediction, sample=sample, tokens=tokens))
        rng.shuffle(run)
        runs.append(run)
    return runs


def question_means(run):
    """{id: {quantity: mean over samples}}, from the fields of records alone."""
    questions = {}
    for made in run:
        steps = [step["prompt_tokens"] + step["completion_tokens"] for step in made["steps"]]
        values = {
            "exact_match": float(made["prediction"] == "Paris"),
            "f1": {"Paris": 1.0, "Paris town": 2 / 3}.get(made["prediction"], 0.0),
            "total_tokens": sum(steps),
            "peak_tokens": max(steps),
            "turns": len(steps),
        }
        questions.setdefault(made["id"], []).append(values)
    return {
        identifier: {key: sum(values[key] for values in samples) / len(samples) for key in COMPARED}
        for identifier, samples in questions.items()
    }


class TestCompare:
    @pytest.mark.parametrize(("seed", "confidence"), [(0, 0.95), (1, 0.5), (2, 0.99)])
    def test_equals_the_oracle(self, seed, confidence):
        a, b = random_runs(seed)
        found = compare(a, b, confidence=confidence, resamples=300, seed=11)
        assert json.loads(json.dumps(found)) == found
        means_a, means_b = question_means(a), question_means(b)
        shared = sorted(set(means_a) & set(means_b))
        assert (found["questions"], found["only_a"], found["only_b"]) == (35, 5, 12)
        for metric in COMPARED:
            values = [(means_a[identifier][metric], means_b[identifier][metric]) for identifier in shared]
            expected = {
                "a": math.fsum(left for left, _ in values) / len(values),
                "b": math.fsum(right for _, right in values) / len(values),
                **oracle([right - left for left, right in values], confidence, 300, 11),
            }
            assert found["metrics"][metric] == pytest.approx(expected, rel=1e-9, abs=1e-12), metric

        for outcome, sign in (("wins", 1), ("losses", -1), ("ties", 0)):
            expected_ids = [
                identifier
                for identifier in shared
                if np.sign(means_b[identifier]["exact_match"] - means_a[identifier]["exact_match"]) == sign
            ]
            assert [question["id"] for question in found[outcome]] == expected_ids
            assert expected_ids

    def test_outcomes_by_hand(self):
        a = [record("w", "Rome"), record("l"), record("t"), record("u", None)]
        b = [record("u", "Oslo"), record("t"), record("l", "Rome"), record("w", "x", sample=1), record("w")]
        found = compare(a, b, resamples=20)
        assert found["wins"] == [
            {
                "id": "w",
                "question": "What is w?",
                "answers": [["Paris"]],
                "exact_match_a": 0.0,
                "exact_match_b": 0.5,
                "predictions_a": ["Rome"],
                "predictions_b": ["Paris", "x"],
            }
        ]
        assert [question["id"] for question in found["losses"]] == ["l"]
        assert [question["id"] for question in found["ties"]] == ["t", "u"]
        assert found["metrics"]["exact_match"]["difference"] == pytest.approx((0.5 - 1) / 4)

    def test_a_run_with_itself(self):
        run = random_runs(0)[0]
        for metric in compare(run, run, resamples=50)["metrics"].values():
            assert metric["difference"] == metric["low"] == metric["high"] == 0.0
            assert metric["p_value"] == 1.0

    def test_b_is_better_everywhere(self):
        a = [record(f"q{number}", "Rome") for number in range(10)]
        b = [record(f"q{number}") for number in range(10)]
        found = compare(a, b, resamples=99)["metrics"]["exact_match"]
        assert (found["difference"], found["low"], found["high"]) == (1.0, 1.0, 1.0)
        assert found["p_value"] == pytest.approx(2 / 100)

    def test_swapping_the_runs_turns_the_signs(self):
        a, b = random_runs(4)
        forth, back = compare(a, b, resamples=200), compare(b, a, resamples=200)
        for metric in COMPARED:
            one, other = forth["metrics"][metric], back["metrics"][metric]
            assert one["difference"] == pytest.approx(-other["difference"])
            assert (one["low"], one["high"]) == pytest.approx((-other["high"], -other["low"]))
            assert one["p_value"] == other["p_value"]
        assert [question["id"] for question in forth["wins"]] == [question["id"] for question in back["losses"]]

    def test_pairing_removes_what_questions_have_in_common(self):
        # Questions differ by thousands of tokens, the runs by about ten on each.
        rng = random.Random(0)
        a, b = [], []
        for number in range(30):
            size = rng.randrange(10_000)
            a.append(record(f"q{number}", tokens=((size + 20, 0),)))
            b.append(record(f"q{number}", tokens=((size + 10 + rng.randrange(-3, 4), 0),)))
        found = compare(a, b, resamples=500)["metrics"]["total_tokens"]
        assert -13 <= found["low"] <= found["difference"] <= found["high"] <= -7

    def test_rounding_does_not_decide_the_p_value(self):
        # Thirds that cancel in exact arithmetic, but not always in floating point.
        a, b = [], []
        for number in range(6):
            solved = 1 if number % 2 else 2
            for sample in range(3):
                a.append(record(f"q{number}", "Paris" if sample < solved else "x", sample=sample))
                b.append(record(f"q{number}", "Paris" if sample < 3 - solved else "x", sample=sample))
        means = [1 / 3 if number % 2 else -1 / 3 for number in range(6)]
        expected = oracle(means, 0.95, 999, 0)["p_value"]
        assert compare(a, b, resamples=999)["metrics"]["exact_match"]["p_value"] == pytest.approx(expected)

    def test_p_values_of_equal_runs_are_spread_evenly(self):
        # Both runs are right with probability 0.5: about one p in ten is below 0.1.
        rng = random.Random(0)
        low = 0
        for seed in range(150):
            a, b = ([record(f"q{n}", rng.choice(["Paris", "x"])) for n in range(40)] for _ in range(2))
            low += compare(a, b, resamples=200, seed=seed)["metrics"]["exact_match"]["p_value"] < 0.1
        assert 4 <= low <= 32

    def test_scorer(self):
        a, b = [record("q", "the Paris")], [record("q", "Paris")]
        assert compare(a, b, resamples=5)["ties"]
        assert compare(a, b, resamples=5, scorer="mem1")["wins"]

    @pytest.mark.parametrize(
        ("a", "b", "options", "message"),
        [
            ([record("x")], [record("y")], {}, "runs share no question: a has 1, b has 1"),
            ([], [record("y")], {}, "runs share no question"),
            ([record("x")], [record("x", answers=[["Rome"]])], {}, "different answers for question 'x'"),
            ([record("x"), record("x")], [record("x")], {}, "two records for sample 0 of question 'x'"),
            ([record("x")], [record("x")], {"confidence": 0}, "`confidence=0` is not allowed"),
            ([record("x")], [record("x")], {"resamples": -1}, "`resamples=-1` is not allowed"),
            ([record("x")], [record("x")], {"scorer": "bleu"}, "scorer must be one of"),
        ],
    )
    def test_bad_arguments(self, a, b, options, message):
        with pytest.raises(ValueError, match=message):
            compare(a, b, **options)


class TestComparisonMarkdown:
    def test_table(self):
        a = [record("w", "Rome", tokens=((2000, 0),)), record("only a")]
        b = [record("w", tokens=((1000, 0), (500, 10)))]
        lines = comparison_markdown(compare(a, b, resamples=9)).splitlines()
        assert "questions in both runs: 1, left out: 1 (1 only in a, 0 only in b). In brackets: 95 % paired" in lines[0]
        assert lines[2:9] == [
            "|  | a | b | b - a | p |",
            "| --- | --- | --- | --- | --- |",
            "| EM % | 0.0 | 100.0 | 100.0 [100.0, 100.0] | 0.2000 |",
            "| F1 % | 0.0 | 100.0 | 100.0 [100.0, 100.0] | 0.2000 |",
            "| TT | 2,000 | 1,510 | -490 [-490, -490] | 0.2000 |",
            "| PT | 2,000 | 1,000 | -1,000 [-1,000, -1,000] | 0.2000 |",
            "| Turns | 1.00 | 2.00 | 1.00 [1.00, 1.00] | 0.2000 |",
        ]
        assert lines[10:14] == [
            "Wins (b has the higher exact match): 1",
            "",
            "| Id | Question | Answers | a | b |",
            "| --- | --- | --- | --- | --- |",
        ]
        assert lines[14] == "| w | What is w? | Paris | Rome | Paris |"
        assert lines[16:] == ["Losses (a has the higher exact match): 0", "", "Ties: 0"]

    def test_limit(self):
        a = [record(f"q{number:02}", "Rome") for number in range(25)]
        b = [record(f"q{number:02}") for number in range(25)]
        comparison = compare(a, b, resamples=9)
        assert comparison_markdown(comparison).count("What is") == 20
        assert "5 more are not listed." in comparison_markdown(comparison)
        assert comparison_markdown(comparison, limit=25).count("What is") == 25
        assert "not listed" not in comparison_markdown(comparison, limit=25)
        assert "What is" not in comparison_markdown(comparison, limit=0)
        with pytest.raises(ValueError, match="limit must not be negative"):
            comparison_markdown(comparison, limit=-1)

    def test_cells_hold_any_text(self):
        a = [
            record("q", "a|b\n<b>&amp;</b> *x* `y`", [["Paris", "Lutetia"], ["Rome"]]),
            record("q", None, [["Paris", "Lutetia"], ["Rome"]], 1),
        ]
        b = [record("q", "x" * 1000, [["Paris", "Lutetia"], ["Rome"]])]
        row = next(line for line in comparison_markdown(compare(a, b, resamples=9)).splitlines() if "What is" in line)
        assert row == (
            "| q | What is q? | Paris / Lutetia ; Rome | a\\|b &lt;b>&amp;amp;&lt;/b> \\*x\\* \\`y\\` // (none) "
            f"| {'x' * 119}… |"
        )


def test_evaluation_is_imported_without_torch():
    code = "import sys; sys.modules['torch'] = None\n"
    code += "import mempo_trl.evaluation.scorers, mempo_trl.evaluation.summary, mempo_trl.evaluation.comparison"
    subprocess.run([sys.executable, "-c", code], check=True)
