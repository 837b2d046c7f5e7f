"""From episodes to fine-tuning data: which are worth imitating, and the pairs of context and turn that they hold.

This module needs no torch.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ..protocol import check_trajectory, without_memory


Record = dict[str, Any]


@dataclass
class Selection:
    """What is kept of a run.

    Attributes:
        kept: the records worth imitating, in the order of the run.
        dropped: why the others are not, and how many for each reason.
    """

    kept: list[Record] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)


def select_traces(
    records: Iterable[Record],
    score: Callable[[Record], float],
    min_score: float = 1.0,
    max_per_question: int | None = 1,
    max_turns: int | None = None,
) -> Selection:
    """Keep the episodes that are right and well-formed, and of those of a question the ones with the fewest tokens.

    Args:
        records: episodes as runs write them.
        score: how right an episode is, from 0 to 1.
        min_score: the least that is kept.
        max_per_question: episodes that are kept of a question; `None` keeps all.
        max_turns: episodes with more turns are dropped.

    Returns:
        What is kept, and why the rest is not.
    """
    selection = Selection()
    good: dict[str, list[Record]] = {}
    order: dict[int, int] = {}
    for position, record in enumerate(records):
        texts = [step["text"] for step in record["steps"]]
        if record["stop_reason"] != "answer":
            selection.dropped["no answer"] += 1
        elif score(record) < min_score:
            selection.dropped["wrong answer"] += 1
        elif check_trajectory(texts):
            selection.dropped["not well-formed"] += 1
        elif max_turns is not None and len(texts) > max_turns:
            selection.dropped["too many turns"] += 1
        else:
            order[id(record)] = position
            good.setdefault(record["id"], []).append(record)
    for records_of_one in good.values():
        best = sorted(records_of_one, key=_tokens)[:max_per_question]
        selection.dropped["more than enough for its question"] += len(records_of_one) - len(best)
        selection.kept += best
    selection.kept.sort(key=lambda record: order[id(record)])
    selection.dropped = +selection.dropped
    return selection


def turn_pairs(
    record: Record,
    prompt: list[dict[str, Any]],
    context_turns: int | None,
    tools: list[dict[str, Any]],
    memory: bool = True,
) -> Iterator[dict[str, Any]]:
    """The turns of an episode, each with what the policy sees before it writes it.

    Args:
        record: the episode.
        prompt: the conversation that opens it, see `mempo_trl.protocol.build_prompt`.
        context_turns: earlier turns that a turn sees beside the prompt; `None` for all of them.
        tools: JSON schemas of the tools.
        memory: whether the turns keep their memory. Without it, every turn should see all earlier ones.

    Returns:
        For each turn `id`, `sample`, `turn` (from 1), `prompt` (messages), `completion` (one message) and `tools` (JSON
        text): rows for TRL's `SFTTrainer`, or for `mempo_trl.data.sft.tokenize_pairs`, which makes of them exactly what
        the trainer's rollouts see.
    """
    rounds: list[list[dict[str, Any]]] = []
    for number, step in enumerate(record["steps"], start=1):
        turn = {"role": "assistant", "content": step["text"] if memory else without_memory(step["text"])}
        seen = rounds if context_turns is None else rounds[-context_turns:]
        yield {
            "id": record["id"],
            "sample": record["sample"],
            "turn": number,
            "prompt": [*prompt, *(message for part in seen for message in part)],
            "completion": [turn],
            "tools": json.dumps(tools, ensure_ascii=False),
        }
        rounds.append([turn, *step["observation"]])


def _tokens(record: Record) -> int:
    return sum(step["prompt_tokens"] + step["completion_tokens"] for step in record["steps"])
