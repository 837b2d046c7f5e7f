import dataclasses

import pytest
import torch
from datasets import Dataset
from support import Script, byte_tokenizer, call, one_step, qwen_tokenizer, search, tiny_llama

from mempo_trl import MemoryAgent, MemPOConfig, MemPOTrainer
from mempo_trl.engines import AgentSettings, Episode, Sampling, TokenEngine, open_engine
from mempo_trl.engines.tokens import TransformersSampler
from mempo_trl.protocol import build_prompt


TURNS = [
    f"<think>first</think>{call('Dune')}",
    f"<mem>Dune: Frank Herbert.</mem><think>then</think>{call('Emma')}{call('Emma Woodhouse')}",
    f"<mem>Dune: Frank Herbert. Emma: Jane Austen.</mem><think>last</think>{call('x', name='nothing')}",
    "<mem>all</mem><think>done</think><answer>Frank Herbert ; Jane Austen</answer>",
]


class ScriptedSampler:
    """Hands out prepared turns to one rollout at a time, and keeps what it was asked."""

    identity, threads, max_context_length = "script", 0, None

    def __init__(self, tokenizer, turns):
        self.tokenizer, self.turns, self.eos_token_ids = tokenizer, turns, [tokenizer.eos_token_id]
        self.contexts: list[list[int]] = []
        self.seeds: list[int] = []

    def __call__(self, contexts, max_new_tokens, seeds):
        (context,) = contexts
        text = self.turns[len(self.contexts) % len(self.turns)]
        self.contexts.append(context)
        self.seeds += seeds
        return [[*self.tokenizer(text, add_special_tokens=False)["input_ids"], self.tokenizer.eos_token_id]]


def scripted(tokenizer, turns=TURNS, **settings):
    return TokenEngine(
        tokenizer, ScriptedSampler(tokenizer, turns), [search], AgentSettings(**settings), Sampling(), batch_size=1
    )


@pytest.mark.parametrize("tokenizer", [qwen_tokenizer, byte_tokenizer])
@pytest.mark.parametrize("context_turns", [None, 1, 2])
def test_a_turn_sees_what_it_sees_in_training(tmp_path, tokenizer, context_turns):
    tokenizer = tokenizer()
    trainer = MemPOTrainer(
        tiny_llama(tokenizer),
        args=MemPOConfig(**one_step(tmp_path, 2), context_turns=context_turns, max_observation_length=30, max_turns=6),
        train_dataset=Dataset.from_dict({"question": ["Who wrote both?"], "answers": [["a"]]}),
        processing_class=tokenizer,
        tools=[search],
    )
    script = Script(tokenizer, [TURNS, TURNS])
    trainer._generate_single_turn = script
    trainer.train()
    trainer.save_model()

    engine = scripted(tokenizer, **dataclasses.asdict(AgentSettings.load(str(tmp_path))))
    (*_, episode) = engine.turns(build_prompt("Who wrote both?"))
    assert engine.sampler.contexts == script.contexts[0]
    trained = trainer._trajectories[0]
    assert [step.text for step in episode.steps] == TURNS
    assert (episode.total_tokens, episode.peak_tokens) == trained.token_counts()[:2]
    assert (episode.tool_calls, episode.tool_failures, episode.stop_reason) == (4, 1, "answer")
    assert [len(step.observation) for step in episode.steps] == [1, 2, 1, 0]
    assert episode.steps[0].observation == [{"role": "tool", "name": "search", "content": search("Dune")}]
    assert episode.answer == "Frank Herbert ; Jane Austen"
    assert Episode.from_dict(episode.to_dict()) == episode


def test_tokens_are_counted_as_by_hand():
    tokenizer = byte_tokenizer()
    turns = [f"<think>a</think>{call('b')}", "<mem>c</mem><think>d</think><answer>e</answer>"]
    engine = scripted(tokenizer, turns, context_turns=1)
    (*_, episode) = engine.turns(build_prompt("f?"))

    def length(text):
        return len(tokenizer(text, add_special_tokens=False)["input_ids"])

    opening = tokenizer.decode(engine.sampler.contexts[0])
    first, second = (length(turn) + 1 for turn in turns)  # and the end of the turn
    between = length(f"\n<|im_start|>user\n{search('b')}<|im_end|>\n<|im_start|>assistant\n")
    read = length(opening), length(opening) + first + between
    assert [step.prompt_tokens for step in episode.steps] == list(read)
    assert episode.total_tokens == sum(read) + first + second
    assert episode.peak_tokens == read[1] + second


