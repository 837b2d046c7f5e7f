import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from openai_stand_in import OpenAIStandIn, error
from scripted_agent import Play, answer, ask
from support import search
from transformers.utils import get_json_schema

from mempo_trl.collecting import collect
from mempo_trl.engines import EndpointError
from mempo_trl.evaluation import read_run
from mempo_trl.protocol import DEFAULT_SYSTEM_PROMPT, NO_MEMORY_SYSTEM_PROMPT, build_prompt


TESTS = Path(__file__).parent
# For each question its turns, and whether an episode of them is kept. All answers are the same.
RIGHT = [
    f"<think>shall I write <mem> here?</think>{ask('Dune').partition('</think>')[2]}",
    ask("Herbert", "Dune: a novel.") + ask("Frank").partition("</think>")[2],
    ask("Frank Herbert", "Dune: Frank?"),
    answer("Frank Herbert", "Dune: Frank Herbert."),
]
SHORT = [ask("short"), answer("Frank Herbert", "It is said.")]
LONG = [ask("long"), ask("longer", "m"), answer("Frank Herbert", "It is said at length.")]
TURNS = {
    "right": RIGHT,
    "right twice": [LONG, SHORT],
    "wrong": [ask("wrong"), answer("Jane Austen", "m")],
    "malformed": [ask("malformed"), "So: " + answer("Frank Herbert", "m")],
    "malformed call": ["<think>t</think><tool_call>{}</tool_call>", answer("Frank Herbert", "n")],
    "without memory": [ask("without"), answer("Frank Herbert")],
    "too long": [ask("1"), *(ask(str(n), f"m{n}") for n in range(2, 6))],
    "gives up": [ask("gives up"), "<mem>m</mem><think>t</think>I do not know."],
}
QUESTIONS = [{"id": name.replace(" ", "-"), "question": name, "answers": ["Frank Herbert"]} for name in TURNS]
DROPPED = {
    "right twice": "more than enough for its question",
    "wrong": "wrong answer",
    "malformed": "not well-formed",
    "malformed call": "not well-formed",
    "without memory": "not well-formed",
    "too long": "no answer",
    "gives up": "no answer",
}


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setattr("mempo_trl.engines.endpoint._RETRIES", 0)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def run(server, out, questions=QUESTIONS, **options):
    defaults = {"concurrency": 1, "max_turns": 5, "progress": False}
    return collect(server.url, questions, [search], out, **{**defaults, **options})


