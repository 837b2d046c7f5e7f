"""With `context_turns=k`, training sees exactly what sampling saw."""

import math

import pytest
import torch
from datasets import Dataset
from support import Script, byte_tokenizer, call, one_step, search, tiny_llama

from mempo_trl import MemPOConfig, MemPOTrainer
from mempo_trl.mempo_trainer import turn_branches


ASK = "<think>t</think>" + call("x")
REMEMBER = "<mem>memory é</mem><think>t</think>" + call("y")
ANSWER = "<mem>all of it</mem><think>t</think><answer>{}</answer>"
ROWS = [
    [ASK, REMEMBER, REMEMBER + call("z"), ANSWER.format("Paris")],
    [ASK, REMEMBER, ANSWER.format("London")],
    ["<think>t</think><answer>Paris</answer>"],
    [ASK, REMEMBER.replace("memory", "another"), REMEMBER, "<mem>cut✂"],
]


def make_trainer(tmp_path, rows=ROWS, model=None, peft_config=None, **config):
    tokenizer = byte_tokenizer()
    options = {
        **one_step(tmp_path, len(rows)),
        "system_prompt": "",
        "context_turns": 1,
        "max_turns": 16,
    }
    trainer = MemPOTrainer(
        model or tiny_llama(tokenizer),
        args=MemPOConfig(**{**options, **config}),
        train_dataset=Dataset.from_dict({"question": ["Where?"] * 32, "answers": [["Paris"]] * 32}),
        processing_class=tokenizer,
        tools=[search],
        peft_config=peft_config,
    )

    class Sampler:
        """Plays the rows again in every generation."""

        def __init__(self):
            self.scripts = []

        def __call__(self, contexts, *args):
            if not self.scripts or len(self.scripts[-1].calls) == max(map(len, rows)):
                self.scripts.append(Script(tokenizer, rows))
            return self.scripts[-1](contexts, *args)

    trainer._generate_single_turn = Sampler()
    return trainer


def score(trainer):
    trainer.model.train()
    return trainer._generate_and_score_completions([trainer.train_dataset[0]] * len(ROWS))


def policy_logps(trainer, output):
    with trainer._using_segments(output.get("segments")):
        return trainer._get_per_token_logps_and_entropies(
            trainer.model,
            torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1),
            torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1),
            output["completion_ids"].size(1),
            compute_entropy=True,
        )[:2]


@torch.no_grad()
def sampled_step_by_step(model, context, turn, temperature):
    """Log-probabilities and entropies of a turn as a sampler has them: token by token, with a key-value cache."""
    model.eval()
    outputs = model(torch.tensor([context]), use_cache=True)
    logps, entropies = [], []
    for token in turn:
        distribution = (outputs.logits[0, -1] / temperature).log_softmax(-1)
        logps.append(distribution[token])
        entropies.append(-(distribution.exp() * distribution).sum())
        outputs = model(torch.tensor([[token]]), past_key_values=outputs.past_key_values, use_cache=True)
    model.train()
    return torch.stack(logps), torch.stack(entropies)


@pytest.mark.parametrize("context_turns", [1, 2, 3, None])
def test_training_sees_what_sampling_saw(tmp_path, context_turns):
    trainer = make_trainer(tmp_path, context_turns=context_turns, temperature=0.7)
    output = score(trainer)
    logps, entropies = policy_logps(trainer, output)
    sampled = output["completion_mask"] * output["tool_mask"]
    for row, trajectory in enumerate(trainer._trajectories):
        for number, turn in enumerate(trajectory.turns):
            context = trainer._generate_single_turn.scripts[-1].contexts[row][number]
            assert context == trajectory.context_ids(number)
            expected = sampled_step_by_step(trainer.model, context, turn.ids, 0.7)
            start = trajectory.turn_start(number)
            columns = slice(start, start + len(turn.ids))
            assert sampled[row, columns].all()
            torch.testing.assert_close(logps[row, columns], expected[0], atol=1e-4, rtol=0)
            torch.testing.assert_close(entropies[row, columns], expected[1], atol=1e-4, rtol=0)
    if context_turns is not None:
        assert not logps[sampled == 0].any()


def test_the_window_is_the_last_turns():
    """Prompt 0; turns 1…3 of two tokens with observations of one."""
    completion = [11, 12, 10, 21, 22, 20, 31, 32, 99, 99]
    segments = [0, 0, 1, 2, 2, 3, 4, 4, -1, -1]
    branches, columns = turn_branches([0], completion, segments, 1)
    assert [list(b.ids) for b in branches] == [[0, 11, 12], [0, 11, 12, 10, 21, 22], [0, 21, 22, 20, 31, 32]]
    assert [list(b.scored) for b in branches] == [[1, 2], [4, 5], [4, 5]]
    assert columns == [0, 1, 3, 4, 6, 7]
    branches, _ = turn_branches([0], completion, segments, 2)
    assert list(branches[2].ids) == [0, *completion[:8]]
    assert turn_branches([0], [99], [-1], 1) == ([], [])


