"""What an agent was trained with and must be run with: a small file beside its weights."""

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .protocol import DEFAULT_SYSTEM_PROMPT


FILE_NAME = "agent.json"
_FORMAT = 1


@dataclass(kw_only=True)
class AgentSettings:
    """What an agent was trained with and must be run with. The defaults are those of `MemPOConfig`.

    Attributes:
        eos_token_ids: ids that end a turn; `None` for those of the model's generation configuration.
        max_turns, max_turn_length, max_observation_length, context_turns: see `MemPOConfig`.
        max_completion_length: likewise; `None` for `max_turns * (max_turn_length + max_observation_length)`.
        system_prompt: text of the system message, empty for none.
        temperature: sampling temperature in training.
        chat_template_kwargs: further arguments of `apply_chat_template`.
        tools: JSON schemas of the tools.
    """

    eos_token_ids: list[int] | None = None
    max_turns: int = 16
    max_turn_length: int = 512
    max_observation_length: int = 512
    max_completion_length: int | None = None
    context_turns: int | None = None
    system_prompt: str = DEFAULT_SYSTEM_PROMPT
    temperature: float = 1.0
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    tools: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name in ("max_turns", "max_turn_length", "max_observation_length"):
            _check_count(name, getattr(self, name))
        for name in ("max_completion_length", "context_turns"):
            if getattr(self, name) is not None:
                _check_count(name, getattr(self, name))

    @property
    def completion_length(self) -> int:
        """Tokens of all turns and observations of a rollout together."""
        if self.max_completion_length is not None:
            return self.max_completion_length
        return self.max_turns * (self.max_turn_length + self.max_observation_length)

    def save(self, folder: str | Path) -> None:
        """Write `agent.json` into a folder."""
        content = {"format": _FORMAT, **dataclasses.asdict(self)}
        (Path(folder) / FILE_NAME).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", "utf-8")

    @classmethod
    def load(cls, model: str | Path, revision: str | None = None) -> "AgentSettings | None":
        """Read the settings of a checkpoint.

        Args:
            model: a folder, or a repository on the Hub.
            revision: branch, tag or commit there.

        Returns:
            The settings, or `None` if the checkpoint has none: it was not trained as an agent with this package.

        Raises:
            ValueError: if the file is damaged.
        """
        file: Any = Path(model) / FILE_NAME
        if not Path(model).is_dir():
            from transformers.utils import cached_file

            try:
                file = cached_file(str(model), FILE_NAME, revision=revision)
            except OSError:  # neither there nor in the cache: whoever loads the model says what is wrong, if anything
                return None
        if not file or not Path(file).is_file():
            return None
        try:
            content = json.loads(Path(file).read_text(encoding="utf-8"))
            if content.pop("format") != _FORMAT:
                raise ValueError("it is of another version of mempo_trl")
            return cls(**content)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{file} cannot be read ({error}): restore it, or remove it.") from error

    def replace(self, **changes: Any) -> "AgentSettings":
        """The settings with some of them changed.

        A rollout's budget that was not chosen goes with the turns that it is made of.
        """
        lengths = ("max_turns", "max_turn_length", "max_observation_length")
        chosen = self.max_completion_length
        if chosen == self.max_turns * (self.max_turn_length + self.max_observation_length):
            chosen = None
        if any(name in changes for name in lengths):
            changes = {"max_completion_length": chosen, **changes}
        return dataclasses.replace(self, **changes)


def _check_count(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"`{name}={value!r}` is not allowed: it must be a whole number, at least 1.")
