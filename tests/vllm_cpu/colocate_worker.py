"""One training run whose rollouts come from a vLLM engine in the same process; writes what both saw.

python colocate_worker.py CHECKPOINT OUT OPTIONS, the last as JSON: what `MemPOConfig` takes.
"""

import functools
import json
import sys
from pathlib import Path


sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent.parent.parent / "examples" / "relay"))

import torch
import vllm.model_executor.layers.utils as vllm_layers
from policy import ANSWER_PREAMBLE, MAX_OBSERVATION_LENGTH, SYSTEM_PROMPT, ColdStart
from support import one_step
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.generation import vllm_generation

from mempo_trl import MemPOConfig, MemPOTrainer
from mempo_trl.search import BM25Index, make_search_tool


GROUP, QUESTIONS = 4, 3


def keep_weights(layer, remove_weight=False):
    """Multiply with the weights as they are: those that vLLM packs for a CPU are never read again."""
    layer.cpu_linear = torch.nn.functional.linear


@torch.no_grad()
def plain_logps(model, context: list[int], turn: list[int], temperature: float) -> list[float]:
    logits = model(torch.tensor([context + turn])).logits[0, len(context) - 1 : -1]
    return (logits / temperature).log_softmax(-1).gather(1, torch.tensor(turn)[:, None])[:, 0].tolist()


def weights_behind(model, engine) -> dict[str, float]:
    """How far the engine's weights are from the trained ones, of those that have the same name in both."""
    copies = dict(engine.llm_engine.model_executor.driver_worker.model_runner.model.named_parameters())
    return {
        # vLLM rounds the vocabulary up.
        name: (copies[name][: len(weight)].float() - weight).abs().max().item()
        for name, weight in model.named_parameters()
        if name in copies
    }


def main(checkpoint: Path, out: Path, options: dict) -> None:
    vllm_layers.dispatch_cpu_unquantized_gemm = keep_weights
    # Compiling takes longer than the whole run, and rollouts as short as these fill no block of the usual size.
    engine_options = {"enforce_eager": True, "block_size": 32, "dtype": options.pop("dtype", "auto")}
    vllm_generation.LLM = functools.partial(vllm_generation.LLM, **engine_options)
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    first_weights = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    tokenizer = AutoTokenizer.from_pretrained(checkpoint, eos_token="<|im_end|>")
    world = ColdStart().world(seed=40, questions=40)
    dataset = world.to_dataset()
    if "vllm_max_model_length" in options:  # too little for every second question
        more = " and" * options["vllm_max_model_length"]
        dataset = dataset.map(
            lambda row, number: {"question": row["question"] + more * (number % 2)}, with_indices=True
        )
    args = {
        **one_step(out / "run", GROUP * QUESTIONS),
        "num_generations": GROUP,
        "max_steps": 3,
        "shuffle_dataset": False,
        "max_turns": 4,
        "max_turn_length": 64,
        "max_observation_length": MAX_OBSERVATION_LENGTH,
        "system_prompt": SYSTEM_PROMPT,
        "answer_preamble": ANSWER_PREAMBLE,
        "logging_steps": 1,
        "disable_tqdm": True,
        "use_vllm": True,
        "vllm_mode": "colocate",
        **options,
    }
    trainer = MemPOTrainer(
        model,
        args=MemPOConfig(**args),
        train_dataset=dataset,
        processing_class=tokenizer,
        tools=[make_search_tool(BM25Index.build(world.documents, out / "index"), k=1)],
    )
    engine = trainer.vllm_generation.llm
    ask, generate = engine.generate, trainer._generate
    steps: list[dict] = []
    calls: list[dict] = []

    def watch_calls(prompts, sampling_params, **kwargs):
        outputs = ask(prompts, sampling_params=sampling_params, **kwargs)
        calls.append(
            {
                "max_tokens": sampling_params.max_tokens,
                "cached": sum(output.num_cached_tokens or 0 for output in outputs),
                "longest": max(len(output.prompt_token_ids + output.outputs[0].token_ids) for output in outputs),
            }
        )
        return outputs

    def watch_rollouts(prompts):
        result = generate(prompts)
        sampled: list[float] = []
        scores: dict[str, list[float]] = {"now": [], "at_first": []}
        model.eval()
        for trajectory in trainer._trajectories:
            for number, turn in enumerate(trajectory.turns):
                sampled += turn.logprobs
                context = trajectory.context_ids(number)
                scores["now"] += plain_logps(model, context, turn.ids, trainer.temperature)
                scores["at_first"] += plain_logps(first_weights, context, turn.ids, trainer.temperature)
        model.train()
        turns = [turn for trajectory in trainer._trajectories for turn in trajectory.turns]
        steps.append(
            {
                "turns": [len(trajectory.turns) for trajectory in trainer._trajectories],
                "stops": [trajectory.stop_reason for trajectory in trainer._trajectories],
                "ended": sum(turn.ended for turn in turns),
                "ran_on": sum(not set(trainer.eos_token_ids).isdisjoint(turn.ids[:-1]) for turn in turns),
                "difference": {
                    name: sum(abs(a - b) for a, b in zip(sampled, logps, strict=True)) / len(sampled)
                    for name, logps in scores.items()
                },
                "weights_behind": weights_behind(model, engine),
                "calls": calls.copy(),
            }
        )
        calls.clear()
        return result

    engine.generate, trainer._generate = watch_calls, watch_rollouts
    trainer.train()
    moved = [(p - q).abs().max().item() for p, q in zip(model.parameters(), first_weights.parameters(), strict=True)]
    seen = {
        "prefix_caching": engine.llm_engine.vllm_config.cache_config.enable_prefix_caching,
        "max_model_len": engine.llm_engine.model_config.max_model_len,
        "dtype": str(engine.llm_engine.model_config.dtype),
        "moved": min(moved),
        "steps": steps,
        "logs": [logs for logs in trainer.state.log_history if "reward" in logs],
    }
    (out / "seen.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3]))
