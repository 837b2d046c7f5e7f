"""One process that trains on scripted rollouts, and writes what they scored and the weights.

accelerate launch --config_file accelerate_configs/zero3.yaml --num_processes 2 tests/distributed/worker.py OUT zero3
"""

import os
import sys
from pathlib import Path
from typing import Any


sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from accelerate import PartialState
from cpu_engines import allow_gpu_engines_on_cpu
from datasets import Dataset
from support import Script, byte_tokenizer, call, search, tiny_llama

from mempo_trl import MemPOConfig, MemPOTrainer


ASK = "<think>t</think>" + call("x")
LAST = "<mem>{}</mem><think>t</think><answer>{}</answer>"
LONG = [ASK, *[f"<mem>memory {n}</mem><think>t</think>" + call("y", name="nowhere") for n in range(3)]]
# Four rollouts that have nothing in common: of two processes the first answers at once, without any memory, while of
# the second's one runs into the limit of turns.
UNEVEN = [["<think>t</think><answer>Paris</answer>"], ["no action at all"], LONG, [ASK, LAST.format("P", "London")]]
# The first process's rollouts all fail: there is no room for a single token after the prompt of their question.
FAILING: list[list[str]] = [[], [], LONG, [ASK, LAST.format("Paris it is", "Paris")]]

# For each run: rollouts, questions, options. A question is asked as often as rollouts and questions allow.
RUNS: dict[str, tuple[list[list[str]], list[str], dict[str, Any]]] = {
    "full": (UNEVEN, ["Where?"], {}),
    # One generation for two steps, so that log-probabilities and memories are scored in the same forwards.
    "windowed": (
        UNEVEN,
        ["Where?"],
        {
            "context_turns": 1,
            "num_iterations": 2,
            "temperature": 0.7,
            "max_tokens_per_forward": 600,
            "gradient_checkpointing": True,
        },
    ),
    "failing": (FAILING, ["Where? " * 110, "Where?"], {"context_turns": 1}),
}


class Sampler:
    """Plays a new script in every generation, and what it likes for contexts that no rollout asked for."""

    def __init__(self, tokenizer, rollouts: list[list[str]]):
        self.tokenizer = tokenizer
        self.rollouts = rollouts
        self.calls: list[list[int]] = []

    def __call__(self, contexts, images, fields, num_generations):
        if not self.calls or len(self.calls[-1]) == len(LONG):
            self.calls.append([])
            self.script = Script(self.tokenizer, self.rollouts)
        self.calls[-1].append(len(contexts))
        active = sum(len(turns) > len(self.script.calls) for turns in self.script.rows)
        turns, _ = self.script(contexts[:active], None, {}, 1)
        return turns + [[self.tokenizer.eos_token_id]] * (len(contexts) - active), None


def adapters():
    from peft import LoraConfig

    # Random in both factors, so that every one of them is moved by the first step.
    return LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")


def run(out: Path, name: str, engine: str) -> dict[str, Any]:
    rollouts, questions, options = RUNS[name]
    if engine == "zero3_lora":
        options = {**options, "max_tokens_per_forward": None}  # refused: checkpointing has to be reentrant there
    tokenizer = byte_tokenizer()
    rows = len(rollouts) // int(os.environ.get("WORLD_SIZE", "1"))
    trainer = MemPOTrainer(
        tiny_llama(tokenizer, max_position_embeddings=900),
        args=MemPOConfig(
            **{
                "output_dir": str(out / "run"),
                "per_device_train_batch_size": rows,
                "num_generations": len(rollouts) // len(questions),
                "max_turns": len(LONG),
                "max_steps": 2,
                "learning_rate": 1e-2,
                "adam_epsilon": 1e-3,  # else Adam makes steps out of rounding errors, where a gradient is almost zero
                "use_cpu": engine.startswith("single"),
                "bf16": False,
                "report_to": "none",
                "save_strategy": "no",
                "logging_steps": 1,
                "loss_type": "grpo",
                "gradient_checkpointing": False,
                "disable_tqdm": True,
                "system_prompt": "",
                "shuffle_dataset": False,
                **options,
            }
        ),
        train_dataset=Dataset.from_dict({"question": questions * 8, "answers": [["Paris"]] * 8 * len(questions)}),
        processing_class=tokenizer,
        tools=[search],
        peft_config=adapters() if engine.endswith("lora") else None,
    )
    process = trainer.accelerator.process_index
    sampler = Sampler(tokenizer, rollouts[process * rows : (process + 1) * rows])
    trainer._generate_single_turn = sampler
    scored = []
    add = trainer._add_memory_advantages

    def keep(inputs, output):
        advantages = add(inputs, output)
        lengths = output["completion_mask"].sum(1)
        scored.append([row[:length].tolist() for row, length in zip(advantages, lengths, strict=True)])
        return advantages

    trainer._add_memory_advantages = keep
    trainer.train()
    weights = trainer.accelerator.get_state_dict(trainer.model_wrapped)  # of sharded ones, the first process gets all
    return {
        "type": trainer.accelerator.distributed_type.name,
        "zero_stage": getattr(trainer.accelerator.deepspeed_plugin, "zero_stage", None),
        "advantages": scored[0],
        "weights": {name.removeprefix("module."): weight for name, weight in (weights or {}).items()},
        "calls": sampler.calls,
        "logs": trainer.state.log_history[0],
    }


def main(out: Path, engine: str) -> None:
    torch.set_num_threads(1)
    if not engine.startswith("single"):
        allow_gpu_engines_on_cpu()
    results = {name: run(out, name, engine) for name in RUNS}
    torch.save(results, out / f"{os.environ.get('RANK', '0')}.pt")
    PartialState().destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
