import json
import math
import random

import numpy as np
import pytest
from run_records import record, texts

from mempo_trl.evaluation import summary
from mempo_trl.evaluation.summary import METRICS, bootstrap_means, interval_bounds, score_record, summarize, to_markdown


TWO = (("Paris",), ("Rome",))


class TestScoreRecord:
    def test_tokens_by_hand(self):
        # Every step reads its prompt anew: 100 + 20, 150 + 30 and 90 + 10 tokens.
        scores = score_record(record("q", tokens=((100, 20), (150, 30), (90, 10))))
        assert scores["total_tokens"] == 120 + 180 + 100 == 400
        assert scores["peak_tokens"] == 180
        assert scores["turns"] == 3

    def test_the_peak_is_of_one_step(self):
        # The longest prompt and the longest completion are in different steps.
        scores = score_record(record("q", tokens=((900, 1), (100, 850), (500, 402))))
        assert scores["peak_tokens"] == 950
        assert scores["total_tokens"] == 901 + 950 + 902

    def test_objectives(self):
        scores = score_record(record("q", "Paris town ; Rome", TWO))
        assert scores["objective_exact_match"] == [0.0, 1.0]
        assert scores["objective_f1"] == [pytest.approx(2 / 3), 1.0]
        assert scores["exact_match"] == 0.0
        assert scores["f1"] == pytest.approx(5 / 6)
        assert score_record(record("q", "Paris ; Rome", TWO))["exact_match"] == 1.0

    def test_scorer(self):
        repeated = record("q", "the very very good", [["very good"]])
        assert score_record(repeated, "squad")["f1"] == pytest.approx(4 / 5)
        assert score_record(repeated, "mem1")["f1"] == pytest.approx(4 / 5)  # {the, very, good} and {very, good}
        repeated["prediction"] = "very very good"
        assert score_record(repeated, "mem1")["f1"] == 1.0
        assert score_record(repeated, "mem1")["exact_match"] == 0.0

    def test_format(self):
        assert score_record(record("q", tokens=((1, 1),) * 3))["format_errors"] == []
        broken = record("q", tokens=((1, 1),) * 2)
        broken["steps"][1]["text"] = "<think>t</think><answer>Paris</answer>"
        assert score_record(broken)["format_errors"] == ["Turn 2 has no memory."]

    def test_no_steps_and_no_prediction(self):
        scores = score_record(record("q", prediction=None, steps=[], stop_reason="max_context_length"))
        assert scores == {
            "exact_match": 0.0,
            "f1": 0.0,
            "objective_exact_match": [0.0],
            "objective_f1": [0.0],
            "turns": 0,
            "total_tokens": 0,
            "peak_tokens": 0,
            "format_errors": ["There is no turn."],
        }

    @pytest.mark.parametrize("field", [*record("q")])
    def test_missing_field(self, field):
        incomplete = record("q")
        del incomplete[field]
        with pytest.raises(ValueError, match=f'has no field "{field}"'):
            score_record(incomplete)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"sample": "0"}, "The field \"sample\" of the record of question 'q' must be an integer, got '0'"),
            ({"prediction": 7}, 'field "prediction" of .* must be a string or null, got 7'),
            (
                {"answers": ["Paris"]},
                'field "answers" of .* a list of one or more accepted answers for every objective',
            ),
            ({"answers": []}, "a list of one or more accepted answers for every objective"),
            ({"answers": [["Paris"], []]}, "a list of one or more accepted answers for every objective"),
            ({"answers": [[1969]]}, "a list of one or more accepted answers for every objective"),
            ({"steps": ["x"]}, "The step 1 of the record of question 'q' must be a JSON object, got 'x'"),
            ({"steps": [{"text": "", "prompt_tokens": 1}]}, 'step 1 of the .* has no field "completion_tokens"'),
        ],
    )
    def test_wrong_field(self, changes, message):
        with pytest.raises(ValueError, match=message):
            score_record(record("q") | changes)

    def test_not_an_object(self):
        with pytest.raises(ValueError, match="The record must be a JSON object, got 3"):
            score_record(3)

    def test_unknown_scorer(self):
        with pytest.raises(ValueError, match="scorer must be one of"):
            score_record(record("q"), "bleu")


