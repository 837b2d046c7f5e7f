"""One process of a distributed run on scripted rollouts; writes what it scored.

python -m torch.distributed.run --nproc_per_node 2 worker.py OUT
"""

import json
import os
import sys
from pathlib import Path


sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from datasets import Dataset
from support import Script, byte_tokenizer, call, search, tiny_llama

from mempo_trl import MemPOConfig, MemPOTrainer


ASK = "<think>t</think>" + call("x")
LAST = "<mem>{}</mem><think>t</think><answer>{}</answer>"
# One question whose four rollouts have nothing in common: the first half answers at once, without any memory; of the
# second half one runs into the limit of turns, and one is cut inside its memory.
ROLLOUTS = [
    ["<think>t</think><answer>Paris</answer>"],
    ["no action at all"],
    [ASK, *[f"<mem>memory {n}</mem><think>t</think>" + call("y", name="nowhere") for n in range(3)]],
    [ASK, LAST.format("Paris it is", "London")],
]


def main(out: Path) -> None:
    torch.set_num_threads(1)
    tokenizer = byte_tokenizer()
    count = int(os.environ.get("WORLD_SIZE", "1"))
    rows = len(ROLLOUTS) // count
    args = MemPOConfig(
        output_dir=str(out / "run"),
        per_device_train_batch_size=rows,
        num_generations=len(ROLLOUTS),
        max_turns=4,
        max_steps=2,
        learning_rate=1e-2,
        use_cpu=True,
        bf16=False,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        loss_type="grpo",
        gradient_checkpointing=False,
        disable_tqdm=True,
        system_prompt="",
    )
    trainer = MemPOTrainer(
        tiny_llama(tokenizer),
        args=args,
        train_dataset=Dataset.from_dict({"question": ["Where?"] * 8, "answers": [["Paris"]] * 8}),
        processing_class=tokenizer,
        tools=[search],
    )
    process = trainer.accelerator.process_index
    mine = ROLLOUTS[process * rows : (process + 1) * rows]
    calls: list[list[int]] = []

    class Sampler:
        """Plays a new script in every step, and what it likes for contexts that no rollout asked for."""

        def __call__(self, contexts, images, fields, num_generations):
            if not calls or len(calls[-1]) == 4:  # the longest rollout makes four calls
                calls.append([])
                self.script = Script(tokenizer, mine)
            calls[-1].append(len(contexts))
            active = sum(len(turns) > len(self.script.calls) for turns in self.script.rows)
            turns, _ = self.script(contexts[:active], None, {}, 1)
            return turns + [[tokenizer.eos_token_id]] * (len(contexts) - active), None

    trainer._generate_single_turn = Sampler()
    scored = []
    add = trainer._add_memory_advantages

    def keep(inputs, output):
        advantages = add(inputs, output)
        lengths = output["completion_mask"].sum(1)
        scored.append([row[:length].tolist() for row, length in zip(advantages, lengths, strict=True)])
        return advantages

    trainer._add_memory_advantages = keep
    trainer.train()
    weights = torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
    (out / f"{process}.json").write_text(
        json.dumps(
            {
                "type": str(trainer.accelerator.distributed_type),
                "advantages": scored[0],
                "weights": weights.tolist(),
                "calls": calls,
                "logs": trainer.state.log_history[0],
            }
        )
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
