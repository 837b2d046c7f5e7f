"""The trainer, end to end on scripted rollouts, against the oracle and against TRL."""

import copy

import pytest
import torch
from datasets import Dataset
from oracle import oracle_advantages
from support import SMOLLM2_TEMPLATE, Script, byte_tokenizer, call, one_step, search, tiny_llama
from transformers import LlamaForSequenceClassification

from mempo_trl import MemPOConfig, MemPOTrainer


QUESTIONS = {
    "plain": ("Who directed it?", ["Kathryn Bigelow", "Bigelow"]),
    "punctuation": ("Which country?", ["U.S."]),
    "brackets": ("Which company?", ["Marvel (comics)"]),
    "chinese": ("乔布斯在哪所大学读书？", ["里德学院"]),
    "objectives": ("Who and where?", [["Curie", "Marie Curie"], ["Paris."], ["乔布斯"]]),
}
# One rollout each: lists of turns.
SCRIPTS = {
    "two turns": [
        "<think>a</think>" + call("x"),
        "<mem>Bigelow, U.S.</mem>\n<think>b</think>\n<answer>Kathryn Bigelow</answer>",
    ],
    "four turns": [
        "<mem>nothing yet</mem><think>a</think>" + call("x"),
        "<mem>one: 里德学院</mem><think>b</think>" + call("y") + call("z"),
        "<mem>one; two é中</mem>.\n<think>c</think>" + call("y"),
        "<mem>all</mem><think>d</think><answer>Kathryn Bigelow</answer>",
    ],
    "no memory": ["<think>a</think>" + call("x"), "<think>b</think><answer>London</answer>"],
    "answers at once": ["<think>a</think><answer>Paris</answer>"],
    "memory cut": ["<think>a</think>" + call("x"), "<mem>Kathryn Big✂"],
    "second memory cut": ["<think>a</think>" + call("x"), "<mem>one</mem><think>b</think><mem>Kathryn Big✂"],
    "nested": ["<think>a</think>" + call("x"), "<mem>a<mem>b</mem>c</mem><think>b</think><answer>Bigelow</answer>"],
    "repeated": ["<think>a</think>" + call("x"), "t <mem>a</mem><mem>b</mem><think>b</think><answer>x</answer>"],
    "text after the answer": [
        "<think>a</think>" + call("x"),
        "<mem>m</mem><think>b</think><answer>U.S.</answer> and more",
    ],
    "empty answer": ["<think>a</think>" + call("x"), "<mem></mem><think>b</think><answer></answer>"],
}


def make_trainer(tmp_path, tokenizer, scripts, question="plain", **kwargs):
    """A trainer whose policy plays `scripts`, one question in a group."""
    text, answers = QUESTIONS[question]
    options = {
        **one_step(tmp_path, len(scripts)),
        "system_prompt": "Use <mem>.",
        "max_turns": 5,
    }
    trainer = MemPOTrainer(
        kwargs.pop("model", None) or tiny_llama(tokenizer),
        kwargs.pop("reward_funcs", None),
        args=MemPOConfig(**{**options, **kwargs}),
        train_dataset=Dataset.from_dict({"question": [text] * 8, "answers": [answers] * 8}),
        processing_class=tokenizer,
        tools=[search],
    )
    trainer._generate_single_turn = Script(tokenizer, scripts)
    return trainer


def test_prompts_that_leave_no_room_are_told_of_once(tmp_path, caplog):
    tokenizer = byte_tokenizer()
    model = tiny_llama(tokenizer, max_position_embeddings=100)
    trainer = make_trainer(tmp_path, tokenizer, [[], []], system_prompt="long " * 100, model=model, max_steps=2)
    with caplog.at_level("WARNING", logger="mempo_trl"):
        trainer.train()
    assert trainer.state.global_step == 2
    assert caplog.text.count("tokens, but the model's context holds 100") == 1