def quantile(values, share):
    """Linear interpolation between the two nearest of the sorted values."""
    values = sorted(values)
    place = share * (len(values) - 1)
    below = math.floor(place)
    above = min(below + 1, len(values) - 1)
    return values[below] + (place - below) * (values[above] - values[below])


def oracle(values, confidence, resamples, seed):
    """Mean and percentile interval of one quantity, question by question."""
    rng = np.random.default_rng(seed)
    means = []
    for _ in range(resamples):
        drawn = [values[index] for index in rng.integers(len(values), size=len(values))]
        means.append(math.fsum(drawn) / len(drawn))
    tail = (1 - confidence) / 2
    low, high = quantile(means, tail), quantile(means, 1 - tail)
    return {"mean": math.fsum(values) / len(values), "low": low, "high": high}


def random_run(seed, questions=25, samples=3):
    """Questions with one to four objectives, some of whose last samples are missing."""
    rng = random.Random(seed)
    run = []
    for number in range(questions):
        answers = [[f"city {number} {place}", "Rome"] for place in range(rng.randint(1, 4))]
        for sample in range(samples if rng.random() < 0.8 else rng.randint(1, samples)):
            pieces = [rng.choice([f"city {number} {place}", "city", "none"]) for place in range(len(answers))]
            tokens = [(rng.randrange(1000), rng.randrange(100)) for _ in range(rng.randint(1, 5))]
            counts = {key: rng.randrange(4) for key in ("tool_failures", "unavailable_calls", "malformed_calls")}
            made = record(f"q{number}", rng.choice([" ; ".join(pieces), None]), answers, sample, tokens, **counts)
            if rng.random() < 0.3:
                made["steps"][-1]["text"] += "tail"
            run.append(made)
    rng.shuffle(run)
    return run


def plain_values(made):
    """What is averaged over a record, from its fields alone."""
    pieces = [""] if made["prediction"] is None else [piece.strip() for piece in made["prediction"].split(";")]
    exact, f1 = [], []
    for piece, (answer, _) in zip(pieces + [""] * 4, made["answers"], strict=False):
        exact.append(float(piece == answer))
        f1.append({answer: 1.0, "city": 0.5}.get(piece, 0.0))
    steps = [step["prompt_tokens"] + step["completion_tokens"] for step in made["steps"]]
    return {
        "exact_match": min(exact),
        "objective_exact_match": sum(exact) / len(exact),
        "f1": sum(f1) / len(f1),
        "turns": len(steps),
        "total_tokens": sum(steps),
        "peak_tokens": max(steps),
        "well_formed": float(not made["steps"][-1]["text"].endswith("tail")),
        **{key: made[key] for key in METRICS if key in made},
    }, exact


def by_question(run):
    """Records by question in the order of ids, as the draws take them."""
    questions = {}
    for made in run:
        questions.setdefault(made["id"], []).append(made)
    return [questions[identifier] for identifier in sorted(questions)]


def mean(values):
    values = list(values)
    return sum(values) / len(values)


