import copy
import json

import pytest
import torch
from relay_run import SETTINGS, relay_trainer, world
from support import search

from mempo_trl import MemPOTrainer
from mempo_trl.evaluation import EvaluationCallback, evaluate, read_run, summarize


HELD_OUT = world(41, 12)[0].select(range(7, 12))
LOGGED = ("exact_match", "objective_exact_match", "f1", "turns", "total_tokens", "peak_tokens", "well_formed")


def heldout(trainer):
    """What was logged of evaluations, by step."""
    entries = [entry for entry in trainer.state.log_history if any(name.startswith("heldout/") for name in entry)]
    steps = [entry["step"] for entry in entries]
    assert len(set(steps)) == len(steps)
    return dict(zip(steps, entries, strict=True))


def training_logs(trainer):
    """What training logged, but for the time that it took."""
    rest = [entry for entry in trainer.state.log_history if not any(name.startswith("heldout/") for name in entry)]
    timed = ("time", "per_second")
    return [{name: value for name, value in entry.items() if not any(t in name for t in timed)} for entry in rest]


def weights(trainer):
    return {name: weight.clone() for name, weight in trainer.model.state_dict().items()}


def evaluated(model, tokenizer):
    return evaluate(model, HELD_OUT, [world(41, 12)[1]], tokenizer=tokenizer, batch_size=2, progress=False, **SETTINGS)


