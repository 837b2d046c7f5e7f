"""The agent loop: turns until answered, for a batch of rollouts, in step on every process."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal, Protocol

from .chat_templates import Message, ObservationRenderer
from .protocol import ParsedTurn, ToolCall, parse_turn
from .tools import ToolRunner


StopReason = Literal[
    "answer",  # the turn answers
    "no_action",  # the turn ended, but neither calls a tool nor answers
    "max_turns",
    "max_turn_length",  # the turn was cut by its own limit before it came to an action
    "max_completion_length",  # turns and observations fill the rollout's budget
    "max_context_length",  # what the next turn would see leaves no room in the model's context
    "malformed_calls",  # too many turns in a row whose every tool call was malformed
]
STOP_REASONS: tuple[StopReason, ...] = StopReason.__args__  # type: ignore[attr-defined]


@dataclass
class Turn:
    """What the policy wrote in one turn, and what came back.

    Attributes:
        ids: token ids as they were sampled, including the end-of-turn token if there is one.
        text: the decoded turn, without end-of-turn and other special tokens.
        parsed: what the text says.
        ended: whether the policy ended the turn itself, with an end-of-turn token.
        logprobs: log-probability of each id under the sampler, if the sampler tells.
        observation_ids: what follows up to the next turn: tokens that close the turn, the observation, the next
            generation prompt. Empty for the last turn. None of them was sampled.
        observation: the messages rendered there.
        results: what the tools answered, `(tool name, text)` for each call, before it was cut or rendered.
    """

    ids: list[int]
    text: str
    parsed: ParsedTurn
    ended: bool
    logprobs: list[float | None] | None = None
    observation_ids: list[int] = field(default_factory=list)
    observation: list[Message] = field(default_factory=list)
    results: list[tuple[str, str]] = field(default_factory=list)

    def cut_inside(self, tags: tuple[str, str]) -> bool:
        """Whether the turn was cut between an opening tag and its closing one."""
        return not self.ended and self.text.count(tags[0]) > self.text.count(tags[1])


@dataclass
class Trajectory:
    """One rollout.

    Attributes:
        prompt_ids: what the first turn saw: system message, question, generation prompt.
        context_turns: earlier turns that a turn sees beside the prompt; `None` for all of them.
        turns: the turns, in order.
        stop_reason: why the rollout ended.
        tool_calls: tool calls made, malformed ones included.
        tool_failures: those that were answered with an error.
        unavailable_calls: those whose tool could not be reached.
        malformed_calls: those that could not be read.
    """

    prompt_ids: list[int]
    context_turns: int | None = None
    turns: list[Turn] = field(default_factory=list)
    stop_reason: StopReason = "no_action"
    tool_calls: int = 0
    tool_failures: int = 0
    unavailable_calls: int = 0
    malformed_calls: int = 0

    @property
    def completion_ids(self) -> list[int]:
        """Everything after the prompt: turns and observations in order."""
        return [i for turn in self.turns for i in turn.ids + turn.observation_ids]

    @property
    def tool_mask(self) -> list[int]:
        """1 for every completion token that was sampled, 0 for every other."""
        return [m for turn in self.turns for m in [1] * len(turn.ids) + [0] * len(turn.observation_ids)]

    @property
    def logprobs(self) -> list[float | None]:
        """Log-probability of every completion token under the sampler, 0 where nothing was sampled."""
        return [p for turn in self.turns for p in (turn.logprobs or []) + [0.0] * len(turn.observation_ids)]

    @property
    def messages(self) -> list[Message]:
        """The completion as a conversation."""
        return [
            message
            for turn in self.turns
            for message in [{"role": "assistant", "content": turn.text}, *turn.observation]
        ]

    @property
    def messages_with_calls(self) -> list[Message]:
        """`messages`, with the well-formed tool calls of a turn beside the text that holds them, in TRL's form."""
        messages: list[Message] = []
        for turn in self.turns:
            message: Message = {"role": "assistant", "content": turn.text}
            if turn.parsed.tool_calls:
                message["tool_calls"] = [{"type": "function", "function": call} for call in turn.parsed.tool_calls]
            messages += [message, *turn.observation]
        return messages

    def turn_start(self, index: int) -> int:
        """Position of a turn's first token in the completion."""
        return sum(len(turn.ids) + len(turn.observation_ids) for turn in self.turns[:index])

    @property
    def segments(self) -> list[int]:
        """The part of the rollout that every completion token belongs to: 2t if turn t sampled it, else 2t + 1."""
        return [
            segment
            for index, turn in enumerate(self.turns)
            for segment in [2 * index] * len(turn.ids) + [2 * index + 1] * len(turn.observation_ids)
        ]

    def context_ids(self, index: int) -> list[int]:
        """What turn `index` saw; the context of the next turn for `index = len(turns)`."""
        return self._after_prompt(0 if self.context_turns is None else max(index - self.context_turns, 0), index)

    def token_counts(self) -> tuple[int, int, int]:
        """Tokens that the model reads and writes in all turns together, in the largest turn, and in all turns together
        if each saw the full history."""
        steps = [len(self.context_ids(index)) + len(turn.ids) for index, turn in enumerate(self.turns)]
        full = [len(self.history_ids(index)) + len(turn.ids) for index, turn in enumerate(self.turns)]
        return sum(steps), max(steps, default=0), sum(full)

    def history_ids(self, index: int) -> list[int]:
        """The prompt and everything before turn `index`, whether the turn saw it or not."""
        return self._after_prompt(0, index)

    def _after_prompt(self, first: int, last: int) -> list[int]:
        """The prompt and turns `first` to `last − 1` with their observations."""
        return self.prompt_ids + [i for turn in self.turns[first:last] for i in turn.ids + turn.observation_ids]