class TestSummarize:
    @pytest.mark.parametrize(("seed", "confidence"), [(0, 0.95), (1, 0.5)])
    def test_equals_the_oracle(self, seed, confidence):
        run = random_run(seed)
        found = summarize(run, confidence=confidence, resamples=200, seed=7)
        assert json.loads(json.dumps(found)) == found
        groups = {"all": by_question(run)}
        for objectives in (1, 2, 3, 4):
            groups[str(objectives)] = [group for group in groups["all"] if len(group[0]["answers"]) == objectives]
        assert list(found["by_objectives"]) == ["1", "2", "3", "4"]
        for name, questions in groups.items():
            group = found["all"] if name == "all" else found["by_objectives"][name]
            assert group["questions"] == len(questions)
            assert group["records"] == sum(map(len, questions))
            assert list(group["metrics"]) == list(METRICS)
            for metric in METRICS:
                values = [mean(plain_values(made)[0][metric] for made in question) for question in questions]
                expected = oracle(values, confidence, 200, 7)
                assert group["metrics"][metric] == pytest.approx(expected, rel=1e-9, abs=1e-12), (name, metric)

            complete = [question for question in questions if len(question) == 3]
            assert group["incomplete_questions"] == len(questions) - len(complete)
            solved = [max(plain_values(made)[0]["exact_match"] for made in question) for question in complete]
            expected = {"n": 3, "questions": len(complete), **oracle(solved, confidence, 200, 7)}
            assert group["best_of_n"] == pytest.approx(expected)

            for position, interval in enumerate(group["position_exact_match"]):
                having = [question for question in questions if len(question[0]["answers"]) > position]
                values = [mean(plain_values(made)[1][position] for made in question) for question in having]
                expected = {"questions": len(having), **oracle(values, confidence, 200, 7)}
                assert interval == pytest.approx(expected)
            assert len(group["position_exact_match"]) == (4 if name == "all" else int(name))

    def test_by_hand(self):
        run = [
            record("a", "Paris ; Oslo", TWO, tokens=((100, 20), (200, 30))),
            record("a", "Paris ; Rome", TWO, sample=1, tokens=((100, 20),)),
            record("b", "Paris", tokens=((10, 5),)),
            record("b", None, sample=1, tokens=((10, 5),) * 4, stop_reason="max_turns"),
        ]
        found = summarize(run, resamples=10)
        means = {metric: interval["mean"] for metric, interval in found["all"]["metrics"].items()}
        assert found["samples_per_question"] == 2
        assert (found["all"]["questions"], found["all"]["records"]) == (2, 4)
        assert means["exact_match"] == 0.5
        assert means["objective_exact_match"] == (0.75 + 0.5) / 2
        assert means["total_tokens"] == ((350 + 120) / 2 + (15 + 60) / 2) / 2
        assert means["peak_tokens"] == ((230 + 120) / 2 + 15) / 2
        assert found["all"]["best_of_n"]["mean"] == 1.0
        assert found["all"]["stop_reasons"] == {"answer": 3, "max_turns": 1}
        assert [place["mean"] for place in found["all"]["position_exact_match"]] == [0.75, 0.5]
        assert [place["questions"] for place in found["all"]["position_exact_match"]] == [2, 1]

    def test_the_order_of_records_plays_no_part(self):
        run = random_run(3)
        assert summarize(run, resamples=50) == summarize(run[::-1], resamples=50)

    def test_equal_counts_are_in_alphabetical_order(self):
        reasons = ["no_action", "answer", "max_turns", "answer", "no_action"]
        run = [record(f"q{number}", stop_reason=reason) for number, reason in enumerate(reasons)]
        counts = summarize(run, resamples=5)["all"]["stop_reasons"]
        assert list(counts.items()) == [("answer", 2), ("no_action", 2), ("max_turns", 1)]

    def test_blocks_do_not_change_the_draws(self, monkeypatch):
        run = random_run(4)
        whole = summarize(run, resamples=50)
        monkeypatch.setattr(summary, "_MAX_DRAWS", 60)
        assert summarize(run, resamples=50)["all"]["metrics"]["turns"] == pytest.approx(
            whole["all"]["metrics"]["turns"]
        )

    def test_one_question(self):
        found = summarize([record("q", "Paris ; Oslo", TWO, tokens=((7, 3), (8, 4)))])
        for interval in found["all"]["metrics"].values():
            assert interval["low"] == interval["mean"] == interval["high"]
        assert found["all"]["best_of_n"] is None
        assert found["all"] == found["by_objectives"]["2"]

    def test_a_group_without_a_complete_question(self):
        run = [record("a"), record("a", sample=1), record("b", "x;y", TWO)]
        found = summarize(run, resamples=10)
        assert found["by_objectives"]["2"]["best_of_n"] is None
        assert found["by_objectives"]["2"]["incomplete_questions"] == 1
        assert found["all"]["best_of_n"]["questions"] == 1
        assert "1 of 2 questions have fewer than 2 samples." in to_markdown(found)

    def test_format_errors_by_kind(self):
        run = [record(f"q{number}", tokens=((1, 1),) * 3) for number in range(3)]
        run[0]["steps"][1]["text"] = texts(3, "x")[1].replace("</mem>", "")
        run[1]["steps"][2]["text"] = texts(3, "x")[2].replace("</mem>", "")
        run[1]["steps"][1]["text"] = run[1]["steps"][1]["text"].replace("}}", "}")
        run[2]["steps"][1]["text"] = "<mem>m</mem><think>t</think><tool_call>{</tool_call>"
        found = {entry["error"]: entry["records"] for entry in summarize(run)["all"]["format_errors"]}
        assert found["<mem> is not closed."] == 2
        assert found["A turn has no memory."] == 2
        assert found["The tool call is not valid JSON."] == 2
        counts = list(found.values())
        assert counts == sorted(counts, reverse=True)

    def test_at_most_ten_format_errors(self):
        run = []
        for number in range(15):
            text = "<think>t</think>" * (number + 2) + "<answer>x</answer>"
            step = {"text": text, "prompt_tokens": 1, "completion_tokens": 1}
            run.append(record(f"q{number}", steps=[step]))
        assert len(summarize(run, resamples=5)["all"]["format_errors"]) == 10

    @pytest.mark.parametrize(
        ("run", "options", "message"),
        [
            ([], {}, "no records to summarise"),
            ([record("q"), record("q")], {}, "two records for sample 0 of question 'q'"),
            ([record("q"), record("q", "x;y", TWO, 1)], {}, "records of question 'q' have different answers"),
            ([record("q")], {"confidence": 1.0}, "`confidence=1.0` is not allowed"),
            ([record("q")], {"confidence": 95}, "`confidence=95` is not allowed"),
            ([record("q")], {"resamples": 0}, "`resamples=0` is not allowed"),
            ([record("q")], {"scorer": "bleu"}, "scorer must be one of"),
        ],
    )
    def test_bad_arguments(self, run, options, message):
        with pytest.raises(ValueError, match=message):
            summarize(run, **options)


