import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from openai_stand_in import OpenAIStandIn
from relay_policy import small_policy
from scripted_agent import Play, answer, ask
from support import search

from mempo_trl.engines import Sampling, open_engine
from mempo_trl.evaluation import compare, evaluate, read_run, summarize
from mempo_trl.protocol import build_prompt
from mempo_trl.search import Document, make_search_tool


TESTS = Path(__file__).parent.parent
QUESTIONS = [
    {"id": "one", "question": "Who wrote Dune?", "answers": ["Frank Herbert", "Herbert"]},
    {"id": "two", "question": "Who wrote Emma, and where?", "answers": [["Jane Austen"], ["Chawton House"]]},
    {"id": "none", "question": "Who wrote nothing?", "answers": ["nobody"]},
]
TURNS = {
    # Right, in three turns.
    "Who wrote Dune?": [ask("Dune"), ask("Herbert", "m"), answer("Frank Herbert", "m")],
    # One objective right, half of the other; a tool that there is not; an answer without a memory.
    "Who wrote Emma, and where?": [ask("Emma", name="look"), answer("jane austen ; Chawton village")],
    # A call that cannot be read, then neither call nor answer.
    "Who wrote nothing?": ["<think>t</think><tool_call>{</tool_call>", "<mem>m</mem>I do not know."],
}


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setattr("mempo_trl.engines.endpoint._RETRIES", 0)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def means(group):
    return {name: metric["mean"] for name, metric in group["metrics"].items()}


def test_the_summary_is_what_one_counts_by_hand(tmp_path):
    with OpenAIStandIn(Play(TURNS)) as server:
        evaluation = evaluate(server.url, QUESTIONS, [search], output_dir=tmp_path / "run", progress=False)
    lengths = [[len(text) for text in TURNS[row["question"]]] for row in QUESTIONS]
    # Two messages open a conversation, a turn and its observation make two more.
    read = [[200, 400, 600], [200, 400], [200, 400]]
    steps = [[r + w for r, w in zip(*both, strict=True)] for both in zip(read, lengths, strict=True)]
    overall = evaluation.summary["all"]
    assert (overall["questions"], overall["records"]) == (3, 3)
    assert means(overall) == pytest.approx(
        {
            "exact_match": 1 / 3,
            "objective_exact_match": (1 + 0.5 + 0) / 3,
            "f1": (1 + (1 + 0.5) / 2 + 0) / 3,
            "turns": (3 + 2 + 2) / 3,
            "tool_calls": (2 + 1 + 1) / 3,
            "tool_failures": (0 + 1 + 1) / 3,
            "malformed_calls": 1 / 3,
            "unavailable_calls": 0,
            "total_tokens": sum(map(sum, steps)) / 3,
            "peak_tokens": sum(map(max, steps)) / 3,
            "well_formed": 1 / 3,
        }
    )
    assert overall["stop_reasons"] == {"answer": 2, "no_action": 1}
    assert {row["error"]: row["records"] for row in overall["format_errors"]} == {
        "A turn has no memory.": 1,
        "A turn has no thought.": 1,
        "A turn does not answer.": 1,
        "The tool call is not valid JSON.": 1,
        "There is text outside the tags.": 1,
        "The sections must be a memory, a thought, then tool calls or one answer, but they are: mem.": 1,
    }
    by_objectives = evaluation.summary["by_objectives"]
    assert {number: group["questions"] for number, group in by_objectives.items()} == {"1": 2, "2": 1}
    assert means(by_objectives["2"])["f1"] == 0.75
    assert means(by_objectives["2"])["total_tokens"] == sum(steps[1])
    assert means(by_objectives["2"])["peak_tokens"] == max(steps[1])
    assert means(by_objectives["1"])["exact_match"] == 0.5
    assert [position["mean"] for position in by_objectives["2"]["position_exact_match"]] == [1, 0]

    records = evaluation.records
    assert [record["id"] for record in records] == ["one", "two", "none"]
    assert records[0]["answers"] == [["Frank Herbert", "Herbert"]]
    assert [step["text"] for step in records[0]["steps"]] == TURNS["Who wrote Dune?"]
    assert [record["prediction"] for record in records] == ["Frank Herbert", "jane austen ; Chawton village", None]
    assert sorted(read_run(tmp_path / "run"), key=str) == sorted(records, key=str)
    assert json.loads((tmp_path / "run" / "summary.json").read_text()) == evaluation.summary
    assert (tmp_path / "run" / "summary.md").read_text() == evaluation.to_markdown()
    assert compare(records, read_run(tmp_path / "run"))["metrics"]["f1"]["difference"] == 0
    about = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (about["model"], about["tools"][0]["function"]["name"]) == ("model", "search")


def test_without_a_folder_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with OpenAIStandIn(Play(TURNS)) as server:
        evaluation = evaluate(server.url, QUESTIONS, [search], max_questions=2, progress=False)
    assert [record["id"] for record in evaluation.records] == ["one", "two"]
    assert list(tmp_path.iterdir()) == []


