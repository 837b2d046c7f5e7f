"""What every engine is asked for, and what it did: the questions, the search, the settings."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from relay_policy import LONGER_SETTINGS

from mempo_trl.protocol import build_prompt
from mempo_trl.search import BM25Index, make_search_tool


SYSTEM_PROMPT = "search and remember"
COMMON = {"system_prompt": SYSTEM_PROMPT, "max_turns": 5, "max_turn_length": 64, "max_observation_length": 64}
RUNS: dict[str, dict[str, Any]] = {
    "the last turn in sight": {**COMMON, "context_turns": 1},
    "all turns in sight": {**COMMON, "context_turns": None},
    "turns that are cut": {**COMMON, "context_turns": 1, "max_turn_length": 22},
}
WORLD = LONGER_SETTINGS.world(seed=41, questions=20)
ROWS = [
    {"id": str(number), "question": question.question, "answers": question.answers}
    for number, question in enumerate(WORLD.questions)
]
# Compiling takes longer than everything else here.
VLLM_OPTIONS = {"enforce_eager": True, "max_model_len": 512}


def open_tools(folder: Path) -> list[Any]:
    """The search tool over an index in a folder, built if it is not there."""
    index = BM25Index.load(folder) if folder.exists() else BM25Index.build(WORLD.documents, folder)
    return [make_search_tool(index, k=1)]


class Recorded:
    """A sampler, and every turn that it sampled: `[context, turn]`, token ids both."""

    def __init__(self, sampler: Any):
        self.sampler = sampler
        self.turns: list[list[list[int]]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.sampler, name)

    def __call__(self, contexts: list[list[int]], max_new_tokens: int, seed: int) -> list[list[int]]:
        turns = self.sampler(contexts, max_new_tokens, seed)
        self.turns += [[context, turn] for context, turn in zip(contexts, turns, strict=True)]
        return turns


def run(engine: Any) -> dict[str, Any]:
    """The episodes of all questions, in plain types, and where the engine knows them the token ids of their turns."""
    if hasattr(engine, "sampler"):
        engine.sampler = Recorded(engine.sampler)
    prompts = [build_prompt(row["question"], SYSTEM_PROMPT) for row in ROWS]
    episodes: Mapping[int, Any] = dict(engine.rollout(prompts, range(len(prompts))))
    found = {"episodes": [episodes[number].to_dict() for number in range(len(prompts))]}
    return {**found, "turns": sorted(engine.sampler.turns)} if hasattr(engine, "sampler") else found