def score(trainer) -> dict:
    """The scored batch of one generation, without a training step."""
    batch = [trainer.train_dataset[n // trainer.num_generations] for n in range(trainer.args.generation_batch_size)]
    trainer.model.train()
    return trainer._generate_and_score_completions(batch)


def rollouts_of(trainer, output, gold: str) -> list[dict]:
    """What the oracle needs, cut out of the batch with the script's own turns."""
    script = trainer._generate_single_turn
    rollouts = []
    for row, turns in enumerate(script.rows):
        prompt = output["prompt_ids"][row][output["prompt_mask"][row].bool()].tolist()
        completion = output["completion_ids"][row][output["completion_mask"][row].bool()].tolist()
        observations, position = [], 0
        for number, turn in enumerate(turns):
            assert completion[position : position + len(turn)] == turn
            position += len(turn)
            if number < len(turns) - 1:
                # The sampler's next context ends in what stands between the two turns.
                context, following = script.contexts[row][number + 1], turns[number + 1]
                length = next(
                    n
                    for n in range(1, len(completion))
                    if completion[position + n : position + n + len(following)] == following
                    and completion[position : position + n] == context[-n:]
                )
                observations.append(completion[position : position + length])
                position += length
        assert position == len(completion)
        cut = turns[-1][-1] != trainer._tokenizer.eos_token_id
        rollouts.append({"prompt": prompt, "turns": turns, "observations": observations, "cut": cut, "gold": gold})
    return rollouts


def gold(question: str) -> str:
    answers = QUESTIONS[question][1]
    return answers[0] if isinstance(answers[0], str) else " ; ".join(accepted[0] for accepted in answers)


def check_against_oracle(trainer, question, **oracle_options):
    output = score(trainer)
    rewards = torch.tensor([trainer._logs["rewards"][name] for name in trainer.reward_func_names]).sum(0)
    outcome = ((rewards - rewards.mean()) / (rewards.std() + 1e-4)).tolist()
    expected = oracle_advantages(
        trainer.model,
        trainer._tokenizer,
        rollouts_of(trainer, output, gold(question)),
        outcome,
        trainer.num_generations,
        **oracle_options,
    )
    assert output["advantages"].shape == output["completion_ids"].shape
    moved = 0
    for row, tokens in enumerate(expected):
        torch.testing.assert_close(output["advantages"][row, : len(tokens)], torch.tensor(tokens), atol=1e-4, rtol=1e-4)
        moved += len(set(tokens)) > 1
    return moved


@pytest.mark.parametrize("question", QUESTIONS)
def test_advantages_agree_with_the_oracle(tmp_path, question):
    tokenizer = byte_tokenizer()
    trainer = make_trainer(tmp_path, tokenizer, SCRIPTS.values(), question)
    assert check_against_oracle(trainer, question) >= 5  # rows in which memory tokens stand out


@pytest.mark.parametrize(
    "options",
    [
        {"baseline": "history"},
        {"baseline": "previous_memory"},
        {"baseline": "none"},
        {"scale": "turn"},
        {"scale": "batch"},
        {"scale": "none"},
        {"coefficient": 0.3},
        {"mode": "independent", "threshold": 0.01},
        {"mode": "joint", "threshold": 0.003},
        {"mode": "either", "threshold": 0.003},
        {"mode": "either", "threshold": 0.003, "baseline": "none"},
        {"mode": "independent", "threshold": 0.9, "baseline": "previous_memory"},
        {"context_turns": 1},
        {"context_turns": 2, "mode": "either", "threshold": 0.003},
        {"context_turns": 1, "baseline": "history"},
    ],
    ids=str,
)
def test_options_agree_with_the_oracle(tmp_path, options):
    names = {
        "baseline": "memory_baseline",
        "mode": "memory_filter",
        "threshold": "memory_filter_threshold",
        "scale": "memory_scale",
        "coefficient": "memory_coefficient",
        "context_turns": "context_turns",
    }
    trainer = make_trainer(
        tmp_path,
        byte_tokenizer(),
        SCRIPTS.values(),
        "objectives",
        **{names[name]: value for name, value in options.items()},
    )
    moved = check_against_oracle(trainer, "objectives", **options)
    assert moved >= 1 or options.get("threshold") == 0.9


def test_two_questions_are_two_pools(tmp_path):
    scripts = [SCRIPTS[name] for name in ("two turns", "four turns", "nested", "memory cut")]
    trainer = make_trainer(tmp_path, byte_tokenizer(), scripts, num_generations=2)
    output = score(trainer)
    rewards = torch.tensor(trainer._logs["rewards"]["outcome_reward"]).view(2, 2)
    outcome = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    expected = oracle_advantages(
        trainer.model, trainer._tokenizer, rollouts_of(trainer, output, gold("plain")), outcome.flatten().tolist(), 2
    )
    for row, tokens in enumerate(expected):
        torch.testing.assert_close(output["advantages"][row, : len(tokens)], torch.tensor(tokens), atol=1e-4, rtol=0)


def test_memory_rewards_do_not_depend_on_temperature_or_dropout(tmp_path):
    tokenizer = byte_tokenizer()
    advantages = []
    for temperature, dropout in ((1.0, 0.0), (0.3, 0.0), (1.0, 0.5)):
        model = tiny_llama(tokenizer, attention_dropout=dropout)
        trainer = make_trainer(tmp_path, tokenizer, SCRIPTS.values(), model=model, temperature=temperature)
        trainer.model.model.embed_tokens.training = False  # a module in a mode of its own
        advantages.append(score(trainer)["advantages"])
        assert trainer.model.training
        assert trainer.model.model.layers[0].training
    for other in advantages[1:]:
        torch.testing.assert_close(other, advantages[0])


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo"])
def test_without_memory_a_step_is_grpo(tmp_path, loss_type):
    """`memory_coefficient=0`: the same loss and weights as TRL's trainer given the same rollouts."""
    from trl import GRPOConfig, GRPOTrainer

    tokenizer = byte_tokenizer()
    scripts = list(SCRIPTS.values())
    ours = make_trainer(
        tmp_path, tokenizer, scripts, memory_coefficient=0, loss_type=loss_type, max_completion_length=2000, beta=0.0
    )
    ours.train()
    trajectories = ours._trajectories

    def play(prompts, trainer):
        return {
            "prompt_ids": [t.prompt_ids for t in trajectories],
            "completion_ids": [t.completion_ids for t in trajectories],
            "env_mask": [t.tool_mask for t in trajectories],
            "logprobs": None,
        }

    rewards = list(ours._logs["rewards"]["outcome_reward"])
    assert len(set(rewards)) > 1
    config = {
        name: getattr(ours.args, name)
        for name in ("output_dir", "per_device_train_batch_size", "num_generations", "max_steps", "learning_rate")
    }
    theirs = GRPOTrainer(
        tiny_llama(tokenizer),
        lambda completions, **kwargs: rewards,
        args=GRPOConfig(
            **config,
            loss_type=loss_type,
            max_completion_length=2000,
            use_cpu=True,
            bf16=False,
            report_to="none",
            save_strategy="no",
            gradient_checkpointing=False,
        ),
        train_dataset=ours.train_dataset,
        processing_class=tokenizer,
        rollout_func=play,
    )
    theirs.train()
    assert ours.state.log_history[-1]["train_loss"] == pytest.approx(theirs.state.log_history[-1]["train_loss"])
    for (name, a), (_, b) in zip(ours.model.named_parameters(), theirs.model.named_parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, msg=name)
    assert any(
        not torch.equal(a, b) for a, b in zip(ours.model.parameters(), tiny_llama(tokenizer).parameters(), strict=True)
    )


def test_memory_advantages_move_the_weights(tmp_path):
    tokenizer = byte_tokenizer()
    weights = []
    for coefficient in (0.0, 1.0):
        trainer = make_trainer(tmp_path, tokenizer, SCRIPTS.values(), memory_coefficient=coefficient)
        trainer.train()
        weights.append(torch.cat([p.detach().flatten() for p in trainer.model.parameters()]))
    assert not torch.allclose(*weights)
    assert trainer.state.log_history[-1]["train_loss"] is not None


# --- What the trainer does with arguments and data ------------------------------------------------------------------

PLAIN = {"question": ["q"] * 4, "answers": [["Paris"]] * 4}


def build(tmp_path, columns=PLAIN, tokenizer=None, tools=(search,), config=None, **kwargs):
    tokenizer = tokenizer or byte_tokenizer()
    args = MemPOConfig(
        **{
            **one_step(tmp_path, 2),
            "system_prompt": "",
            **(config or {}),
        }
    )
    dataset = None if columns is None else Dataset.from_dict(columns)
    return MemPOTrainer(
        kwargs.pop("model", None) or tiny_llama(tokenizer),
        args=args,
        train_dataset=dataset,
        processing_class=tokenizer,
        tools=list(tools) or None,
        **kwargs,
    )


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"question": ["q"]}, "needs a column `answers`"),
        ({"question": ["q"], "answers": [[]]}, "is empty in row 0"),
        ({"answers": [["a"]]}, "needs a column `prompt`"),
    ],
)
def test_bad_data_is_refused_before_anything_is_generated(tmp_path, columns, message):
    with pytest.raises(ValueError, match=message):
        build(tmp_path, columns)