def relay(questions=9):
    """Model, tokenizer, the settings that it was trained with, questions, and a search that knows titles."""
    model, tokenizer, cold_start = small_policy()
    world = cold_start.world(seed=41, questions=questions)
    documents = {document.title: document for document in (Document(**row) for row in world.documents)}

    class Exact:
        def search(self, queries, k):
            return [[documents[query]] if query in documents else [] for query in queries]

    options = {
        "tokenizer": tokenizer,
        "system_prompt": "search and remember",
        "context_turns": 1,
        "max_turns": 4,
        "max_turn_length": 64,
        "max_observation_length": 64,
        "progress": False,
    }
    return model, world.to_dataset(), [make_search_tool(Exact(), k=1)], options


def test_a_model_of_transformers(tmp_path):
    model, questions, tools, options = relay()
    evaluation = evaluate(model, questions, tools, output_dir=tmp_path / "run", batch_size=4, **options)
    records = evaluation.records
    assert [record["id"] for record in records] == questions["id"]
    assert [record["answers"] for record in records] == questions["answers"]
    assert evaluation.summary == summarize(records)
    assert evaluation.summary["all"]["stop_reasons"].get("answer", 0) >= 7
    assert 0 < evaluation.summary["all"]["metrics"]["f1"]["mean"] < 1
    own = {name: value for name, value in options.items() if name != "progress"}
    engine = open_engine(model, tools, **own)
    for record in records[:2]:
        (*_, episode) = engine.turns(build_prompt(record["question"], "search and remember"))
        assert [step["text"] for step in record["steps"]] == [step.text for step in episode.steps]
        assert record["tool_calls"] == episode.tool_calls >= 1
    # Nothing is run again.
    model.forward, forward = None, model.forward
    try:
        again = evaluate(model, questions, tools, output_dir=tmp_path / "run", **options)
    finally:
        model.forward = forward
    assert again.summary == evaluation.summary


# --- Going on -------------------------------------------------------------------------------------------------------


KILLED = [{"id": f"k{n}", "question": f"Number {n}?", "answers": [f"a{n}"]} for n in range(6)]
KILLED_TURNS = {f"Number {n}?": [ask(f"s{n}"), answer(f"a{n}", "m")] for n in range(6)}
WORKER = f"""
import sys
sys.path[:0] = [{str(TESTS)!r}, {str(TESTS / "evaluation")!r}]
from support import search
from test_evaluator import KILLED
from mempo_trl.evaluation import evaluate
evaluate(sys.argv[1], KILLED, [search], output_dir=sys.argv[2], concurrency=1, progress=False)
"""


def test_a_run_that_is_killed_goes_on(tmp_path):
    play, process = Play(KILLED_TURNS), None

    def reply(path, body):
        answered = play(path, body)
        if sum(play.begun.values()) == 4 and len(body["messages"]) == 4 and process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
        return answered

    with OpenAIStandIn(reply) as server:
        command = [sys.executable, "-c", WORKER, server.url, str(tmp_path / "run")]
        process = subprocess.Popen(command)
        assert process.wait(timeout=300) == -signal.SIGKILL
        assert play.begun == {**dict.fromkeys(KILLED_TURNS, 0), **{f"Number {n}?": 1 for n in range(4)}}
        file = tmp_path / "run" / "trajectories.jsonl"
        done = file.read_bytes()
        assert [json.loads(line)["id"] for line in done.splitlines()] == ["k0", "k1", "k2"]
        assert not (tmp_path / "run" / "summary.json").exists()
        file.write_bytes(done + done[:50])  # as if it had been killed while it wrote
        evaluation = evaluate(server.url, KILLED, [search], output_dir=tmp_path / "run", concurrency=1, progress=False)
    assert play.begun == {"Number 3?": 2, **{f"Number {n}?": 1 for n in (0, 1, 2, 4, 5)}}
    assert file.read_bytes().startswith(done)
    assert [record["id"] for record in read_run(tmp_path / "run")] == [row["id"] for row in KILLED]
    with OpenAIStandIn(Play(KILLED_TURNS)) as server:
        whole = evaluate(server.url, KILLED, [search], concurrency=1, progress=False)
    assert evaluation == whole


def test_what_is_asked_for_more_is_added(tmp_path):
    play = Play(KILLED_TURNS)
    with OpenAIStandIn(play) as server:

        def run(rows, **options):
            return evaluate(server.url, rows, [search], output_dir=tmp_path / "run", progress=False, **options)

        run(KILLED, max_questions=2)
        run(KILLED[::-1], samples=2)
        assert play.begun == dict.fromkeys(KILLED_TURNS, 2)
        file = tmp_path / "run" / "trajectories.jsonl"
        assert len(file.read_text().splitlines()) == 12
        evaluation = run(KILLED, samples=2)  # nothing is left to do
        assert play.begun == dict.fromkeys(KILLED_TURNS, 2)
        assert evaluation.summary["samples_per_question"] == 2
        assert evaluation.summary["all"]["best_of_n"]["n"] == 2
        # Of fewer, only those are looked at.
        assert run(KILLED[:3]).summary["all"]["records"] == 3
        assert len(file.read_text().splitlines()) == 12
        run(KILLED[:1], overwrite=True)
        assert len(file.read_text().splitlines()) == 1