def test_a_window_over_everything_changes_nothing(tmp_path):
    weights, losses = [], []
    for context_turns in (None, 20):
        trainer = make_trainer(tmp_path, context_turns=context_turns, max_steps=2, beta=0.0)
        trainer.train()
        weights.append(torch.cat([p.detach().flatten() for p in trainer.model.parameters()]))
        losses.append(trainer.state.log_history[-1]["train_loss"])
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)
    torch.testing.assert_close(weights[0], weights[1], atol=1e-5, rtol=0)


@pytest.mark.parametrize("form", ["packed", "unrolled"])
def test_a_step_is_the_gradient_of_the_loss_written_plainly(tmp_path, form):
    trainer = make_trainer(tmp_path, prefix_tree_form=form, loss_type="grpo", max_tokens_per_forward=1200)
    output = score(trainer)
    trainer.current_gradient_accumulation_steps = 1
    loss = trainer._compute_loss(trainer.model, output)
    loss.backward()
    got = torch.cat([p.grad.flatten() for p in trainer.model.parameters()])

    trainer.model.zero_grad()
    plain = tiny_llama(byte_tokenizer())
    rows = []
    for row, trajectory in enumerate(trainer._trajectories):
        tokens = []
        for number, turn in enumerate(trajectory.turns):
            context = trajectory.context_ids(number)
            logits = plain(torch.tensor([context + turn.ids])).logits[0, len(context) - 1 : -1]
            logps = logits.log_softmax(-1)[range(len(turn.ids)), turn.ids]
            start = trajectory.turn_start(number)
            # The ratio is 1, so that the clipped loss is minus the advantage, and its gradient that of the logps.
            tokens.append(-(logps - logps.detach() + 1) * output["advantages"][row, start : start + len(turn.ids)])
        rows.append(torch.cat(tokens).mean())
    expected_loss = torch.stack(rows).mean()
    expected_loss.backward()
    expected = torch.cat([p.grad.flatten() for p in plain.parameters()])
    assert loss.item() == pytest.approx(expected_loss.item(), abs=1e-5)
    assert (got - expected).norm() / expected.norm() < 1e-3


@pytest.mark.parametrize(
    "config",
    [
        {"loss_type": "grpo"},
        {"loss_type": "bnpo"},
        {"loss_type": "dr_grpo"},
        {"loss_type": "dapo"},
        {"loss_type": "cispo"},
        {"loss_type": "sapo"},
        {"loss_type": "vespo"},
        {"loss_type": "luspo", "importance_sampling_level": "sequence"},
        {"num_iterations": 2, "max_steps": 4},
        {"top_entropy_quantile": 0.5, "entropy_coef": 0.01},
        {"gradient_checkpointing": True},
        {"mask_truncated_completions": True, "pad_to_multiple_of": 16},
        {"off_policy_mask_threshold": 0.5},
    ],
    ids=str,
)
def test_everything_of_grpo_trains(tmp_path, config):
    trainer = make_trainer(tmp_path, **config)
    before = [p.detach().clone() for p in trainer.model.parameters()]
    trainer.train()
    assert math.isfinite(trainer.state.log_history[-1]["train_loss"])
    assert any(not torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))


def test_rows_keep_their_structure_when_shuffled_and_split(tmp_path):
    """Before the first update every row's log-probabilities are the old ones, wherever the shuffle put it."""
    trainer = make_trainer(
        tmp_path, per_device_train_batch_size=2, steps_per_generation=2, num_iterations=2, max_steps=1, beta=0.0
    )
    seen = []
    compute = trainer._compute_loss

    def check(model, inputs):
        logps, _ = policy_logps(trainer, inputs)
        sampled = (inputs["completion_mask"] * inputs["tool_mask"]).bool()
        seen.append((logps - inputs["old_per_token_logps"])[sampled].abs().max().item())
        assert inputs["segments"].shape == inputs["completion_ids"].shape
        return compute(model, inputs)

    trainer._compute_loss = check
    trainer.train()
    assert seen
    assert max(seen) < 1e-5


def count_rows(model):
    """The rows of each forward from now on."""
    rows = []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: rows.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    return rows


@pytest.mark.parametrize("context_turns", [None, 1])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("form", ["packed", "unrolled"])
def test_old_log_probabilities_and_memories_take_one_forward(tmp_path, context_turns, temperature, form):
    options = {"context_turns": context_turns, "temperature": temperature, "prefix_tree_form": form}
    trainer = make_trainer(tmp_path, num_iterations=2, **options)
    assert trainer._scorer.packs(trainer.model) == (form == "packed")
    rows = count_rows(trainer.model)
    output = score(trainer)
    if form == "packed":
        assert sum(rows) == len(ROWS)  # each rollout is one row of one forward
    sampled = (output["completion_mask"] * output["tool_mask"]).bool()
    logps, _ = policy_logps(trainer, output)
    torch.testing.assert_close(output["old_per_token_logps"][sampled], logps[sampled], atol=1e-5, rtol=0)
    # Where the old ones are not needed, the memories are scored alone, by a head of temperature 1.
    alone = score(make_trainer(tmp_path, **options))
    assert "old_per_token_logps" not in alone
    torch.testing.assert_close(output["advantages"], alone["advantages"], atol=2e-3, rtol=1e-3)


