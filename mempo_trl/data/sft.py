"""Fine-tuning data in token ids: the same ids that the trainer's rollouts have."""

import json
from collections.abc import Iterable, Mapping
from typing import Any, cast

from ..agent_settings import AgentSettings
from ..chat_templates import ObservationRenderer, Tool, prompt_ids


class PairTokenizer:
    """Makes token ids of pairs of context and turn, as `mempo_trl.rollout.AgentLoop` puts contexts together.

    A context is the prompt as the chat template renders it, followed by the ids of the earlier turns and observations;
    a turn ends in the token that ends turns. The text of a conversation is never rendered again as a whole, which many
    templates do differently.

    Args:
        tokenizer: the policy's tokenizer, with a chat template.
        settings: what the policy will be run with: `max_observation_length`, `chat_template_kwargs`, `eos_token_ids`.
    """

    def __init__(self, tokenizer: Any, settings: AgentSettings):
        self.tokenizer, self.settings = tokenizer, settings
        ends = list(settings.eos_token_ids or [])
        self._ends = ends if tokenizer.eos_token_id in ends else [tokenizer.eos_token_id, *ends]
        self._renderers: dict[str, tuple[ObservationRenderer, list[Tool]]] = {}

    def __call__(self, row: Mapping[str, Any]) -> dict[str, list[int]]:
        """The ids of a pair.

        Args:
            row: `prompt`, `completion` and `tools`, as `mempo_trl.data.traces.turn_pairs` makes them.

        Returns:
            `input_ids`, and `labels`: the ids of the turn, -100 for those of its context.

        Raises:
            ValueError: if the row is not of that form.
        """
        renderer, tools = self._renderer(row.get("tools") or "[]")
        messages = list(row["prompt"])
        completion = row["completion"]
        if len(completion) != 1 or completion[0]["role"] != "assistant":
            raise ValueError(f"`completion` must be one message of the assistant, but it is {completion!r}.")
        opening = next((n for n, message in enumerate(messages) if message["role"] == "assistant"), len(messages))
        ids = prompt_ids(self.tokenizer, renderer, messages[:opening], tools, self.settings.chat_template_kwargs)
        position = opening
        while position < len(messages):
            turn = renderer.turn_ids(messages[position]["content"])
            position += 1
            results = []
            while position < len(messages) and messages[position]["role"] != "assistant":
                message = messages[position]
                results.append((message.get("name") or "unknown", message["content"]))
                position += 1
            ids += turn + renderer.suffix_ids(renderer.messages(results), turn)
        turn = renderer.turn_ids(completion[0]["content"])
        return {"input_ids": ids + turn, "labels": [-100] * len(ids) + turn}

    def _renderer(self, schemas: str) -> tuple[ObservationRenderer, list[Tool]]:
        if schemas not in self._renderers:
            tools = cast(list[Tool], json.loads(schemas))
            settings = self.settings
            renderer = ObservationRenderer(
                self.tokenizer, self._ends, settings.max_observation_length, settings.chat_template_kwargs, tools
            )
            self._renderers[schemas] = renderer, tools
        return self._renderers[schemas]


def tokenize_pairs(rows: Iterable[Mapping[str, Any]], tokenizer: Any, settings: AgentSettings) -> Any:
    """Make a data set for TRL's `SFTTrainer` of pairs of context and turn.

    Args:
        rows: as `PairTokenizer` takes them.
        tokenizer, settings: see `PairTokenizer`.

    Returns:
        A `datasets.Dataset` with `input_ids` and `labels`; the loss is on the turn alone.
    """
    from datasets import Dataset

    tokenize = PairTokenizer(tokenizer, settings)
    return Dataset.from_list([tokenize(row) for row in rows])