def test_bad_rows_of_a_stream_are_refused_before_anything_is_generated(tmp_path):
    trainer = build(tmp_path)
    trainer._generate_single_turn = None
    with pytest.raises(ValueError, match="is empty in this batch"):
        trainer._generate_and_score_completions([{"prompt": [{"role": "user", "content": "q"}], "answers": []}] * 2)


def test_unsupported_arguments_are_refused(tmp_path):
    from trl import GRPOConfig

    with pytest.raises(ValueError, match=r"`rollout_func` is not supported.*`tools` or `environment_factory`"):
        build(tmp_path, rollout_func=lambda prompts, trainer: {})
    with pytest.raises(ValueError, match="Images are not supported"):
        build(tmp_path, {**PLAIN, "image": [b""] * 4})
    with pytest.raises(ValueError, match="`tools` must be a list of functions"):
        build(tmp_path, tools=["search"])
    with pytest.raises(ValueError, match="several functions named 'search'"):
        build(tmp_path, tools=[search, search])
    with pytest.raises(TypeError, match="`args` must be a `MemPOConfig`, but it is a `GRPOConfig`"):
        MemPOTrainer(tiny_llama(byte_tokenizer()), args=GRPOConfig(str(tmp_path), use_cpu=True, bf16=False))


def test_the_default_reward_is_exact_match_and_format(tmp_path):
    trainer = build(tmp_path)
    assert trainer.reward_func_names == ["outcome_reward"]


