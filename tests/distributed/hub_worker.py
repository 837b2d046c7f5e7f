"""One process of a distributed run that pushes to the Hub, whose endpoint is in the environment.

python -m torch.distributed.run --nproc_per_node 2 hub_worker.py OUT
"""

import json
import os
import sys
from pathlib import Path


sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from datasets import Dataset
from support import Script, byte_tokenizer, one_step, tiny_llama

from mempo_trl import MemPOConfig, MemPOTrainer
from mempo_trl.hub import PushError


def build(out: Path, token: str) -> MemPOTrainer:
    tokenizer = byte_tokenizer()
    args = MemPOConfig(
        **{
            **one_step(out / "agent", 2),
            "per_device_train_batch_size": 1,
            "save_strategy": "steps",
            "save_steps": 1,
            "push_to_hub": True,
            "hub_model_id": "me/agent",
            "hub_strategy": "checkpoint",
            "hub_token": token,
        }
    )
    trainer = MemPOTrainer(
        tiny_llama(tokenizer),
        args=args,
        train_dataset=Dataset.from_dict({"question": ["Where?"] * 4, "answers": [["Paris"]] * 4}),
        processing_class=tokenizer,
    )
    answer = "<think>t</think><answer>Paris</answer>"
    trainer._generate_single_turn = lambda *args: Script(tokenizer, [[answer]])(*args)  # noqa: PLW0108
    return trainer


def main(out: Path) -> None:
    torch.set_num_threads(1)
    said = {}
    try:
        build(out, "hf_wrong")
    except PushError as error:
        said["refused"] = error.refused
    trainer = build(out, "hf_right")
    said["steps"] = trainer.train().global_step
    said["commit"] = trainer.push_to_hub() is not None
    (out / f"{os.environ['RANK']}.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