def lines(file):
    return [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n")[:-1]]


def test_what_is_right_is_kept(tmp_path):
    with OpenAIStandIn(Play(TURNS)) as server:
        collection = run(server, tmp_path, samples=2)
    kept = [(record["id"], record["sample"]) for record in collection.selection.kept]
    assert kept == [("right", 0), ("right-twice", 1)]  # of two that are right, the shorter one
    summary = collection.summary()
    assert summary == {
        "episodes": 16,
        "kept": 2,
        "questions": 2,
        "pairs": 4 + 2,
        "dropped": {
            "not well-formed": 6,
            "no answer": 4,
            "wrong answer": 2,
            "more than enough for its question": 2,
        },
    }
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    assert len(read_run(tmp_path)) == 16
    for file in ("sft.jsonl", "sft_no_memory.jsonl"):
        assert [(row["id"], row["sample"], row["turn"]) for row in lines(tmp_path / file)] == [
            *(("right", 0, turn) for turn in (1, 2, 3, 4)),
            *(("right-twice", 1, turn) for turn in (1, 2)),
        ]


@pytest.mark.parametrize("name", DROPPED)
def test_why_an_episode_is_dropped(tmp_path, name):
    row = [row for row in QUESTIONS if row["question"] == name]
    with OpenAIStandIn(Play(TURNS)) as server:
        collection = run(server, tmp_path, row, samples=2 if name == "right twice" else 1)
    assert collection.selection.dropped == {DROPPED[name]: 1}
    assert len(collection.selection.kept) == (name == "right twice")
    assert (tmp_path / "sft.jsonl").exists()


def test_what_counts_as_right_can_be_chosen(tmp_path):
    rows = [{"id": "a", "question": "right", "answers": ["Herbert"]}, *QUESTIONS[1:]]
    with OpenAIStandIn(Play(TURNS)) as server:
        assert len(run(server, tmp_path / "em", rows, samples=2).selection.kept) == 1
        found = run(server, tmp_path / "f1", rows, samples=2, metric="f1", min_score=0.6, max_per_question=None)
    assert [(record["id"], record["sample"]) for record in found.selection.kept] == [
        ("a", 0),
        ("a", 1),
        ("right-twice", 0),
        ("right-twice", 1),
    ]


def tool(query):
    return {"role": "tool", "name": "search", "content": search(query)}


def said(text):
    return {"role": "assistant", "content": text}


ROUNDS = [
    [said(RIGHT[0]), tool("Dune")],
    [said(RIGHT[1]), tool("Herbert"), tool("Frank")],
    [said(RIGHT[2]), tool("Frank Herbert")],
]


@pytest.mark.parametrize(
    ("context_turns", "seen"),
    [
        (None, [[], ROUNDS[0], ROUNDS[0] + ROUNDS[1], ROUNDS[0] + ROUNDS[1] + ROUNDS[2]]),
        (1, [[], ROUNDS[0], ROUNDS[1], ROUNDS[2]]),
        (2, [[], ROUNDS[0], ROUNDS[0] + ROUNDS[1], ROUNDS[1] + ROUNDS[2]]),
    ],
)
def test_pairs_are_those_that_one_makes_by_hand(tmp_path, context_turns, seen):
    # What the teacher sees and what the policy will see need not be the same.
    with OpenAIStandIn(Play(TURNS)) as server:
        run(server, tmp_path, QUESTIONS[:1], context_turns=1, sft_context_turns=context_turns, system_prompt="Teach.")
    opening = [{"role": "system", "content": "Teach."}, {"role": "user", "content": "right"}]
    tools = json.dumps([get_json_schema(search)], ensure_ascii=False)
    about = {"id": "right", "sample": 0, "tools": tools}
    assert lines(tmp_path / "sft.jsonl") == [
        {**about, "turn": number, "prompt": opening + context, "completion": [said(text)]}
        for number, (context, text) in enumerate(zip(seen, RIGHT, strict=True), start=1)
    ]

    plain = [
        RIGHT[0].replace("<mem>", ""),
        RIGHT[1].replace("<mem>Dune: a novel.</mem>", ""),
        RIGHT[2].replace("<mem>Dune: Frank?</mem>", ""),
        RIGHT[3].replace("<mem>Dune: Frank Herbert.</mem>", ""),
    ]
    rounds = [[said(text), *messages[1:]] for text, messages in zip(plain, ROUNDS, strict=False)]
    opening[0]["content"] = NO_MEMORY_SYSTEM_PROMPT
    assert lines(tmp_path / "sft_no_memory.jsonl") == [
        {
            **about,
            "turn": number + 1,
            "prompt": opening + [message for part in rounds[:number] for message in part],
            "completion": [said(text)],
        }
        for number, text in enumerate(plain)
    ]
    text = (tmp_path / "sft_no_memory.jsonl").read_text()
    assert "<mem>" not in text and "</mem>" not in text


def test_system_messages(tmp_path):
    """The pairs' system message can be another than the teacher's, also of questions that bring their own."""
    own = [{"role": "system", "content": "Write <mem>."}, {"role": "user", "content": "right"}]
    rows = [{**QUESTIONS[0], "prompt": own}, {**QUESTIONS[1], "prompt": [{"role": "user", "content": "right twice"}]}]
    with OpenAIStandIn(Play(TURNS)) as server:

        def systems(folder, questions, **options):
            run(server, tmp_path / folder, questions, **options)
            texts = []
            for file in ("sft.jsonl", "sft_no_memory.jsonl"):
                prompts = [row["prompt"] for row in lines(tmp_path / folder / file) if row["turn"] == 1]
                assert [message["role"] for message in prompts[0]][-1] == "user"
                texts.append([message["content"] for prompt in prompts for message in prompt[:-1]])
            return texts

        none = [NO_MEMORY_SYSTEM_PROMPT] * 2
        assert systems("a", QUESTIONS[:2]) == [[DEFAULT_SYSTEM_PROMPT] * 2, none]
        assert systems("b", QUESTIONS[:2], sft_system_prompt="Policy.") == [["Policy."] * 2, none]
        assert systems("c", QUESTIONS[:2], sft_system_prompt="") == [[], none]
        assert systems("d", rows) == [["Write <mem>."], none]
        assert systems("e", rows, sft_system_prompt="Policy.") == [["Policy."] * 2, none]
        # The teacher's own message is not touched.
        assert server.requests[-1][1]["messages"][0]["content"].startswith("You may call")
    assert build_prompt("right", "") == [{"role": "user", "content": "right"}]


# --- Going on -------------------------------------------------------------------------------------------------------


WORKER = f"""
import sys
sys.path.insert(0, {str(TESTS)!r})
from test_collecting import QUESTIONS, collect, search
collect(sys.argv[1], QUESTIONS, [search], sys.argv[2], concurrency=1, max_turns=5, progress=False)
"""


def files(folder):
    return {path.name: path.read_text() for path in sorted(folder.glob("*.json*")) if path.name != "run.json"}


def test_a_run_that_is_killed_goes_on(tmp_path):
    play, process = Play(TURNS), None

    def reply(path, body):
        answered = play(path, body)
        if play.begun["malformed"] == 1 and len(body["messages"]) == 4 and process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
        return answered

    with OpenAIStandIn(reply) as server:
        process = subprocess.Popen([sys.executable, "-c", WORKER, server.url, str(tmp_path / "run")])
        assert process.wait(timeout=300) == -signal.SIGKILL
        assert [record["id"] for record in read_run(tmp_path / "run")] == ["right", "right-twice", "wrong"]
        assert not (tmp_path / "run" / "sft.jsonl").exists()
        collection = run(server, tmp_path / "run")
    assert play.begun == {**dict.fromkeys(TURNS, 1), "malformed": 2}
    with OpenAIStandIn(Play(TURNS)) as server:
        assert run(server, tmp_path / "whole") == collection
    assert files(tmp_path / "run") == files(tmp_path / "whole")


BUSY = {
    "500": error(500, "out of order"),
    "503": error(503, "busy"),
    "429": (*error(429, "slow down"), {"Retry-After": "0.01"}),
    "hangs up": None,
}


@pytest.mark.parametrize("failure", BUSY)
def test_an_endpoint_that_fails_now_and_then_is_asked_again(tmp_path, monkeypatch, failure):
    monkeypatch.setattr("mempo_trl.engines.endpoint._RETRIES", 2)
    monkeypatch.setattr("mempo_trl.engines.endpoint.time.sleep", lambda seconds: None)
    play, asked = Play(TURNS), []

    def reply(path, body):
        asked.append(body)
        return BUSY[failure] if len(asked) % 2 else play(path, body)

    with OpenAIStandIn(reply) as server:
        collection = run(server, tmp_path / "run")
    assert play.begun == dict.fromkeys(TURNS, 1)
    with OpenAIStandIn(Play(TURNS)) as server:
        assert run(server, tmp_path / "whole") == collection


@pytest.mark.parametrize("failure", BUSY)
def test_of_an_endpoint_that_goes_down_nothing_is_lost(tmp_path, failure):
    play, down = Play(TURNS), threading.Event()

    def reply(path, body):
        if not down.is_set() and body["messages"][1]["content"] == "wrong" and len(body["messages"]) > 2:
            down.set()
            return BUSY[failure]
        if body["messages"][1]["content"] == "right":
            assert down.wait(60)  # it is in the middle of its work when the other one fails
        return play(path, body)

    with OpenAIStandIn(reply) as server:
        with pytest.raises(EndpointError, match=r"/v1 does not answer .*start this again once it does"):
            run(server, tmp_path / "run", concurrency=2)
        # What was being done came to its end, and nothing else was begun.
        assert sorted(record["id"] for record in read_run(tmp_path / "run")) == ["right", "right-twice"]
        assert sum(play.begun.values()) == 3
        collection = run(server, tmp_path / "run")
    assert play.begun == {**dict.fromkeys(TURNS, 1), "wrong": 2}
    with OpenAIStandIn(Play(TURNS)) as server:
        whole = run(server, tmp_path / "whole")
    assert whole == collection


# --- What is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"metric": "rouge"}, "`metric='rouge'` is not allowed"),
        ({"min_score": 1.5}, "`min_score=1.5` is not allowed"),
        ({"min_score": "1"}, "`min_score='1'` is not allowed"),
        ({"sft_context_turns": 0}, "`sft_context_turns=0` is not allowed"),
        ({"sft_context_turns": "all"}, "`sft_context_turns='all'` is not allowed"),
        ({"max_per_question": 0}, "`max_per_question=0` is not allowed"),
        ({"samples": 0}, "`samples=0` is not allowed"),
        ({"scorer": "rouge"}, r"scorer must be one of .* got 'rouge'"),
        ({"questions": [{"question": "q"}]}, "Questions without `answers` cannot be scored"),
    ],
)
def test_what_is_wrong_is_said_before_the_model_is_loaded(tmp_path, options, message):
    arguments = {"questions": QUESTIONS, "tools": [search], "output_dir": tmp_path / "run", **options}
    with pytest.raises(ValueError, match=message):
        collect(str(tmp_path / "nowhere"), **arguments)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_another_run_is_refused(tmp_path):
    with OpenAIStandIn(Play(TURNS)) as server:
        run(server, tmp_path, QUESTIONS[:1])
        before = files(tmp_path)
        with pytest.raises(ValueError, match="was begun with another max_turns"):
            run(server, tmp_path, max_turns=6)
        assert files(tmp_path) == before
        # What is kept, and how it is written, does not concern the episodes.
        again = run(server, tmp_path, QUESTIONS[:1], sft_context_turns=1, metric="f1")
        assert len(server.requests) == 4
    assert again.pairs == 4