def test_streamed_turns_come_one_by_one():
    engine = scripted(qwen_tokenizer())
    agent = MemoryAgent(engine)
    stream = agent.stream("Who wrote both?")
    first = next(stream)
    assert len(engine.sampler.contexts) == 1
    assert (first.memory, first.thought, first.tool_calls[0]["arguments"]) == (None, "first", {"query": "Dune"})
    assert first.observation[0]["content"] == search("Dune")
    rest = list(stream)
    assert [turn.memory for turn in rest] == ["Dune: Frank Herbert.", "Dune: Frank Herbert. Emma: Jane Austen.", "all"]
    assert rest[-1].answer == "Frank Herbert ; Jane Austen"

    answer = agent.run("Who wrote both?")
    assert answer.text == "Frank Herbert ; Jane Austen"
    assert answer.turns == [first, *rest]
    assert answer.tokens == sum(turn.prompt_tokens + turn.completion_tokens for turn in answer.turns)
    assert answer.stop_reason == "answer"
    with pytest.raises(ValueError, match="`question` must be a text"):
        agent.run(" ")


def test_a_rollout_without_room_has_no_turn():
    engine = scripted(qwen_tokenizer())
    engine._loop.max_context_length = 3
    assert [episode.steps for episode in engine.turns(build_prompt("f?"))] == [[]]
    assert [episode.stop_reason for episode in engine.turns(build_prompt("f?"))] == ["max_context_length"]
    answer = MemoryAgent(engine).run("f?")
    assert (answer.text, answer.turns, answer.tokens) == (None, [], 0)


def reference(model, context, new, ends):
    """Greedy decoding without padding, caches, or a generation configuration."""
    ids = list(context)
    for _ in range(new):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] in ends:
            break
    return ids[len(context) :]


def test_greedy_turns_of_a_batch_are_those_of_each_alone():
    tokenizer = byte_tokenizer()
    model = tiny_llama(tokenizer)
    # What a checkpoint recommends for chats is not what an agent was trained with.
    model.generation_config.update(repetition_penalty=3.0, do_sample=True, temperature=0.1, top_k=1)
    model.train()
    sampler = TransformersSampler(model, tokenizer.pad_token_id, Sampling(), "tiny")
    contexts = [tokenizer(text)["input_ids"] for text in ("a", "some more text", "and <mem>more</mem>")]
    expected = [reference(model, context, 12, sampler.eos_token_ids) for context in contexts]
    sampler.eos_token_ids = [tokenizer.eos_token_id, expected[1][4]]
    expected = [reference(model, context, 12, sampler.eos_token_ids) for context in contexts]
    assert len({len(turn) for turn in expected}) > 1
    assert sampler(contexts, 12, [0, 0, 0]) == expected
    assert model.training and model.generation_config.repetition_penalty == 3.0


def test_seeds_decide_what_is_drawn():
    tokenizer = byte_tokenizer()
    model = tiny_llama(tokenizer)
    sampler = TransformersSampler(model, tokenizer.pad_token_id, Sampling(temperature=1.0), "tiny")
    contexts = [tokenizer("a")["input_ids"]] * 2
    state = torch.get_rng_state()
    turns = [sampler(contexts, 20, seeds) for seeds in ([0, 1], [0, 1], [2, 1])]
    assert turns[0] == turns[1] != turns[2]
    assert turns[0][0] != turns[0][1] == turns[2][1]
    assert sampler(contexts[:1], 20, [1]) == turns[0][1:]
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), [(0.7, 0, 1.0), (2.0, 5, 1.0), (1.0, 0, 0.8)])
def test_draws_follow_the_distribution(temperature, top_k, top_p):
    tokenizer = byte_tokenizer()
    model = tiny_llama(tokenizer).eval()
    context = tokenizer("a <mem>")["input_ids"]
    with torch.no_grad():
        scores = model(torch.tensor([context])).logits[0, -1] / temperature
    if top_k:
        scores[scores < scores.sort(descending=True).values[top_k - 1]] = -torch.inf
    wanted = scores.softmax(-1)
    if top_p < 1:  # the most probable tokens that reach it together
        order = wanted.argsort(descending=True)
        wanted[order[wanted[order].cumsum(0) - wanted[order] >= top_p]] = 0
        wanted /= wanted.sum()
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    sampler = TransformersSampler(model, tokenizer.pad_token_id, sampling, "tiny")
    drawn = [ids[0] for ids in sampler([context] * 4000, 1, list(range(4000)))]
    found = torch.bincount(torch.tensor(drawn), minlength=len(wanted)) / len(drawn)
    assert found[wanted == 0].sum() == 0
    # Three standard deviations of the largest of these shares, and all of them together.
    torch.testing.assert_close(found, wanted, atol=3 * (0.25 / 4000) ** 0.5, rtol=0)
    assert (found - wanted).abs().sum() < 0.2


