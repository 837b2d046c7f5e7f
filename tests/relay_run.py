"""Training and evaluating in the relay world with the policy of `relay_policy`."""

import copy
from pathlib import Path
from typing import Any

from datasets import Dataset
from relay_policy import small_policy
from support import one_step

from mempo_trl import MemPOConfig, MemPOTrainer
from mempo_trl.rewards import f1_reward
from mempo_trl.search import Document, make_search_tool


# What the policy was trained with.
SETTINGS: dict[str, Any] = {
    "system_prompt": "search and remember",
    "context_turns": 1,
    "max_turns": 3,
    "max_turn_length": 48,
    "max_observation_length": 64,
}


def world(seed: int, questions: int) -> tuple[Dataset, Any]:
    """Questions of a world, and a search tool that knows the titles of its documents."""
    relay = small_policy()[2].world(seed, questions)
    documents = {document.title: document for document in (Document(**row) for row in relay.documents)}

    class Exact:
        def search(self, queries, k):
            return [[documents[query]] if query in documents else [] for query in queries]

    return relay.to_dataset(), make_search_tool(Exact(), k=1)


def relay_trainer(output_dir: Path, **config: Any) -> MemPOTrainer:
    """A trainer of a copy of the policy, which moves it."""
    model, tokenizer, _ = small_policy()
    questions, tool = world(41, 12)
    options = {**one_step(output_dir, 4), "num_generations": 2, "max_steps": 4, "disable_tqdm": True, "seed": 3}
    options |= {"per_device_eval_batch_size": 2, "logging_steps": 2, "adam_epsilon": 1e-3}
    return MemPOTrainer(
        copy.deepcopy(model),
        reward_funcs=f1_reward,
        args=MemPOConfig(**{**options, **SETTINGS, **config}),
        train_dataset=questions.select(range(7)),
        processing_class=tokenizer,
        tools=[tool],
    )
