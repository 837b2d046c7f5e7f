"""What an agent did to answer a question, as text: the same whatever engine ran it."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ..protocol import ParsedTurn, ToolCall, parse_turn
from ..rollout import StopReason


Message = dict[str, Any]
EpisodeStop = StopReason | Literal["refused"]  # by an endpoint that answers other requests


@dataclass
class Step:
    """One turn of an agent.

    Attributes:
        text: what the model wrote, without end-of-turn tokens.
        prompt_tokens: tokens that it read: the question, the earlier turns in sight, their observations.
        completion_tokens: tokens that it wrote.
        observation: what the tools answered, one message `{"role": "tool", "name", "content"}` for each call, before
            it was cut to what the model gets to read. Empty for the last turn.
    """

    text: str
    prompt_tokens: int
    completion_tokens: int
    observation: list[Message] = field(default_factory=list)

    @property
    def parsed(self) -> ParsedTurn:
        """What the text says."""
        return parse_turn(self.text)

    @property
    def memory(self) -> str | None:
        """The memory that it begins with, if any."""
        return self.parsed.memory

    @property
    def thought(self) -> str | None:
        """The thought, if any."""
        return self.parsed.thought

    @property
    def tool_calls(self) -> list[ToolCall]:
        """The well-formed tool calls."""
        return self.parsed.tool_calls

    @property
    def answer(self) -> str | None:
        """The answer, if it gives one."""
        return self.parsed.answer


@dataclass
class Episode:
    """All turns that answer one question.

    Attributes:
        steps: the turns in order.
        stop_reason: why it ended, see `mempo_trl.rollout.StopReason`; "refused" if the endpoint wanted no such request.
        error: what an endpoint said that refused a request; `None` if it did not.
        tool_calls, tool_failures, unavailable_calls, malformed_calls: see `mempo_trl.rollout.Trajectory`.
    """

    steps: list[Step] = field(default_factory=list)
    stop_reason: EpisodeStop = "no_action"
    error: str | None = field(default=None, kw_only=True)
    tool_calls: int = 0
    tool_failures: int = 0
    unavailable_calls: int = 0
    malformed_calls: int = 0

    @property
    def answer(self) -> str | None:
        """The answer of the last turn, if it gives one."""
        return self.steps[-1].answer if self.steps else None

    @property
    def total_tokens(self) -> int:
        """Tokens read and written in all turns together; each turn reads its context anew."""
        return sum(step.prompt_tokens + step.completion_tokens for step in self.steps)

    @property
    def peak_tokens(self) -> int:
        """Tokens read and written in the largest turn."""
        return max((step.prompt_tokens + step.completion_tokens for step in self.steps), default=0)

    def to_dict(self) -> dict[str, Any]:
        """The episode in plain types, as it is written to files."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> "Episode":
        """The episode in what `to_dict` gave; other keys are ignored."""
        names = [f.name for f in dataclasses.fields(cls)]
        values = {name: content[name] for name in names if name in content}
        return cls(**{**values, "steps": [Step(**step) for step in content["steps"]]})