def test_engines_of_checkpoints(tmp_path):
    tokenizer = qwen_tokenizer()
    model = tiny_llama(tokenizer)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    plain = open_engine(str(tmp_path), [search], dtype="float32")
    assert plain.settings == AgentSettings()
    AgentSettings(context_turns=2, max_turns=3, max_turn_length=5, system_prompt="s").save(tmp_path)
    trained = open_engine(str(tmp_path), [search], dtype="float32")
    assert (trained.settings.context_turns, trained.settings.completion_length) == (2, 3 * (5 + 512))
    changed = open_engine(str(tmp_path), [search], dtype="float32", context_turns=None, max_turn_length=7)
    assert changed.settings.context_turns is None
    assert changed.settings.completion_length == 3 * (7 + 512)
    in_memory = open_engine(model, [search], tokenizer=tokenizer, max_turns=3, max_turn_length=5, system_prompt="s")
    prompts = [build_prompt(text, "s") for text in ("Who?", "Where in the world is it?", "What?")]
    both = [dict(engine.rollout(prompts, [0, 1, 2])) for engine in (trained, in_memory)]
    assert both[0] == both[1]
    assert sorted(both[0]) == [0, 1, 2]
    assert all(1 <= step.completion_tokens <= 5 for episode in both[0].values() for step in episode.steps)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "jax"}, "`backend='jax'` is not allowed"),
        ({"backend": "openai"}, "`endpoint` and `backend='openai'` go together"),
        ({"batch_size": 0}, "`batch_size=0` is not allowed"),
        ({"context_turns": 0}, "`context_turns=0` is not allowed"),
        ({"max_turns": True}, "`max_turns=True` is not allowed"),
        ({"tools": [search, search]}, "several functions named 'search'"),
        ({"tools": "search"}, "`tools` must be a list of functions"),
    ],
)
def test_wrong_arguments(options, message):
    tokenizer = byte_tokenizer()
    with pytest.raises(ValueError, match=message):
        open_engine(tiny_llama(tokenizer), **{"tokenizer": tokenizer, **options})


def test_an_unknown_setting_is_named():
    with pytest.raises(TypeError, match="no argument 'window'"):
        open_engine(tiny_llama(byte_tokenizer()), tokenizer=byte_tokenizer(), window=1)


def test_a_model_in_memory_needs_its_tokenizer():
    with pytest.raises(ValueError, match="`tokenizer` is missing"):
        open_engine(tiny_llama(byte_tokenizer()))


@pytest.mark.parametrize(
    "options", [{"temperature": -1}, {"top_p": 0}, {"top_p": 1.1}, {"top_k": 1.5}, {"seed": -1}, {"temperature": "1"}]
)
def test_wrong_sampling(options):
    with pytest.raises(ValueError, match=f"`{next(iter(options))}="):
        Sampling(**options)


def test_damaged_settings_are_named(tmp_path):
    (tmp_path / "agent.json").write_text('{"format": 1, "max_turns": 0}')
    with pytest.raises(ValueError, match=r"agent.json cannot be read"):
        AgentSettings.load(str(tmp_path))
    assert AgentSettings.load(str(tmp_path / "nothing")) is None
