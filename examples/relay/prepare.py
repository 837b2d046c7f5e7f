"""Write what the recipes of `examples/configs` need to train in the relay world, without a network.

    python examples/relay/prepare.py

Makes in `outputs/relay`: `data` (train.jsonl and test.jsonl), `corpus.jsonl`, and `policy`, a cold-started checkpoint.
"""

import argparse
import json
from pathlib import Path

from policy import ColdStart, load_or_train
from transformers import set_seed


ROOT = Path(__file__).resolve().parent.parent.parent
SEED = 40  # of the world: other facts than those of the cold start


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--output-dir", type=Path, default=ROOT / "outputs" / "relay")
    parser.add_argument("--cache-dir", type=Path, default=ROOT / ".cache" / "relay", help="of cold-started policies")
    parser.add_argument("--train", type=int, default=128, help="questions to train on")
    parser.add_argument("--test", type=int, default=64, help="questions to evaluate on")
    parser.add_argument("--context-turns", type=int, default=1, help="earlier turns that a turn sees; 0: all of them")
    parser.add_argument("--cold-start-steps", type=int, default=ColdStart.steps)
    parser.add_argument("--data-only", action="store_true", help="make no policy: train one of another origin")
    args = parser.parse_args()

    settings = ColdStart(context_turns=args.context_turns or None, steps=args.cold_start_steps)
    world = settings.world(SEED, args.train + args.test)
    rows = world.to_dataset()
    (args.output_dir / "data").mkdir(parents=True, exist_ok=True)
    for name, part in (("train", range(args.train)), ("test", range(args.train, len(rows)))):
        rows.select(part).to_json(args.output_dir / "data" / f"{name}.jsonl")
    with (args.output_dir / "corpus.jsonl").open("w", encoding="utf-8") as corpus:
        for document in world.documents:
            corpus.write(json.dumps(document) + "\n")
    if not args.data_only:
        set_seed(settings.seed)
        model, tokenizer = load_or_train(settings, args.cache_dir)
        model.save_pretrained(args.output_dir / "policy")
        tokenizer.save_pretrained(args.output_dir / "policy")
    print(f"Wrote {', '.join(sorted(path.name for path in args.output_dir.iterdir()))} to {args.output_dir}.")


if __name__ == "__main__":
    main()
