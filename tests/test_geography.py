"""The world of countries, its expert, and the whole way from questions to a judged agent."""

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest
from support import byte_tokenizer, tiny_llama

from mempo_trl.evaluation import read_run
from mempo_trl.protocol import check_trajectory
from mempo_trl.rewards import exact_match
from mempo_trl.search import BM25Index, make_search_tool


FOLDER = Path(__file__).parent.parent / "examples" / "geography"
sys.path.insert(0, str(FOLDER))
from world import Expert, GeographyWorld, read_document  # noqa: E402


@pytest.fixture(scope="module")
def world():
    return GeographyWorld()


@pytest.fixture(scope="module")
def search(world, tmp_path_factory):
    folder = tmp_path_factory.mktemp("geography")
    (folder / "corpus.jsonl").write_text("".join(json.dumps(document) + "\n" for document in world.documents))
    return make_search_tool(BM25Index.build(folder / "corpus.jsonl", folder / "index"), 1)


def all_questions(world):
    return [
        question for split, number in (("train", 1400), ("test", 500)) for question in world.questions(split, number)
    ]


def test_every_look_up_finds_its_document(world, search):
    """The questions can be answered, by the words that the expert searches for."""
    facts = {fact for question in all_questions(world) for fact in question.chain}
    assert len(facts) > 500
    found = search.batch([{"query": fact.query} for fact in facts])
    for fact, observation in zip(facts, found, strict=True):
        assert read_document(observation, fact.subject, fact.relation) == fact.object


def test_nothing_that_is_tested_is_trained_on(world):
    entities = {
        split: {name for question in world.questions(split, 400) for fact in question.chain for name in (fact.subject,)}
        for split in ("train", "test")
    }
    assert not entities["train"] & entities["test"]


def test_questions_are_drawn_by_their_seed():
    first, again, other = GeographyWorld(1), GeographyWorld(1), GeographyWorld(2)
    assert first.questions("train", 90) == again.questions("train", 90)
    assert first.questions("train", 90) != other.questions("train", 90)
    hops = [len(question.chain) for question in first.questions("train", 90)]
    assert [hops.count(n) for n in (1, 2, 3)] == [30, 30, 30]
    assert len({question.question for question in first.questions("train", 1000)}) == 1000
    with pytest.raises(ValueError, match=r"There are only \d+ questions to test on, not 5000"):
        first.questions("test", 5000)


def play(question, expert, search, window=None):
    """The turns of an expert that sees the question and so many turns before."""
    head = [{"role": "system", "content": "s"}, {"role": "user", "content": question}]
    rounds, turns = [], []
    for number in range(8):
        seen = rounds if window is None else rounds[-window:]
        turns.append(expert.turn(head + list(itertools.chain.from_iterable(seen)), number))
        if "<answer>" in turns[-1]:
            break
        query = turns[-1].partition('"query": "')[2].partition('"')[0]
        rounds.append([{"role": "assistant", "content": turns[-1]}, {"role": "user", "content": search(query=query)}])
    return turns


@pytest.mark.parametrize("window", [1, None])
def test_the_expert_is_right_and_well_formed(world, search, window):
    for question in world.questions("test", 150):
        turns = play(question.question, Expert(), search, window)
        assert len(turns) == len(question.chain) + 1
        assert not check_trajectory(turns)
        answer = turns[-1].partition("<answer>")[2].partition("</answer>")[0]
        assert exact_match(answer, question.row()["answers"])
        for fact in question.chain:
            assert f"{fact.query}: {fact.object}" in turns[-1]


def test_the_expert_fails_as_often_as_it_is_told(world, search):
    questions = world.questions("train", 200)
    turns = [play(question.question, Expert(0.3), search) for question in questions]
    assert turns == [play(question.question, Expert(0.3), search) for question in questions]
    wrong = sum("unknown" in episode[-1] for episode in turns)
    malformed = sum(bool(check_trajectory(episode)) for episode in turns)
    assert 10 < wrong < 60
    assert 60 < malformed < 180
    with pytest.raises(ValueError, match=r"`failures=1.5` is not allowed"):
        Expert(1.5)
    with pytest.raises(ValueError, match="no question of the world"):
        Expert().turn([{"role": "user", "content": "Who wrote Dune?"}])


def test_the_whole_way(tmp_path):
    """Every step runs, with a model that learns nothing; a second call finds everything done."""
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(tmp_path / "model")
    tiny_llama(tokenizer).save_pretrained(tmp_path / "model")
    options = {"output-dir": tmp_path / "run", "model": tmp_path / "model"}
    options |= {"train": 6, "test": 3, "failures": 0, "sft-steps": 1, "mempo-steps": 1}
    command = [sys.executable, str(FOLDER / "run.py")]
    command += [part for name, value in options.items() for part in (f"--{name}", str(value))]
    for again in (False, True):
        done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        assert done.stdout.count("done before") == (11 if again else 0), done.stdout
    report = (tmp_path / "run" / "report.md").read_text()
    assert all(f"| {name} |" in report for name in ("base", "cold_start", "trained"))
    assert "6 of 6 episodes are kept" in report
    assert "--dtype bfloat16" in report or "--dtype float32" in report  # whichever is the faster here
    assert str(tmp_path / "run" / "index") in report  # the commands are shown
    assert len(read_run(tmp_path / "run" / "eval" / "trained")) == 3
    lines = (tmp_path / "run" / "traces" / "sft.jsonl").read_text().splitlines()
    assert len(lines) == 2 * (2 + 3 + 4)
    refused = subprocess.run([*command, "--seed", "1"], capture_output=True, text=True, timeout=100, check=False)
    assert "has a run with other arguments: name another --output-dir, or remove it" in refused.stderr