def test_answers_are_optional_without_memory(tmp_path):
    trainer = build(
        tmp_path,
        {"question": ["q"] * 4},
        config={"memory_coefficient": 0},
        reward_funcs=lambda completions, **kwargs: [float(len(c[-1]["content"])) for c in completions],
    )
    trainer._generate_single_turn = Script(trainer._tokenizer, [["<answer>a</answer>"], ["<answer>bb</answer>"]])
    trainer.train()
    assert trainer.state.log_history[-1]["train_loss"] is not None


@pytest.mark.parametrize("kind", ["sync", "async", "batch", "raising"])
def test_tools_of_every_kind(tmp_path, kind):
    seen = []

    def look(query: str) -> str:
        """Look it up.

        Args:
            query: What.
        """
        seen.append(query)
        if kind == "raising":
            raise RuntimeError("out of order")
        return f"about {query}"

    async def look_async(query: str) -> str:
        """Look it up.

        Args:
            query: What.
        """
        return look(query)

    tool = look
    if kind == "async":
        look_async.__name__ = "look"
        tool = look_async
    if kind == "batch":
        look.batch = lambda batch: [look(**arguments) for arguments in batch]
    trainer = build(tmp_path, tools=[tool])
    last = "<mem>m</mem><think>t</think><answer>Paris</answer>"
    trainer._generate_single_turn = Script(
        trainer._tokenizer,
        [["<think>t</think>" + call("x", name="look"), last], ["<think>t</think>" + call("y", name="look"), last]],
    )
    trainer.train()
    logs = trainer.state.log_history[0] | trainer.state.log_history[-1]
    observed = [t.turns[0].observation[0]["content"] for t in trainer._trajectories]
    if kind == "raising":
        assert all("out of order" in text for text in observed)
    else:
        assert observed == ["about x", "about y"]
    assert seen == ["x", "y"]
    assert logs["train_loss"] is not None


@pytest.mark.parametrize("model", [False, True])
def test_reward_functions_find_tool_calls(tmp_path, model):
    """As with TRL's trainer, unless a reward model reads the messages, whose template would write the calls twice."""
    seen = []

    def reward(completions, **kwargs):
        seen.extend(completions)
        return [0.0, 1.0]

    texts = ["<think>t</think>" + call("x"), "<mem>m</mem><think>t</think><answer>Paris</answer>"]
    tokenizer = byte_tokenizer()
    judge = LlamaForSequenceClassification(tiny_llama(tokenizer, num_labels=1).config)
    trainer = build(
        tmp_path,
        tokenizer=tokenizer,
        reward_funcs=[reward, judge] if model else [reward],
        reward_processing_classes=[None, tokenizer] if model else None,
    )
    trainer._generate_single_turn = Script(tokenizer, [texts, ["<tool_call>x</tool_call>", texts[1]]])
    trainer.train()
    assert [m["content"] for m in seen[0] if m["role"] == "assistant"] == texts
    calls = [{"type": "function", "function": {"name": "search", "arguments": {"query": "x"}}}]
    assert [m.get("tool_calls") for m in seen[0]] == [None if model else calls, None, None]
    assert not any("tool_calls" in m for m in seen[1])  # malformed
    assert not any("tool_calls" in m for completion in trainer._logs["completion"] for m in completion)


