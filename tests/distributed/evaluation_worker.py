"""One process of a training that evaluates held-out questions, and writes what it logged.

python -m torch.distributed.run --nproc_per_node 2 evaluation_worker.py OUT
"""

import json
import os
import sys
from pathlib import Path


sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from accelerate import PartialState
from relay_run import relay_trainer, world

from mempo_trl.evaluation import EvaluationCallback


def main(out: Path) -> None:
    torch.set_num_threads(1)
    process = os.environ.get("RANK", "0")
    rows = 4 // int(os.environ.get("WORLD_SIZE", "1"))
    trainer = relay_trainer(out / "run", max_steps=1, per_device_train_batch_size=rows, logging_steps=1)
    held_out = world(41, 12)[0].select(range(7, 12))
    evaluation = EvaluationCallback(trainer, held_out, output_dir=out / f"heldout-{process}")
    trainer.add_callback(evaluation)
    # Before training, which two processes draw for in other streams than one.
    evaluation.on_train_begin(trainer.args, trainer.state, trainer.control)
    before = [entry for entry in trainer.state.log_history if "heldout/f1" in entry]
    trainer.train()
    (out / f"{process}.json").write_text(json.dumps({"before": before, "all": trainer.state.log_history}))
    PartialState().destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
