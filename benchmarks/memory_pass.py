"""The memory pass of one rollout: packed, against what scores the same sequences otherwise.

    python benchmarks/memory_pass.py --turns 10

N = turns − 1 memories are scored, each against its context: 2N sequences. They are run

- packed: as `MemPOTrainer` does, one prefix tree;
- reference: one padded batch of 2N sequences and the logits of all of its positions, as the reference implementation;
- padded: the same batch, but no other logits than the target's;
- dense: the packed forward, with a mask over all pairs of tokens instead of a `TreeMask`;
- sorted: one sequence at a time, shortest first, no padding at all, and no other logits than the target's.
"""

import sys
from unittest.mock import patch

import torch
from common import keep_memory, load, median, parser, ratios, report, timed

from mempo_trl import tree_attention
from mempo_trl.prefix_tree import Branch, BranchScorer, PrefixTree


def sequences(args) -> list[Branch]:
    """Memories and baselines of one rollout, in random tokens."""
    generator = torch.Generator().manual_seed(0)

    def some(count: int) -> list[int]:
        return torch.randint(10, 8000, (count,), generator=generator).tolist()

    prompt, target, history = some(args.prompt), some(args.target), []
    memories, baselines = [], []
    for turn in range(args.turns):
        memory = some(args.memory)
        if turn > 0:
            for branches, context in ((memories, prompt + memory), (baselines, prompt + history)):
                branches.append(Branch(context + target, len(context)))
        history = history + memory + some(args.turn - args.memory) + some(args.observation)
    return memories + baselines


def main() -> None:
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("--turns", type=int, default=4)
    arguments.add_argument("--prompt", type=int, default=400)
    arguments.add_argument("--turn", type=int, default=200, help="tokens of a turn, its memory included")
    arguments.add_argument("--observation", type=int, default=200)
    arguments.add_argument("--memory", type=int, default=120)
    arguments.add_argument("--target", type=int, default=32)
    args = arguments.parse_args()
    model = load(args).eval()
    branches = sequences(args)
    scorer = BranchScorer(0, args.device)

    def packed() -> torch.Tensor:
        return torch.stack(scorer.unit_logps(model, [branches], packed=True)[0])

    def padded() -> torch.Tensor:
        return torch.stack(scorer.unit_logps(model, [branches], packed=False)[0])

    def dense() -> torch.Tensor:
        with patch.object(tree_attention, "CHUNK", sys.maxsize):
            return packed()

    @torch.no_grad()
    def reference() -> torch.Tensor:
        width = max(len(branch.ids) for branch in branches)
        rows = [[0] * (width - len(branch.ids)) + list(branch.ids) for branch in branches]
        ids = torch.tensor(rows, device=args.device)
        mask = torch.tensor([[int(n >= width - len(b.ids)) for n in range(width)] for b in branches]).to(args.device)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        logits = model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
        logps = logits[:, -args.target - 1 : -1].float().log_softmax(-1)
        return logps.gather(-1, ids[:, -args.target :, None]).squeeze(-1)

    @torch.no_grad()
    def one_by_one() -> torch.Tensor:
        logps = {}
        for index in sorted(range(len(branches)), key=lambda index: len(branches[index].ids)):
            ids = torch.tensor([list(branches[index].ids)], device=args.device)
            logits = model(ids, logits_to_keep=args.target + 1, use_cache=False).logits[0, :-1].float()
            logps[index] = logits.log_softmax(-1).gather(-1, ids[0, -args.target :, None]).squeeze(-1)
        return torch.stack([logps[index] for index in range(len(branches))])

    baselines = {"reference": reference, "padded": padded, "dense": dense, "sorted": one_by_one}
    difference = max((packed() - other()).abs().max().item() for other in baselines.values())
    seconds = timed({"packed": packed, **baselines}, args.runs)
    tree, batch = len(PrefixTree(branches)), len(branches) * max(map(len, branches))
    tokens = {"packed": tree, "reference": batch, "padded": batch, "dense": tree, "sorted": sum(map(len, branches))}
    report(
        args,
        tokens=tokens,
        seconds={name: median(values) for name, values in seconds.items()},
        speedup={name: ratios(seconds, name, "packed") for name in baselines},
        token_ratio={name: tokens[name] / tokens["packed"] for name in baselines},
        max_difference=difference,
    )


if __name__ == "__main__":
    keep_memory()
    main()
