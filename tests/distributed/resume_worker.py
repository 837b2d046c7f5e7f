"""One process that trains, goes on from checkpoints of that training, and writes where each run arrived.

accelerate launch --config_file accelerate_configs/zero2.yaml --num_processes 2 tests/distributed/resume_worker.py \\
    OUT zero2
"""

import sys
from pathlib import Path
from typing import Any


sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from accelerate import PartialState
from cpu_engines import allow_gpu_engines_on_cpu
from datasets import Dataset
from support import byte_tokenizer, search, tiny_llama
from worker import adapters

from mempo_trl import MemPOConfig, MemPOTrainer


STEPS = 4
# One in the middle of a generation, one at its end, one in the middle of the second epoch.
CHECKPOINTS = (1, 2, 3)


def length_reward(completions, **kwargs):
    return [float(len(completion[0]["content"]) % 7) for completion in completions]


def run(out: Path, name: str, engine: str, checkpoint: int | None) -> dict[str, Any]:
    tokenizer = byte_tokenizer()
    trainer = MemPOTrainer(
        tiny_llama(tokenizer),
        reward_funcs=length_reward,
        args=MemPOConfig(
            output_dir=str(out / name),
            per_device_train_batch_size=2,
            num_generations=2,
            steps_per_generation=2,
            max_steps=STEPS,
            learning_rate=1e-2,
            max_turns=2,
            max_turn_length=10,
            context_turns=1,
            bf16=False,
            report_to="none",
            save_strategy="steps",
            save_steps=1,
            logging_steps=1,
            gradient_checkpointing=False,
            disable_tqdm=True,
            seed=7,
        ),
        train_dataset=Dataset.from_dict(
            {"question": [f"Where is {name}?" for name in ("Ada", "Bo", "Cy", "Di")], "answers": [["Paris"]] * 4}
        ),
        processing_class=tokenizer,
        tools=[search],
        peft_config=adapters() if engine.endswith("lora") else None,
    )
    generated = []
    generate = trainer._generate
    trainer._generate = lambda prompts: generated.append(trainer.state.global_step) or generate(prompts)
    trainer.train(resume_from_checkpoint=checkpoint and str(out / "whole" / f"checkpoint-{checkpoint}"))
    weights = trainer.accelerator.get_state_dict(trainer.model_wrapped)  # of sharded ones, the first process gets all
    return {
        "type": trainer.accelerator.distributed_type.name,
        "zero_stage": getattr(trainer.accelerator.deepspeed_plugin, "zero_stage", None),
        "generated": generated,
        "weights": weights or {},
        "rewards": [entry["reward"] for entry in trainer.state.log_history if "reward" in entry],
    }


def main(out: Path, engine: str) -> None:
    torch.set_num_threads(1)
    allow_gpu_engines_on_cpu()
    results = {"whole": run(out, "whole", engine, None)}
    for checkpoint in CHECKPOINTS:
        results[checkpoint] = run(out, f"from {checkpoint}", engine, checkpoint)
    torch.save(results, out / f"{PartialState().process_index}.pt")
    PartialState().destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
