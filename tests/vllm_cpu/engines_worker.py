"""Agents that vLLM runs in this process; writes what they did.

python engines_worker.py CHECKPOINT INDEX OUT
"""

import json
import sys
from pathlib import Path


sys.path.insert(0, str(Path(__file__).parent.parent))

from agent_runs import ROWS, RUNS, VLLM_OPTIONS, open_tools, run

from mempo_trl.engines import open_engine
from mempo_trl.evaluation import evaluate


def main(checkpoint: str, index: Path, out: Path) -> None:
    tools = open_tools(index)
    llm, found = None, {}
    for name, settings in RUNS.items():
        if llm is None:
            engine = open_engine(
                checkpoint, tools, backend="vllm", dtype="float32", vllm_options=VLLM_OPTIONS, **settings
            )
            llm, tokenizer = engine.sampler.llm, engine.tokenizer
            evaluate(engine, ROWS, output_dir=out / "evaluation", progress=False)
        else:
            engine = open_engine(llm, tools, backend="vllm", tokenizer=tokenizer, **settings)
        found[name] = run(engine)
    (out / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