def test_a_head_that_is_not_linear_takes_two_forwards(tmp_path):
    model = tiny_llama(byte_tokenizer())
    trainer = make_trainer(tmp_path, num_iterations=2, temperature=0.7, model=model)
    model.config.final_logit_softcapping = 30.0
    assert trainer._scorer.packs(trainer.model)
    rows = count_rows(trainer.model)
    output = score(trainer)
    assert sum(rows) == len(ROWS) + 3  # one of them has no memory
    alone = make_trainer(tmp_path, temperature=0.7)
    alone.model.config.final_logit_softcapping = 30.0
    torch.testing.assert_close(output["advantages"], score(alone)["advantages"])


def test_adapters_old_log_probabilities_are_not_the_references(tmp_path):
    from peft import LoraConfig

    adapters = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"], init_lora_weights=False)
    trainer = make_trainer(tmp_path, beta=0.1, peft_config=adapters)  # the reference is asked for first
    output = score(trainer)
    alone = score(make_trainer(tmp_path, beta=0.1, peft_config=adapters, num_iterations=2))
    sampled = (output["completion_mask"] * output["tool_mask"]).bool()
    policy, _ = policy_logps(trainer, output)
    assert (policy - output["ref_per_token_logps"])[sampled].abs().max() > 0.01
    torch.testing.assert_close(output["ref_per_token_logps"], alone["ref_per_token_logps"], atol=1e-5, rtol=0)
    assert (alone["old_per_token_logps"] - alone["ref_per_token_logps"])[sampled].abs().max() > 0.01


def test_reference_model_and_adapters(tmp_path):
    from peft import LoraConfig

    tokenizer = byte_tokenizer()
    tiny_llama(tokenizer).save_pretrained(tmp_path / "model")
    trainer = make_trainer(tmp_path, model=str(tmp_path / "model"), beta=0.1)
    trainer.train()
    assert trainer.state.log_history[0]["kl"] == pytest.approx(0.0, abs=1e-6)
    adapters = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj", "v_proj"])
    trainer = make_trainer(tmp_path, beta=0.1, peft_config=adapters, gradient_checkpointing=True)
    trainer.train()
    assert trainer.state.log_history[0]["kl"] == pytest.approx(0.0, abs=1e-6)
    assert trainer._scorer.packs(trainer.model)


def test_the_models_context_bounds_a_turn_and_not_the_rollout(tmp_path):
    """Sixteen turns whose history is four times as long as the model's context."""
    tokenizer = byte_tokenizer()
    turns = [ASK, *[REMEMBER.replace("memory", "many facts " * 12)] * 14, ANSWER.format("Paris")]
    limit = 900
    model = tiny_llama(tokenizer, max_position_embeddings=limit)
    rows = [turns, [*turns[:-1], ANSWER.format("London")]]
    trainer = make_trainer(tmp_path, rows=rows, model=model, max_observation_length=150)
    trainer.train()
    for trajectory in trainer._trajectories:
        assert trajectory.stop_reason == "answer"
        assert trajectory.tool_failures == 0
        assert len(trajectory.turns) == 16
        assert len(trajectory.history_ids(16)) >= 4 * limit
        assert all(len(trajectory.context_ids(n)) + len(turn.ids) <= limit for n, turn in enumerate(trajectory.turns))
    assert trainer.state.log_history[-1]["train_loss"] is not None
    # The whole history, as the baseline, does not fit: it loses what is oldest.
    trainer = make_trainer(
        tmp_path, rows=rows, model=tiny_llama(tokenizer, max_position_embeddings=limit), memory_baseline="history"
    )
    trainer.train()
    assert trainer.state.log_history[0]["memory/per_rollout"] == 15


def test_importance_sampling_against_another_sampler(tmp_path):
    """A sampler that tells its log-probabilities, as vLLM does: the ratio is 1 where they are the windowed ones."""
    trainer = make_trainer(tmp_path)
    trainer.train()  # so that models are prepared
    play = trainer._generate_single_turn

    def generate(contexts, *args):
        turns, _ = play(contexts, *args)
        return turns, [
            sampled_step_by_step(trainer.model, context, turn, 1.0)[0].tolist()
            for context, turn in zip(contexts, turns, strict=True)
        ]

    trainer._generate_single_turn = generate
    output = score(trainer)
    logps, _ = policy_logps(trainer, output)
    sampled = (output["completion_mask"] * output["tool_mask"]).bool()
    difference = (logps - output["sampling_per_token_logps"])[sampled].abs()
    assert difference.max() < 1e-4
    assert not output["sampling_per_token_logps"][~sampled].any()