def test_environments(tmp_path):
    class Counter:
        def reset(self, **kwargs):
            self.count = 0
            return " Count."

        def increment(self, by: int) -> int:
            """Count on.

            Args:
                by: How much.
            """
            self.count += by
            return self.count

        def get_reward(self) -> float:
            return float(self.count)

    last = "<mem>m</mem><think>t</think><answer>Paris</answer>"
    count = '<think>t</think><tool_call>{{"name": "increment", "arguments": {{"by": {}}}}}</tool_call>'
    trainer = build(tmp_path, tools=(), environment_factory=Counter)
    trainer._generate_single_turn = Script(
        trainer._tokenizer, [[count.format(2), last], [count.format(3), count.format(4), last]]
    )
    trainer.train()
    assert trainer.reward_func_names == ["Counter"]
    assert [e.count for e in trainer.environments] == [2, 7]
    assert "Count." in trainer._tokenizer.decode(trainer._trajectories[0].prompt_ids)


def test_environments_that_own_the_data_train_without_memory(tmp_path, caplog):
    class Owner:
        def reset(self, **kwargs):
            return "Guess."

        def get_reward(self) -> float:
            return 1.0

    trainer = build(tmp_path, None, tools=(), environment_factory=Owner)
    assert "memories cannot be scored" in caplog.text
    trainer._generate_single_turn = Script(trainer._tokenizer, [["<answer>a</answer>"], ["<answer>b</answer>"]])
    trainer.train()


def test_the_tokenizer_is_saved_as_it_was_given(tmp_path):
    """TRL is shown another template while it constructs the trainer."""
    tokenizer = byte_tokenizer(SMOLLM2_TEMPLATE)
    trainer = build(tmp_path, tokenizer=tokenizer)
    assert tokenizer.chat_template == SMOLLM2_TEMPLATE
    assert tokenizer.response_template is None
    assert trainer.chat_template is None
    prompt = trainer._tokenizer.decode(trainer._tokenize_prompts([[{"role": "user", "content": "q"}]])[0][0])
    assert "Search the corpus." in prompt  # the template itself would not say so


def test_special_tokens_carry_no_text_but_the_tags_do(tmp_path):
    tokenizer = copy.deepcopy(byte_tokenizer())
    tokenizer.add_special_tokens({"additional_special_tokens": ["<mem>", "</mem>"]}, replace_extra_special_tokens=False)
    trainer = build(tmp_path, tokenizer=tokenizer)
    ids = tokenizer("<|im_start|><mem>a</mem>b<|im_end|>", add_special_tokens=False)["input_ids"]
    assert trainer._reader.text(ids) == "<mem>a</mem>b"


def test_evaluation(tmp_path):
    trainer = build(
        tmp_path, eval_dataset=Dataset.from_dict(PLAIN), config={"per_device_eval_batch_size": 2, "eval_strategy": "no"}
    )
    answers = [["<think>t</think><answer>Paris</answer>"]] * 2
    trainer._generate_single_turn = lambda *args: Script(trainer._tokenizer, answers)(*args)  # noqa: PLW0108
    metrics = trainer.evaluate()
    assert metrics["eval_reward"] == 1.0
    assert metrics["eval_stop/answer"] == 1.0


def test_a_step_with_a_real_policy(tmp_path):
    """Nothing scripted: a random policy from disk samples, and every log-probability that the loss needs exists."""
    tokenizer = byte_tokenizer()
    for part in (tiny_llama(tokenizer), tokenizer):
        part.save_pretrained(tmp_path / "model")
    trainer = build(
        tmp_path,
        model=str(tmp_path / "model"),
        config={"max_turn_length": 12, "max_turns": 3, "num_iterations": 2, "beta": 0.1, "max_steps": 2},
    )
    trainer.train()
    logs = trainer.state.log_history
    assert logs[-1]["train_loss"] is not None
    assert all(len(turn.ids) <= 12 for t in trainer._trajectories for turn in t.turns)