def test_intervals_cover_the_mean():
    # 400 samples of 50 draws each from a Bernoulli distribution with mean 0.3: about 93 to 95 per cent of the nominal
    # 95 per cent intervals hold it. The bounds are six standard errors wide.
    rng = np.random.default_rng(0)
    covered = 0
    for seed in range(400):
        values = (rng.random((50, 1)) < 0.3).astype(float)
        low, high = interval_bounds(bootstrap_means(values, 400, seed), 0.95)
        covered += bool(low[0] <= 0.3 <= high[0])
    assert 0.88 <= covered / 400 <= 0.985


class TestToMarkdown:
    def test_table(self):
        run = [
            record("a", "Paris ; Oslo", TWO, tokens=((10_000, 20), (2000, 30))),
            record("b", "Rome", tokens=((1234, 0),), stop_reason="max_turns", tool_failures=2),
        ]
        lines = to_markdown(summarize(run, resamples=100, seed=3)).splitlines()
        assert lines[0].startswith('Scorer "default", questions: 2, samples of each: 1. In brackets: 95 % bootstrap')
        assert lines[2] == (
            "| Objectives | Questions | EM % | Objective EM % | F1 % | Turns | Calls | Failures | TT | PT "
            "| Well-formed % |"
        )
        assert lines[4].startswith(
            "| all | 2 | 0.0 [0.0, 0.0] | 25.0 [0.0, 50.0] | 25.0 [0.0, 50.0] | 1.50 [1.00, 2.00] "
        )
        assert lines[5] == (
            "| 1 | 1 | 0.0 [0.0, 0.0] | 0.0 [0.0, 0.0] | 0.0 [0.0, 0.0] | 1.00 [1.00, 1.00] | 0.00 [0.00, 0.00] "
            "| 2.00 [2.00, 2.00] | 1,234 [1,234, 1,234] | 1,234 [1,234, 1,234] | 100.0 [100.0, 100.0] |"
        )
        assert "| 12,050 [12,050, 12,050] | 10,020 [10,020, 10,020] |" in lines[6]
        assert lines[7:] == ["", "| Stop reason | Records |", "| --- | --- |", "| answer | 1 |", "| max_turns | 1 |"]

    def test_best_of_n(self):
        text = to_markdown(summarize([record("a"), record("a", "x", sample=1)], resamples=10))
        assert "| Best of 2 EM % |" in text
        assert "| 100.0 [100.0, 100.0] |\n" in text
        assert "samples of each: 2." in text
        assert "fewer than" not in text

    @pytest.mark.parametrize("samples", [1, 3])
    def test_rows_have_as_many_cells_as_the_header(self, samples):
        lines = to_markdown(summarize(random_run(5, samples=samples), resamples=10)).splitlines()
        table = lines[2 : lines.index("", 2)]
        assert len(table) == 7
        assert {line.count("|") for line in table} == {12 if samples == 1 else 13}
