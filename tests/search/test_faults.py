"""Training goes on, or stops, as it should when its search server fails. All servers are real processes or sockets."""

import os
import signal

import pytest
from datasets import Dataset
from served import Server
from stand_in import half, trickle
from support import Script, byte_tokenizer, call, one_step, tiny_llama
from transformers import TrainerCallback

from mempo_trl import MemPOConfig, MemPOTrainer
from mempo_trl.data import RelayWorld
from mempo_trl.search import BM25Index, HttpSearch, make_search_tool


TOKENIZER = byte_tokenizer()
WORLD = RelayWorld(seed=1, num_questions=2, hops=2)
NAME = WORLD.documents[0]["contents"].split("\n")[0].strip('"')
ASK = "<think>t</think>" + call(NAME)
AGAIN = "<mem>m</mem><think>t</think>" + call(NAME)
ANSWER = "<mem>m</mem><think>t</think><answer>a</answer>"


class Search:
    """A server process of a relay world that can be restarted at its port."""

    def __init__(self, folder):
        self.folder = folder
        BM25Index.build(WORLD.documents, folder / "index")
        self.server = self._start(0)
        self.url = self.server.url

    def _start(self, port) -> Server:
        command = ["-m", "mempo_trl.cli", "serve", self.folder / "index", "--port", port]
        return Server(command, self.folder / "errors")

    def kill(self):
        self.server.process.kill()
        self.server.process.wait()

    def restart(self):
        self.server = self._start(self.server.port)

    def freeze(self):
        os.kill(self.server.process.pid, signal.SIGSTOP)

    def thaw(self):
        os.kill(self.server.process.pid, signal.SIGCONT)


@pytest.fixture
def searching(tmp_path):
    search = Search(tmp_path)
    yield search
    search.kill()


class Before(TrainerCallback):
    """Does something before a step."""

    def __init__(self, actions):
        self.actions = actions

    def on_step_begin(self, args, state, control, **kwargs):
        self.actions.get(state.global_step + 1, lambda: None)()


def build(tmp_path, url, actions=None, steps=3, connection=None, **config):
    """A trainer whose two rollouts search in their first two turns."""
    tool = make_search_tool(
        HttpSearch(url, **{"timeout": 0.5, "retries": 1, "backoff": 0.01, "cooldown": 0.0, **(connection or {})}), k=1
    )
    options = {"max_steps": steps, "logging_steps": 1, "disable_tqdm": True, "save_strategy": "steps", "save_steps": 1}
    trainer = MemPOTrainer(
        tiny_llama(TOKENIZER),
        args=MemPOConfig(**{**one_step(tmp_path / "run", 2), **options, **config}),
        train_dataset=Dataset.from_dict({"question": ["Where?"] * 8, "answers": [["Paris"]] * 8}),
        processing_class=TOKENIZER,
        tools=[tool],
        callbacks=[Before(actions or {})],
    )
    trainer.seen = []
    scripts = iter(Script(TOKENIZER, [[ASK, AGAIN, ANSWER], [ASK, AGAIN, AGAIN]]) for _ in range(100))
    generate = trainer._generate

    def play(prompts):
        trainer._generate_single_turn = next(scripts)
        result = generate(prompts)
        turns = [turn for trajectory in trainer._trajectories for turn in trajectory.turns]
        trainer.seen.append([message["content"] for turn in turns for message in turn.observation])
        return result

    trainer._generate = play
    return trainer


def logged(trainer, name):
    return [entry[f"tools/{name}_frequency"] for entry in trainer.state.log_history if "reward" in entry]


# The second rollout's last turn calls too, but is not answered: it is the last that it may have.
FAULTS = {
    "killed and restarted": lambda search: {2: search.kill, 3: search.restart},
    "frozen": lambda search: {2: search.freeze, 3: search.thaw},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_training_goes_on_after(tmp_path, searching, fault):
    trainer = build(tmp_path, searching.url, FAULTS[fault](searching), max_turns=3)
    trainer.train()
    assert trainer.state.global_step == 3
    assert logged(trainer, "unavailable") == logged(trainer, "failure") == [0, 1, 0]
    for found in (trainer.seen[0], trainer.seen[2]):
        assert all(NAME in text and "not available" not in text for text in found)
    assert len(trainer.seen[1]) == 4
    assert all("Error: search is not available at the moment." in text for text in trainer.seen[1])
    assert not any("127.0.0.1" in text for text in trainer.seen[1])  # the model reads no address


def test_training_does_not_notice_a_restart_that_is_fast_enough(tmp_path, searching):
    patient = {"timeout": 20, "retries": 100, "patience": 40, "backoff": 0.2}
    trainer = build(
        tmp_path, searching.url, {2: lambda: (searching.kill(), searching.restart())}, connection=patient, max_turns=3
    )
    trainer.train()
    assert logged(trainer, "failure") == [0, 0, 0]


def test_training_stops_when_search_stays_down(tmp_path, searching):
    trainer = build(tmp_path, searching.url, {2: searching.kill}, steps=5, max_turns=3, max_unavailable_turns=4)
    # Two turns of step 2, then two of step 3.
    with pytest.raises(RuntimeError, match=r"search was not available in 4 turns in a row.*The search server http"):
        trainer.train()
    assert trainer.state.global_step == 2
    assert logged(trainer, "unavailable") == [0, 1]
    searching.restart()
    resumed = build(tmp_path, searching.url, steps=4, max_turns=3)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 4
    assert logged(resumed, "unavailable") == [0, 1, 0, 0]


RESULT = (
    200,
    lambda request: {"result": [[{"document": {"contents": f'"{NAME}"\ntext'}}] for _ in request["queries"]]},
)


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param((500, "broken"), id="500"),
        pytest.param(half, id="half a JSON"),
        pytest.param(trickle, id="slowly"),
        pytest.param((200, {"result": [[], [], []]}), id="wrong number of results"),
        pytest.param((404, {"detail": "Not Found"}), id="another path"),
        pytest.param((422, {"detail": "queries: unknown field"}), id="another protocol"),
        pytest.param((200, {"hits": []}), id="another format"),
    ],
)
def test_a_server_that_answers_badly(tmp_path, service, answer):
    service.answers = [answer]
    trainer = build(tmp_path, service.url, {3: lambda: service.answers.__setitem__(slice(None), [RESULT])}, max_turns=3)
    trainer.train()
    assert logged(trainer, "unavailable") == logged(trainer, "failure") == [1, 1, 0]
    service.answers = [answer]
    stopping = build(tmp_path / "stopping", service.url, max_turns=3, max_unavailable_turns=2)
    with pytest.raises(RuntimeError, match="search was not available in 2 turns in a row"):
        stopping.train()
    assert stopping.state.global_step == 0


def test_one_bad_query_fails_alone(tmp_path, service):
    def pick(handler):
        request = handler.server.requests[-1]
        handler.answer(*((400, {"detail": "too long"}) if any(len(q) > 40 for q in request["queries"]) else RESULT))

    service.answers = [pick]
    long = AGAIN.replace(NAME, "very " * 20)
    trainer = build(tmp_path, service.url, steps=1, max_turns=3)
    del trainer._generate  # another script
    trainer._generate_single_turn = Script(TOKENIZER, [[ASK, AGAIN, ANSWER], [ASK, long, ANSWER]])
    trainer.train()
    assert logged(trainer, "failure") == [0.25]
    assert logged(trainer, "unavailable") == [0]