def test_what_is_logged_is_what_evaluate_finds(tmp_path):
    trainer = relay_trainer(tmp_path)
    trainer.add_callback(EvaluationCallback(trainer, HELD_OUT, steps=3))
    tokenizer = trainer.processing_class
    expected = {0: evaluated(trainer.model, tokenizer)}
    trainer.train()
    expected[4] = evaluated(trainer.model, tokenizer)
    assert expected[0].records != expected[4].records
    found = heldout(trainer)
    assert sorted(found) == [0, 3, 4]
    for step, evaluation in expected.items():
        folder = tmp_path / "heldout" / f"step-{step}"
        assert read_run(folder) == evaluation.records
        assert json.loads((folder / "summary.json").read_text()) == evaluation.summary
        assert (folder / "summary.md").read_text() == evaluation.to_markdown()
        metrics = evaluation.summary["all"]["metrics"]
        assert {name: found[step][f"heldout/{name}"] for name in LOGGED} == {
            name: metrics[name]["mean"] for name in LOGGED
        }
    assert sorted(path.name for path in (tmp_path / "heldout").iterdir()) == ["step-0", "step-3", "step-4"]
    assert not any("heldout" in name for entry in training_logs(trainer) for name in entry)
    assert all(set(entry) <= {f"heldout/{name}" for name in LOGGED} | {"step", "epoch"} for entry in found.values())


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A training that nothing is evaluated in."""
    trainer = relay_trainer(tmp_path_factory.mktemp("alone"), max_steps=5)
    trainer.train()
    return trainer


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_training_does_not_notice(tmp_path, alone, temperature):
    trainer = relay_trainer(tmp_path, max_steps=5)
    # Also between two steps that are logged together.
    trainer.add_callback(EvaluationCallback(trainer, HELD_OUT, steps=1, temperature=temperature))
    config, kwargs = copy.deepcopy(trainer.generation_config), dict(trainer.generation_kwargs)
    trainer.train()
    assert sorted(heldout(trainer)) == [0, 1, 2, 3, 4, 5]
    before = weights(relay_trainer(tmp_path / "before"))
    for name, weight in weights(alone).items():
        assert torch.equal(trainer.model.state_dict()[name], weight), name
    assert not all(torch.equal(before[name], weight) for name, weight in weights(alone).items())
    assert training_logs(trainer) == training_logs(alone)
    assert [entry["step"] for entry in training_logs(alone)] == [2, 4, 5]
    assert [len(t.turns) for t in trainer._trajectories] == [len(t.turns) for t in alone._trajectories]
    changed = {"max_new_tokens"}  # the limit of the last turn that was sampled
    assert {**trainer.generation_config.to_dict(), **dict.fromkeys(changed)} == {
        **config.to_dict(),
        **dict.fromkeys(changed),
    }
    assert {**trainer.generation_kwargs, **dict.fromkeys(changed)} == {**kwargs, **dict.fromkeys(changed)}


@pytest.mark.parametrize(
    ("steps", "max_steps", "expected"), [(2, 4, [0, 2, 4]), (2, 3, [0, 2, 3]), (100, 1, [0, 1]), (1, 2, [0, 1, 2])]
)
def test_when(tmp_path, steps, max_steps, expected):
    trainer = relay_trainer(tmp_path, max_steps=max_steps)
    ran = []
    run_agent = trainer.run_agent
    trainer.run_agent = lambda prompts, temperature: ran.append(len(prompts)) or run_agent(prompts, temperature)
    trainer.add_callback(EvaluationCallback(trainer, HELD_OUT, steps=steps, max_questions=3))
    trainer.train()
    assert sorted(heldout(trainer)) == expected
    assert ran == [2, 1] * len(expected)  # batches of three questions


def test_a_run_that_goes_on_from_a_checkpoint(tmp_path):
    def run(resume, **config):
        trainer = relay_trainer(tmp_path, save_strategy="steps", save_steps=2, **config)
        trainer.add_callback(EvaluationCallback(trainer, HELD_OUT, steps=2))
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    whole = run(None)
    folder = tmp_path / "heldout" / "step-4"
    records = read_run(folder)
    (folder / "trajectories.jsonl").unlink()
    before = (tmp_path / "heldout" / "step-2" / "summary.json").stat().st_mtime_ns
    resumed = run(str(tmp_path / "checkpoint-2"))
    assert heldout(resumed) == heldout(whole)
    assert sorted(heldout(resumed)) == [0, 2, 4]
    assert read_run(folder) == records
    assert (tmp_path / "heldout" / "step-2" / "summary.json").stat().st_mtime_ns == before
    for name, weight in weights(whole).items():
        assert torch.equal(resumed.model.state_dict()[name], weight), name


def test_another_temperature_is_drawn_with(tmp_path):
    trainer = relay_trainer(tmp_path, top_k=7, max_steps=0)
    callback = EvaluationCallback(trainer, HELD_OUT, temperature=2.0, output_dir=tmp_path / "elsewhere")
    seen = []
    generate = trainer._generate_single_turn

    def keep(*args):
        config = trainer.generation_config
        seen.append((config.do_sample, config.temperature, config.top_k))
        return generate(*args)

    trainer._generate_single_turn = keep
    callback.on_train_begin(trainer.args, trainer.state, trainer.control)
    assert set(seen) == {(True, 2.0, 7)}
    greedy, sampled = (
        evaluated(trainer.model, trainer.processing_class).records,
        read_run(tmp_path / "elsewhere/step-0"),
    )
    assert greedy != sampled
    assert heldout(trainer)[0]["heldout/f1"] == summarize(sampled)["all"]["metrics"]["f1"]["mean"]


def test_the_scorer_can_be_chosen(tmp_path):
    trainer = relay_trainer(tmp_path, max_steps=1)
    trainer.add_callback(EvaluationCallback(trainer, HELD_OUT, scorer="mem1", max_questions=2))
    trainer.train()
    assert json.loads((tmp_path / "heldout" / "step-1" / "summary.json").read_text())["scorer"] == "mem1"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "`steps=0` is not allowed"),
        ({"temperature": -1.0}, "`temperature=-1.0` is not allowed"),
        ({"scorer": "rouge"}, "scorer must be one of"),
        ({"questions": [{"question": "q"}]}, "Questions without `answers`"),
        ({"questions": []}, "There are no questions"),
        ({"max_questions": 0}, "`max_questions=0` is not allowed"),
    ],
)
def test_what_is_wrong_is_said_at_once(tmp_path, options, message):
    trainer = relay_trainer(tmp_path)
    with pytest.raises(ValueError, match=message):
        EvaluationCallback(trainer, **{"questions": HELD_OUT, **options})


def test_an_environment_has_questions_of_its_own(tmp_path):
    class Environment:
        """One that knows what it asks."""

        def reset(self, **kwargs):
            return None

        search = staticmethod(search)

    trainer = relay_trainer(tmp_path)
    both = MemPOTrainer(
        trainer.model,
        args=trainer.args,
        reward_funcs=lambda completions, **kwargs: [0.0] * len(completions),
        train_dataset=HELD_OUT,
        processing_class=trainer.processing_class,
        environment_factory=Environment,
    )
    with pytest.raises(ValueError, match="questions come from the environment"):
        EvaluationCallback(both, HELD_OUT)
