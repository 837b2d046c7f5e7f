"""One process of a distributed run whose rollouts come from a vLLM server; writes what it got.

python -m torch.distributed.run --nproc_per_node 2 vllm_server_worker.py OUT URL NUM_GENERATIONS QUESTION…
"""

import json
import sys
from pathlib import Path


sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from datasets import Dataset
from support import byte_tokenizer, one_step, search, tiny_llama
from trl.generation import vllm_client, vllm_generation
from vllm_stand_in import checksum

from mempo_trl import MemPOConfig, MemPOTrainer


ROWS = 4


def send_weights(client, metadata, named_params):
    """Walk through the parameters as TRL does, which every process takes part in."""
    assert [name for name, *_ in metadata] == [name for name, _ in named_params]
    client._post(f"{client.base_url}/update_weights", json={"names": [name for name, *_ in metadata]})


def main(out: Path, url: str, num_generations: int, questions: list[str]) -> None:
    torch.set_num_threads(1)
    # Weights travel over NCCL, which takes GPUs, and TRL looks for vLLM before it connects.
    vllm_generation.is_vllm_available = vllm_client.is_vllm_available = lambda *args, **kwargs: True
    vllm_client.VLLMClient.init_communicator = lambda self, device: None
    vllm_client.VLLMClient.update_named_params = send_weights

    tokenizer = byte_tokenizer()
    args = {
        **one_step(out / "run", ROWS),
        "num_generations": num_generations,
        "max_steps": len(questions) * num_generations // (2 * ROWS),
        "shuffle_dataset": False,
        "context_turns": 1,
        "max_turns": 4,
        "disable_tqdm": True,
        "logging_steps": 1,
        "system_prompt": "",
        "use_vllm": True,
        "vllm_mode": "server",
        "vllm_server_base_url": url,
        "vllm_server_timeout": 30,
    }
    trainer = MemPOTrainer(
        tiny_llama(tokenizer),
        args=MemPOConfig(**args),
        train_dataset=Dataset.from_dict({"question": questions, "answers": [["Paris"]] * len(questions)}),
        processing_class=tokenizer,
        tools=[search],
    )
    rollouts = []
    generate = trainer._generate

    def keep(prompts):
        result = generate(prompts)
        rollouts.append(
            [
                {
                    "question": prompt[-1]["content"][:40],
                    "stop": trajectory.stop_reason,
                    "turns": [turn.text for turn in trajectory.turns],
                    "saw": [checksum(trajectory.context_ids(number)) for number in range(len(trajectory.turns))],
                    "ids": [turn.ids for turn in trajectory.turns],
                    "logprobs": [turn.logprobs for turn in trajectory.turns],
                }
                for prompt, trajectory in zip(prompts, trainer._trajectories, strict=True)
            ]
        )
        return result

    trainer._generate = keep
    trainer.train()
    weights = torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
    process = trainer.accelerator.process_index
    (out / f"{process}.json").write_text(json.dumps({"rollouts": rollouts, "weights": weights.tolist()}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4:])
