"""`mempo eval`, `mempo collect` and `mempo ask`."""

import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from openai_stand_in import OpenAIStandIn
from relay_policy import small_policy
from relay_run import SETTINGS
from scripted_agent import Play, answer, ask

from mempo_trl.cli import main
from mempo_trl.engines import AgentSettings
from mempo_trl.evaluation import read_run
from mempo_trl.search import BM25Index


ROOT = Path(__file__).parent.parent.parent
TURNS = {
    "Who wrote Dune?": [ask("Dune"), answer("Frank Herbert", "Dune: Frank Herbert.")],
    "Who wrote Emma?": [ask("Emma"), answer("Charlotte Brontë", "Emma: ?")],
    "Who wrote nothing?": ["<think>t</think>I do not know."],
}
WORSE = {**TURNS, "Who wrote Dune?": [answer("Jane Austen")], "Who wrote Emma?": [answer("Jane Austen")]}
ANSWERS = {"Who wrote Dune?": ["Frank Herbert"], "Who wrote Emma?": [["Jane Austen"]], "Who wrote nothing?": ["nobody"]}


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setattr("mempo_trl.engines.endpoint._RETRIES", 0)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    path = tmp_path_factory.mktemp("search") / "index"
    documents = ['"Dune"\nA novel by Frank Herbert.', '"Emma"\nA novel by Jane Austen.']
    BM25Index.build([{"id": str(n), "contents": text} for n, text in enumerate(documents)], path)
    return str(path)


@pytest.fixture
def questions(tmp_path):
    return write(tmp_path / "questions.jsonl", ANSWERS)