def other(query: str, k: int = 3) -> str:
    """Search elsewhere."""
    return query


CHANGES = {
    "settings": ({"context_turns": 2}, "context_turns"),
    "system prompt": ({"system_prompt": "Search."}, "system_prompt"),
    "sampling": ({"sampling": Sampling(temperature=1.0)}, "sampling"),
    "model": ({"model": "b"}, "model"),
    "tools": ({"tools": []}, "tools"),
    "notes": ({"notes": {"search": "elsewhere"}}, "search"),
    "request": ({"request": {"reasoning_effort": "low"}}, "request"),
    "role of observations": ({"tool_role": "tool"}, "tool_role"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_run_with_something_else_is_refused(tmp_path, change):
    changed, name = CHANGES[change]
    play = Play(KILLED_TURNS)
    with OpenAIStandIn(play, models=["a", "b"]) as server:
        options = {"model": "a", "tools": [search], "questions": KILLED[:1], "output_dir": tmp_path, "progress": False}
        evaluate(endpoint=server.url, **options)
        with pytest.raises(ValueError, match=rf"was begun with another {name} .*name another folder, or begin anew"):
            evaluate(endpoint=server.url, **{**options, "questions": KILLED, **changed})
        assert sum(play.begun.values()) == 1
        evaluate(endpoint=server.url, **options)
    assert len(read_run(tmp_path)) == 1


# --- Randomness -----------------------------------------------------------------------------------------------------


def test_an_endpoint_is_told_a_seed_for_each_question_sample_and_turn(tmp_path):
    def seeds(rows, folder, **options):
        with OpenAIStandIn(Play(KILLED_TURNS)) as server:
            evaluate(
                server.url,
                rows,
                [search],
                samples=2,
                progress=False,
                output_dir=folder,
                concurrency=1,
                **options,
            )
        return [(body["messages"][1]["content"], len(body["messages"]), body["seed"]) for _, body in server.requests]

    drawn = {"sampling": Sampling(temperature=1.0)}
    whole = seeds(KILLED, None, **drawn)
    assert len({seed for *_, seed in whole}) == len(whole) == 24
    parts = seeds(KILLED[4:], tmp_path, **drawn) + seeds(KILLED[::-1], tmp_path, **drawn)
    assert sorted(parts) == sorted(whole)
    others = seeds(KILLED, None, sampling=Sampling(temperature=1.0, seed=1))
    assert {seed for *_, seed in others}.isdisjoint({seed for *_, seed in whole})


def test_what_a_question_draws_does_not_depend_on_what_is_run_with_it(tmp_path):
    model, questions, tools, options = relay(5)
    rows = list(questions)
    options["sampling"] = Sampling(temperature=1.2)

    def run(rows, **others):
        found = evaluate(model, rows, tools, **{"samples": 3, **options, **others}).records
        return {(record["id"], record["sample"]): record for record in found}

    whole = run(rows)
    texts = [[step["text"] for step in record["steps"]] for record in whole.values()]
    assert len({str(text) for text in texts}) > 10  # it is drawn
    run(rows[3:], output_dir=tmp_path, samples=2, batch_size=3)
    assert run(rows[::-1], output_dir=tmp_path, batch_size=4) == whole
    assert run(rows, sampling=Sampling(temperature=1.2, seed=1)) != whole


# --- What is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"questions": [{"question": "q"}]}, "Questions without `answers` cannot be scored"),
        ({"questions": []}, "There are no questions"),
        ({"max_questions": 0}, "`max_questions=0` is not allowed"),
        ({"max_questions": True}, "`max_questions=True` is not allowed"),
        ({"samples": 0}, "`samples=0` is not allowed"),
        ({"scorer": "rouge"}, r"scorer must be one of .* got 'rouge'"),
        ({"confidence": 95}, "confidence"),
        ({"resamples": 0}, "resamples"),
    ],
)
def test_what_is_wrong_is_said_before_the_model_is_loaded(tmp_path, options, message):
    arguments = {"model": str(tmp_path / "nowhere"), "questions": KILLED, "output_dir": tmp_path / "run", **options}
    with pytest.raises(ValueError, match=message):
        evaluate(**arguments)
    assert list(tmp_path.iterdir()) == []


def test_a_stream_is_not_read_to_its_end():
    def stream():
        yield from KILLED
        raise AssertionError("read too far")

    with OpenAIStandIn(Play(KILLED_TURNS)) as server:
        found = evaluate(server.url, stream(), [search], max_questions=6, progress=False).records
    assert len(found) == 6
