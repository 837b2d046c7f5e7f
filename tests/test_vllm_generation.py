"""What the trainer asks of TRL's vLLM generation, whatever engine is behind it."""

from types import SimpleNamespace

import pytest
from datasets import Dataset
from support import byte_tokenizer, call, one_step, search, tiny_llama
from trl.trainer import grpo_trainer

from mempo_trl import MemPOConfig, MemPOTrainer


TOKENIZER = byte_tokenizer()
ANSWER = "<think>t</think><answer>Paris</answer>"


class Engine:
    """Stands in for TRL's `VLLMGeneration`: searches in the first turn, then answers."""

    max_model_len = 3000

    def __init__(self, mode, generation_kwargs, **kwargs):
        self.generation_kwargs = generation_kwargs or {}
        config = SimpleNamespace(max_model_len=self.max_model_len)
        if mode == "colocate":
            self.llm = SimpleNamespace(llm_engine=SimpleNamespace(model_config=config))
        else:
            info = {"model_config": {"logprobs_mode": "processed_logprobs", **vars(config)}}
            self.vllm_client = SimpleNamespace(get_server_info=lambda: info, generate=None)
        self.calls = []

    def sync_weights(self):
        pass

    def generate(self, prompts, images, num_generations, profiler):
        text = ANSWER if self.calls else call("x")
        self.calls.append((len(prompts), num_generations, self.max_completion_length, self.generation_kwargs))
        turn = TOKENIZER(text)["input_ids"] + [TOKENIZER.eos_token_id]
        return prompts, [turn] * len(prompts), [[[-0.5]] * len(turn)] * len(prompts), None


def make_trainer(tmp_path, monkeypatch, tools=(search,), environment_factory=None, positions=4096, **config):
    monkeypatch.setattr(grpo_trainer, "VLLMGeneration", Engine)
    return MemPOTrainer(
        tiny_llama(TOKENIZER, max_position_embeddings=positions),
        args=MemPOConfig(**{**one_step(tmp_path, 2), "use_vllm": True, "max_turn_length": 200, **config}),
        train_dataset=Dataset.from_dict({"question": ["Where?"] * 4, "answers": [["Paris"]] * 4}),
        processing_class=TOKENIZER,
        tools=list(tools) or None,
        environment_factory=environment_factory,
    )


@pytest.mark.parametrize("mode", ["colocate", "server"])
def test_a_turn_ends_where_the_agent_loop_ends_it(tmp_path, monkeypatch, mode):
    """vLLM would go by the checkpoint's end tokens alone, and take a limit of the user's as the limit of every turn."""
    own = {"max_tokens": 150, "stop_token_ids": [7], "seed": 1}
    trainer = make_trainer(tmp_path, monkeypatch, vllm_mode=mode, generation_kwargs=own, max_completion_length=240)
    trainer.train()
    used = len(trainer._trajectories[0].turns[0].ids + trainer._trajectories[0].turns[0].observation_ids)
    told = {"seed": 1, "stop_token_ids": [7, TOKENIZER.eos_token_id]}
    assert 0 < 240 - used < 150
    assert trainer.vllm_generation.calls == [(2, 2, 150, told), (2, 1, 240 - used, told)]
    assert own == {"max_tokens": 150, "stop_token_ids": [7], "seed": 1}


@pytest.mark.parametrize("mode", ["colocate", "server"])
@pytest.mark.parametrize("told", [None, 1000])
@pytest.mark.parametrize("positions", [2000, 4096])  # 2000: rotary positions that reach further, as YaRN's do
def test_contexts_are_as_long_as_the_engine_takes(tmp_path, monkeypatch, mode, told, positions):
    trainer = make_trainer(tmp_path, monkeypatch, positions=positions, vllm_mode=mode, vllm_max_model_length=told)
    assert trainer._loop.max_context_length == (1000 if told and mode == "server" else Engine.max_model_len)


def test_environments_share_no_first_turn(tmp_path, monkeypatch):
    """What they tell may differ between the rollouts of a question."""

    class Visitor:
        visits = 0

        def reset(self, **kwargs):
            Visitor.visits += 1
            return f" This is visit {Visitor.visits}."

        def search(self, query: str) -> str:
            """Search the corpus.

            Args:
                query: What to look for.
            """
            return query

        def get_reward(self) -> float:
            return 0.0

    trainer = make_trainer(tmp_path, monkeypatch, (), Visitor, vllm_mode="server")
    trainer.train()
    assert [call[:2] for call in trainer.vllm_generation.calls] == [(2, 1), (2, 1)]
    assert trainer._trajectories[0].prompt_ids != trainer._trajectories[1].prompt_ids


@pytest.mark.parametrize("own", [{"logprobs": 5}, {"logprobs": None}, {"n": 2}])
def test_only_the_sampled_tokens_are_asked_for(tmp_path, monkeypatch, own):
    with pytest.raises(
        ValueError, match=rf"`generation_kwargs={{'{next(iter(own))}'.*is not supported with `use_vllm`"
    ):
        make_trainer(tmp_path, monkeypatch, generation_kwargs=own)