def write(path, answers):
    rows = [{"id": name.split()[-1], "question": name, "answers": accepted} for name, accepted in answers.items()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@pytest.fixture
def closed():
    """A port of this machine that nobody listens at."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


def refused(capsys, *argv):
    """The sentence that a command ends with."""
    capsys.readouterr()
    assert main(list(map(str, argv))) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    *progress, sentence = captured.err.splitlines()
    assert sentence.startswith(f"mempo {argv[0]}: ")
    assert all(not line or "episode/s]" in line for line in progress)
    return sentence


# --- eval -----------------------------------------------------------------------------------------------------------


def test_eval(tmp_path, questions, index, capsys):
    play = Play(TURNS)
    with OpenAIStandIn(play) as server:
        command = ["eval", server.url, questions, "--search", index, "--search-results", "1"]
        command += ["--out", str(tmp_path / "run"), "--context-turns", "all", "--max-turns", "4", "--top-p", "0.5"]
        assert main(command) == 0
        printed = capsys.readouterr().out
        assert play.begun == dict.fromkeys(TURNS, 1)
        assert main(command) == 0  # all is done
        assert capsys.readouterr().out == printed
        assert play.begun == dict.fromkeys(TURNS, 1)
    assert printed.startswith((tmp_path / "run" / "summary.md").read_text())
    assert "| all | 3 | 33.3 [0.0, 100.0] |" in printed
    assert str(tmp_path / "run") in printed.splitlines()[-1]
    about = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (about["context_turns"], about["max_turns"], about["sampling"]["top_p"]) == (None, 4, 0.5)
    assert (about["search"], about["search_results"]) == (index, 1)
    records = read_run(tmp_path / "run")
    assert {record["id"]: record["prediction"] for record in records} == {
        "Dune?": "Frank Herbert",
        "Emma?": "Charlotte Brontë",
        "nothing?": None,
    }
    (dune,) = [record for record in records if record["id"] == "Dune?"]
    assert dune["steps"][0]["observation"][0]["content"] == "Doc 1 (Title: Dune)\nA novel by Frank Herbert."


def test_what_a_request_holds(tmp_path, questions, capsys):
    (tmp_path / "prompt.txt").write_text("Search.\n")
    with OpenAIStandIn(Play(TURNS), models=["a", "b"]) as server:
        command = ["eval", "b", questions, "--endpoint", server.url, "--out", str(tmp_path / "run"), "--seed", "5"]
        command += ["--request", '{"reasoning_effort": "low"}', "--temperature", "0.7", "--max-turn-length", "99"]
        assert main([*command, "--system-prompt", str(tmp_path / "prompt.txt"), "--max-questions", "2"]) == 0
    assert len(read_run(tmp_path / "run")) == 2
    bodies = [body for _, body in server.requests]
    for body in bodies:
        assert (body["model"], body["reasoning_effort"], body["temperature"]) == ("b", "low", 0.7)
        assert body["max_tokens"] == 99
        assert body["messages"][0] == {"role": "system", "content": "Search."}


def test_other_columns(tmp_path, capsys):
    file = tmp_path / "q.jsonl"
    file.write_text(json.dumps({"key": 7, "text": "Who wrote Dune?", "gold": ["Frank Herbert"]}) + "\n")
    columns = ["--id-column", "key", "--question-column", "text", "--answers-column", "gold"]
    with OpenAIStandIn(Play(TURNS)) as server:
        assert main(["eval", server.url, str(file), "--out", str(tmp_path / "run"), *columns]) == 0
    assert [record["id"] for record in read_run(tmp_path / "run")] == ["7"]


def test_eval_of_a_checkpoint(tmp_path, capsys):
    """Settings come from the checkpoint; the search is an index."""
    model, tokenizer, cold_start = small_policy()
    world = cold_start.world(41, 6)
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "model")
    AgentSettings(**SETTINGS).save(tmp_path / "model")
    BM25Index.build(world.documents, tmp_path / "index")
    world.to_dataset().to_json(tmp_path / "q.jsonl")
    command = [
        "eval",
        str(tmp_path / "model"),
        str(tmp_path / "q.jsonl"),
        "--search",
        str(tmp_path / "index"),
        "--search-results",
        "1",
    ]
    command += ["--out", str(tmp_path / "run"), "--dtype", "float32", "--device", "cpu", "--batch-size", "4"]
    done = subprocess.run(
        [sys.executable, "-m", "mempo_trl.cli", *command],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "| all | 6 |" in done.stdout
    records = read_run(tmp_path / "run")
    assert sum(record["prediction"] is not None for record in records) >= 4
    assert all(record["tool_calls"] >= 1 for record in records)
    assert max(len(record["steps"]) for record in records) <= SETTINGS["max_turns"]
    about = json.loads((tmp_path / "run" / "run.json").read_text())
    assert {name: about[name] for name in SETTINGS} == SETTINGS


def test_compare(tmp_path, questions, index, capsys):
    for name, turns in (("a", TURNS), ("b", WORSE)):
        with OpenAIStandIn(Play(turns)) as server:
            assert main(["eval", server.url, questions, "--search", index, "--out", str(tmp_path / name)]) == 0
    capsys.readouterr()
    compare = ["eval", "--compare", str(tmp_path / "a"), str(tmp_path / "b"), "--resamples", "100"]
    assert main(compare) == 0
    printed = capsys.readouterr().out
    assert f"A: {tmp_path / 'a'}\nB: {tmp_path / 'b'}\n" in printed
    assert "questions in both runs: 3" in printed
    wins, losses = printed.partition("\nWins")[2].split("\nLosses")
    losses, ties = losses.split("\nTies")
    assert "Who wrote Emma?" in wins and "Who wrote Dune?" not in wins
    assert "Who wrote Dune?" in losses and "Frank Herbert" in losses
    assert "Who wrote nothing?" in ties

    others = {"Who wrote Ulysses?": ["James Joyce"]}
    with OpenAIStandIn(Play({"Who wrote Ulysses?": [answer("James Joyce")]})) as server:
        assert main(["eval", server.url, write(tmp_path / "o.jsonl", others), "--out", str(tmp_path / "c")]) == 0
    sentence = refused(capsys, "eval", "--compare", tmp_path / "a", tmp_path / "c")
    assert "The runs share no question" in sentence
    file = tmp_path / "c" / "trajectories.jsonl"
    file.write_text(file.read_text().replace("Ulysses?", "Dune?"))
    assert "different answers for question 'Dune?'" in refused(
        capsys, "eval", "--compare", tmp_path / "a", tmp_path / "c"
    )
    assert "name the folder of a run" in refused(capsys, "eval", "--compare", tmp_path / "a", tmp_path / "d")
    file.write_text('{"id": "1", "sample": 0, "steps": []}\n')
    assert "Line 1 of" in refused(capsys, "eval", "--compare", tmp_path / "a", tmp_path / "c")
    assert "leave out model and questions" in refused(capsys, "eval", "m", "--compare", tmp_path, tmp_path)


# --- collect --------------------------------------------------------------------------------------------------------


def test_collect(tmp_path, questions, index, capsys):
    with OpenAIStandIn(Play(TURNS)) as server:
        command = ["collect", server.url, questions, "--search", index, "--out", str(tmp_path / "run")]
        command += ["--sft-context-turns", "1", "--sft-system-prompt", "Policy."]
        assert main(command) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "1 of 3 episodes are kept, with 2 turns."
    assert sorted(printed[1:3]) == ["1 dropped: no answer", "1 dropped: wrong answer"]
    assert str(tmp_path / "run") in printed[3]
    rows = [json.loads(line) for line in (tmp_path / "run" / "sft.jsonl").read_text().splitlines()]
    assert [row["id"] for row in rows] == ["Dune?", "Dune?"]
    assert rows[0]["prompt"][0] == {"role": "system", "content": "Policy."}
    assert "give --out" in refused(capsys, "collect", "http://127.0.0.1:1/v1", questions)


# --- ask ------------------------------------------------------------------------------------------------------------


def test_ask(index, capsys):
    with OpenAIStandIn(Play(TURNS)) as server:
        assert main(["ask", server.url, "Who wrote Dune?", "--search", index, "--search-results", "1"]) == 0
        first, second = TURNS["Who wrote Dune?"]
        read = [body["messages"] for _, body in server.requests]
        assert capsys.readouterr().out == (
            f"--- Turn 1: {100 * len(read[0])} tokens read, {len(first)} written\n{first}\n"
            "[search] Doc 1 (Title: Dune)\nA novel by Frank Herbert.\n"
            f"--- Turn 2: {100 * len(read[1])} tokens read, {len(second)} written\n{second}\n"
            "--- Answer: Frank Herbert\n"
        )
        assert main(["ask", server.url, "Who wrote Dune?", "--search", index, "--quiet"]) == 0
        assert capsys.readouterr().out == "Frank Herbert\n"
        assert refused(capsys, "ask", server.url, "Who wrote nothing?", "--quiet") == (
            "mempo ask: the agent gave no answer (no_action)."
        )
        assert main(["ask", server.url, "Who wrote nothing?"]) == 1
        assert "I do not know." in capsys.readouterr().out
        assert "`question` must be a text" in refused(capsys, "ask", server.url, " ")


def test_turns_are_shown_as_they_come(index):
    play, shown = Play(TURNS), threading.Event()

    def reply(path, body):
        if len(body["messages"]) > 2:
            assert shown.wait(120)  # until the first turn has been read, below
        return play(path, body)

    with OpenAIStandIn(reply) as server:
        command = ["-m", "mempo_trl.cli", "ask", server.url, "Who wrote Dune?", "--search", index]
        process = subprocess.Popen(
            [sys.executable, *command],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout.readline().startswith("--- Turn 1:")
        assert process.stdout.readline() == TURNS["Who wrote Dune?"][0] + "\n"
        assert process.stdout.readline().startswith("[search] Doc 1")
        shown.set()
        assert process.stdout.read().endswith("--- Answer: Frank Herbert\n")
        assert process.wait(120) == 0


# --- What is wrong --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--backend", "jax"], "argument --backend: invalid choice: 'jax'"),
        (["--request", "{"], "argument --request: '{' is no JSON: "),
        (["--request", "[1]"], "argument --request: '[1]' is no JSON object"),
        (["--context-turns", "0"], "argument --context-turns: '0' is not allowed"),
        (["--context-turns", "few"], "argument --context-turns: 'few' is not allowed"),
        (["--context-turns", "-1"], "argument --context-turns: '-1' is not allowed"),
        (["--samples", "0"], "`samples=0` is not allowed"),
        (["--samples", "x"], "argument --samples: invalid int value: 'x'"),
        (["--max-questions", "0"], "`max_questions=0` is not allowed"),
        (["--temperature", "-1"], "`temperature=-1.0` is not allowed"),
        (["--scorer", "rouge"], "scorer must be one of"),
        (["--confidence", "95"], "`confidence=95.0` is not allowed"),
        (["--max-turns", "0"], "`max_turns=0` is not allowed"),
        (["--concurrency", "0"], "`concurrency=0` is not allowed"),
        (["--search", "/nowhere/index"], "/nowhere/index"),
        (["--search-results", "0"], "0"),
        (["--tokenizer", "/nowhere/tokenizer"], "There is no folder /nowhere/tokenizer"),
        (["--unknown"], "unrecognized arguments: --unknown"),
    ],
)
def test_a_wrong_option_is_named(tmp_path, questions, index, capsys, options, sentence):
    if options[0] == "--search-results":
        options = [*options, "--search", index]
    with OpenAIStandIn(Play(TURNS)) as server:
        capsys.readouterr()
        code = main(["eval", server.url, questions, "--out", str(tmp_path / "run"), *options])
        captured = capsys.readouterr()
        assert server.requests == []
    assert code == 1
    assert captured.err.startswith("mempo")
    assert sentence in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_a_prompt_is_a_text_or_a_file(tmp_path, questions, capsys):
    long = "Sei höflich. " * 40
    (tmp_path / "prompt.txt").write_text("From a file.\n")
    (tmp_path / "latin.txt").write_bytes("höflich".encode("latin-1"))
    with OpenAIStandIn(Play(TURNS)) as server:
        for prompt, read in ((long, long), (tmp_path / "prompt.txt", "From a file.")):
            assert main(["ask", server.url, "Who wrote nothing?", "--system-prompt", str(prompt)]) == 1
            assert server.requests[-1][1]["messages"][0]["content"].startswith(read)
        capsys.readouterr()
        sentence = refused(capsys, "ask", server.url, "Who?", "--system-prompt", tmp_path / "latin.txt")
    assert "latin.txt is not text in UTF-8" in sentence


def test_what_is_not_there(tmp_path, questions, index, closed, capsys, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    out = ["--out", tmp_path / "run"]
    nowhere = tmp_path / "nowhere"
    assert "does not answer" in refused(capsys, "eval", f"{closed}/v1", questions, *out)
    assert "does not answer" in refused(capsys, "ask", f"{closed}/v1", "Who?")
    for command in (
        ["eval", nowhere, questions, *out],
        ["collect", nowhere, questions, *out],
        ["ask", nowhere, "Who?"],
    ):
        assert f"There is no folder {nowhere}: name a checkpoint's folder" in refused(capsys, *command)
    assert "give both, or neither" in refused(capsys, "ask", nowhere, "Who?", "--backend", "openai")
    with OpenAIStandIn(Play(TURNS)) as server:
        search = ["--search", f"{closed}/retrieve"]
        assert f"The search server {closed}/retrieve" in refused(capsys, "eval", server.url, questions, *out, *search)
        assert "does not work" in refused(capsys, "ask", server.url, "Who?", *search)
        for wrong in ("no such file.jsonl", questions):
            if wrong == questions:
                Path(questions).write_text('{"question": "Who?", "answers": ["a"], "id": 1}\nnonsense\n')
            assert Path(wrong).name in refused(capsys, "eval", server.url, wrong, *out)
        assert server.requests == []
    assert "give a model, questions and --out" in refused(capsys, "eval", "m")
    assert not (tmp_path / "run").exists()


def test_a_folder_of_another_run(tmp_path, questions, index, capsys):
    with OpenAIStandIn(Play(TURNS)) as server:
        command = ["eval", server.url, questions, "--search", index, "--out", str(tmp_path / "run")]
        assert main(command) == 0
        before = (tmp_path / "run" / "trajectories.jsonl").read_bytes()
        for options, name in ((["--max-turns", "3"], "max_turns"), (["--search-results", "2"], "search_results")):
            sentence = refused(capsys, *command, *options)
            assert f"was begun with another {name}" in sentence and "overwrite" in sentence
        write(Path(questions), {**ANSWERS, "Who wrote Dune?": ["Brian Herbert"]})
        assert "The question 'Dune?' is another one" in refused(capsys, *command)
        assert "was begun with another purpose" in refused(capsys, "collect", *command[1:])
        assert (tmp_path / "run" / "trajectories.jsonl").read_bytes() == before
        assert main([*command, "--overwrite", "--max-turns", "3"]) == 0
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "trajectories.jsonl").write_text("mine\n")
    with OpenAIStandIn(Play(TURNS)) as server:
        assert "name another folder" in refused(capsys, "eval", server.url, questions, "--out", tmp_path / "mine")


def test_a_server_that_goes_down_is_told_of(tmp_path, questions, capsys):
    """What was done before stays, and the same command goes on."""
    play, down = Play(TURNS), [True]

    def reply(path, body):
        if down[0] and body["messages"][1]["content"] == "Who wrote Emma?":
            return 503, {"error": {"message": "busy"}}
        return play(path, body)

    with OpenAIStandIn(reply) as server:
        command = ["eval", server.url, questions, "--out", str(tmp_path / "run"), "--concurrency", "1"]
        assert "start this again once it does" in refused(capsys, *command)
        assert [record["id"] for record in read_run(tmp_path / "run")] == ["Dune?"]
        down[0] = False
        assert main(command) == 0
    assert play.begun == dict.fromkeys(TURNS, 1)