def _may_call_natively(turn: Turn) -> bool:
    """Whether a turn may hold calls in the model's own format: no call was read, and none stands inside a section."""
    return not turn.parsed.tool_calls and turn.text.count("<tool_call>") == len(turn.parsed.requests)


class Generate(Protocol):
    """Samples one turn for each context: `(ids, logprobs)`, the latter `None` if the sampler does not tell."""

    def __call__(
        self, contexts: list[list[int]], max_new_tokens: int, first: bool
    ) -> tuple[list[list[int]], list[list[float | None]] | None]: ...


@dataclass
class AgentLoop:
    """Runs rollouts turn by turn until each has answered or must stop.

    Every process makes the same number of `generate` calls, whatever its rollouts do: a process whose rollouts are all
    done takes part with a context whose turn is thrown away, since sharded models and shared servers need every process
    in every call.

    Attributes:
        renderer: renders observations; `None` if the prompts are not conversations, then every rollout has one turn.
        runner: runs tool calls.
        generate: samples one turn for each context.
        decode: text of sampled ids.
        eos_token_ids: every id that ends a turn.
        max_turns: turns in a rollout.
        max_turn_length: tokens sampled in a turn.
        max_completion_length: tokens of all turns and observations of a rollout together.
        max_context_length: tokens that the model takes, context and turn together; `None` if it has no limit.
        context_turns: earlier turns that a turn sees beside the prompt; `None` for all of them.
        max_malformed_turns: turns in a row with malformed tool calls alone, after which a rollout stops; `None` for no
            limit.
        max_unavailable_turns: turns in a row, of all rollouts together, in which no call of a tool reached it, after
            which the loop raises; `None` for no limit.
        max_over_processes: the largest of an integer over all processes.
        equal_sizes: whether the sampler slices by process and needs as many contexts from each.
        parse_native_calls: reads tool calls in the model's own format from `(ids, context, row)`, where the protocol's
            parser could read none.
        how_to_go_on: what a user does after the loop raised, for its message.
        sampled_rows: while `generate` runs, the rollouts that its first contexts are of.
    """

    renderer: ObservationRenderer | None
    runner: ToolRunner
    generate: Generate
    decode: Callable[[list[int]], str]
    eos_token_ids: list[int]
    max_turns: int
    max_turn_length: int
    max_completion_length: int
    max_context_length: int | None = None
    context_turns: int | None = None
    max_malformed_turns: int | None = None
    max_unavailable_turns: int | None = None
    max_over_processes: Callable[[int], int] = int
    equal_sizes: bool = False
    parse_native_calls: Callable[[list[int], list[int], int], list[ToolCall]] | None = None
    how_to_go_on: str = "start it again"
    sampled_rows: list[int] = field(default_factory=list, init=False)

    def run(self, prompts: list[list[int]], tools: list[dict[str, Callable]]) -> list[Trajectory]:
        """Roll out every prompt.

        Args:
            prompts: token ids, each ending in a generation prompt. Rollouts of a question stand next to each other.
            tools: the tools of each rollout by name.

        Returns:
            One trajectory for each prompt, in order.

        Raises:
            RuntimeError: on every process, if one could not reach a tool in `max_unavailable_turns` turns in a row.
        """
        *_, trajectories = self.turns(prompts, tools)
        return trajectories

    def turns(self, prompts: list[list[int]], tools: list[dict[str, Callable]]) -> Iterator[list[Trajectory]]:
        """As `run`, giving the growing trajectories before the first turn and after each one."""
        trajectories = [Trajectory(prompt, self.context_turns) for prompt in prompts]
        malformed_turns = [0] * len(prompts)
        active = []
        for row, trajectory in enumerate(trajectories):
            if self._room(trajectory) > 0:
                active.append(row)
            else:
                trajectory.stop_reason = self._limit(trajectory, len(trajectory.prompt_ids))
        yield trajectories
        for number in range(1, self.max_turns + 1):
            most = self.max_over_processes(len(active))
            if most == 0:
                break
            # Rollouts of a question share their first context, as long as every process has all of its rollouts.
            first = number == 1 and self.max_over_processes(len(prompts) - len(active)) == 0
            self._sample(trajectories, active, most, first)
            acting = []
            for row in active:
                trajectory = trajectories[row]
                turn = trajectory.turns[-1]
                if turn.parsed.answer is not None:
                    trajectory.stop_reason = "answer"
                    continue
                if self.parse_native_calls is not None and _may_call_natively(turn):
                    context = trajectory.context_ids(number - 1)
                    turn.parsed.requests = list(self.parse_native_calls(turn.ids, context, row)) or turn.parsed.requests
                if not turn.parsed.requests or self.renderer is None:
                    seen = len(trajectory.context_ids(number - 1)) + len(turn.ids)
                    trajectory.stop_reason = "no_action" if turn.ended else self._limit(trajectory, seen)
                elif number == self.max_turns:
                    trajectory.stop_reason = "max_turns"
                else:
                    acting.append(row)
            self._act(trajectories, acting, tools)
            self.runner.stop_if_unavailable(self.max_unavailable_turns, self.how_to_go_on, self.max_over_processes)

            active = []
            for row in acting:
                trajectory = trajectories[row]
                malformed = not trajectory.turns[-1].parsed.tool_calls
                malformed_turns[row] = malformed_turns[row] + 1 if malformed else 0
                if self.max_malformed_turns is not None and malformed_turns[row] >= self.max_malformed_turns:
                    trajectory.stop_reason = "malformed_calls"
                elif self._room(trajectory) <= 0:
                    trajectory.stop_reason = self._limit(trajectory, len(trajectory.context_ids(number)))
                else:
                    active.append(row)
                    continue
                # Nothing will be sampled after this observation, so it is not part of the rollout.
                trajectory.turns[-1].observation_ids = []
                trajectory.turns[-1].observation = []
            yield trajectories

    def _sample(self, trajectories: list[Trajectory], active: list[int], most: int, first: bool) -> None:
        """Append a turn to every active rollout."""
        contexts = [trajectories[row].context_ids(len(trajectories[row].turns)) for row in active]
        rooms = [self._room(trajectories[row]) for row in active]
        missing = (most if self.equal_sizes else 1) - len(contexts)
        # One token fits into any model's context; a whole prompt may be what left this process without a rollout.
        contexts += [trajectories[0].prompt_ids[:1]] * missing
        max_new_tokens = self.max_over_processes(max(rooms, default=1))
        self.sampled_rows = active
        turns, logprobs = self.generate(contexts, max_new_tokens, first)
        for index, (row, room) in enumerate(zip(active, rooms, strict=True)):
            ids = list(turns[index][:room])
            text = self.decode(ids)
            trajectories[row].turns.append(
                Turn(
                    ids=ids,
                    text=text,
                    parsed=parse_turn(text),
                    ended=bool(ids) and ids[-1] in self.eos_token_ids,
                    logprobs=None if logprobs is None else list(logprobs[index][:room]),
                )
            )

    def _act(self, trajectories: list[Trajectory], acting: list[int], tools: list[dict[str, Callable]]) -> None:
        """Run the tool calls of the last turns and append the observations."""
        requests = [(row, request) for row in acting for request in trajectories[row].turns[-1].parsed.requests]
        results = self.runner.run([(tools[row], request) for row, request in requests])
        of_row: dict[int, list[tuple[str, str]]] = {row: [] for row in acting}
        for (row, _), result in zip(requests, results, strict=True):
            of_row[row].append((result.name, result.text))
            trajectories[row].tool_calls += 1
            trajectories[row].tool_failures += result.failed
            trajectories[row].unavailable_calls += result.unavailable is not None
            trajectories[row].malformed_calls += result.malformed
        for row in acting:
            assert self.renderer is not None
            turn = trajectories[row].turns[-1]
            turn.results = of_row[row]
            turn.observation = self.renderer.messages(turn.results)
            turn.observation_ids = self.renderer.suffix_ids(turn.observation, turn.ids)

    def _room(self, trajectory: Trajectory) -> int:
        """Tokens that the next turn may have."""
        room = min(self.max_turn_length, self.max_completion_length - len(trajectory.completion_ids))
        if self.max_context_length is None:
            return room
        return min(room, self.max_context_length - len(trajectory.context_ids(len(trajectory.turns))))

    def _limit(self, trajectory: Trajectory, context_length: int) -> StopReason:
        """Which limit a rollout ran into, if its last or next turn has a context of this length."""
        if self.max_context_length is not None and context_length >= self.max_context_length:
            return "max_context_length"
        used = len(trajectory.completion_ids)
        return "max_completion_length" if used >= self.max_completion_length else "max_turn_length"
