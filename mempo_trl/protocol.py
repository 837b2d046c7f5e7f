"""What a turn says: the tags, the prompt, parsing, and the tokens of a tagged span.

A rollout answers a question in turns (MemPO, https://huggingface.co/papers/2603.00680):

    turn 1:  <think>…</think><tool_call>{"name": "search", "arguments": {…}}</tool_call>   -> observation
    turn t:  <mem>…</mem><think>…</think><tool_call>…</tool_call>                          -> observation
    turn T:  <mem>…</mem><think>…</think><answer>a ; b</answer>

Text is only ever read from what the policy sampled, never from prompts or observations. Nothing here needs torch.
"""

import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypedDict, cast


if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


MEMORY_TAGS = ("<mem>", "</mem>")
TAG = re.compile(r"<(/?)(mem|think|tool_call|answer)>")
# Sections of one turn in the order in which the protocol wants them. That every turn has a thought, and every turn but
# the first a memory, is a matter of the whole trajectory: see `check_trajectory`.
_SECTION_ORDER = re.compile(r"(mem )?(think )?((tool_call )+|answer )")

DEFAULT_SYSTEM_PROMPT = """\
You answer questions by searching for evidence, over several turns. A question may have several parts.

In every turn after the first, begin with a memory: <mem>…</mem>. Summarise there everything from the earlier turns \
that is needed to answer: facts found so far, what is still missing, what to look up next. Write it so that the \
question could be answered from the question and this memory alone.
Then think: <think>…</think>.
Then act, in exactly one of two ways:
- call a tool: <tool_call>{"name": …, "arguments": {…}}</tool_call>. The result comes with the next turn.
- or, when you know enough, answer: <answer>…</answer>. Write only the answer itself. If the question has several \
parts, separate their answers with " ; ", in the order of the parts.

Write nothing outside these tags."""

NO_MEMORY_SYSTEM_PROMPT = """\
You answer questions by searching for evidence, over several turns. A question may have several parts.

In every turn, think first: <think>…</think>.
Then act, in exactly one of two ways:
- call a tool: <tool_call>{"name": …, "arguments": {…}}</tool_call>. The result comes with the next turn.
- or, when you know enough, answer: <answer>…</answer>. Write only the answer itself. If the question has several \
parts, separate their answers with " ; ", in the order of the parts.

Write nothing outside these tags."""
"""For baselines without a memory."""


class ToolCall(TypedDict):
    """One well-formed tool call."""

    name: str
    arguments: dict[str, Any]


@dataclass
class ParsedTurn:
    """What one turn says.

    Attributes:
        memory: text between the first `<mem>` and the first `</mem>` after it; `None` if there is no such pair.
        thought: text of the first `<think>` section.
        requests: every tool call in order. A string stands for a malformed one: a sentence that says what is wrong.
        answer: text of the last `<answer>` section, stripped. Tags inside a memory or a thought are not actions.
        errors: sentences, one for each breach of the format. Empty for a well-formed turn.
    """

    memory: str | None = None
    thought: str | None = None
    requests: list[ToolCall | str] = field(default_factory=list)
    answer: str | None = None
    errors: list[str] = field(default_factory=list)

    @property
    def tool_calls(self) -> list[ToolCall]:
        """The well-formed tool calls, in order."""
        return [request for request in self.requests if not isinstance(request, str)]


def build_prompt(question: str, system_prompt: str | None = None) -> list[dict[str, str]]:
    """Return the conversation that opens a rollout.

    Args:
        question: the user's question.
        system_prompt: text of the system message, `DEFAULT_SYSTEM_PROMPT` if `None`, no system message if empty.
    """
    system_prompt = DEFAULT_SYSTEM_PROMPT if system_prompt is None else system_prompt
    messages = [{"role": "system", "content": system_prompt}] if system_prompt else []
    return [*messages, {"role": "user", "content": question}]


def clean_text(text: str) -> str:
    """Text that can be encoded: lone surrogates, which JSON can spell and UTF-8 cannot, become question marks."""
    return text.encode("utf-8", "replace").decode("utf-8")


def parse_tool_call(text: str) -> ToolCall | str:
    """Parse the inside of a `<tool_call>` section.

    Args:
        text: a JSON object `{"name": str, "arguments": object}`. Arguments may be missing, or be an object encoded as a
            JSON string, as some models write them.

    Returns:
        The call, or a sentence that says what is wrong with it.
    """
    try:
        call = json.loads(text)
        if isinstance(call, dict) and isinstance(call.get("function"), dict):
            call = call["function"]
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return 'The tool call must be a JSON object {"name": …, "arguments": {…}} whose name is a string.'
        arguments = call.get("arguments")
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
    except (ValueError, RecursionError) as error:
        return f"The tool call is not valid JSON ({error})."
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        return "The arguments of a tool call must be a JSON object."
    return ToolCall(name=call["name"], arguments=arguments)


def parse_turn(text: str) -> ParsedTurn:
    """Parse what the policy wrote in one turn.

    Sections are read from left to right; whatever stands inside one belongs to it, so an `<answer>` in a thought is not
    an answer. A tag without its partner is ordinary text and an error, except that an unclosed `<tool_call>` is a
    malformed request: the policy is told so.

    Args:
        text: the decoded turn, without end-of-turn tokens.

    Returns:
        What was found; never raises.
    """
    turn = ParsedTurn()
    sections: list[str] = []
    thoughts: list[str] = []
    answers: list[str] = []
    outside: list[str] = []
    position = 0
    while match := TAG.search(text, position):
        outside.append(text[position : match.start()])
        closing, name = match.groups()
        end = text.find(f"</{name}>", match.end())
        position = match.end()
        if closing:
            turn.errors.append(f"</{name}> closes nothing.")
        elif end == -1:
            turn.errors.append(f"<{name}> is not closed.")
            if name == "tool_call":
                turn.requests.append("The tool call is not closed: </tool_call> is missing.")
        else:
            body = text[match.end() : end]
            position = end + len(f"</{name}>")
            sections.append(name)
            if f"<{name}>" in body:
                turn.errors.append(f"<{name}> is opened twice.")
            if name == "think":
                thoughts.append(body)
            elif name == "tool_call":
                request = parse_tool_call(body)
                turn.requests.append(request)
                if isinstance(request, str):
                    turn.errors.append(request)
            elif name == "answer":
                answers.append(body.strip())
    outside.append(text[position:])

    # The first closed pair is the memory wherever it stands, so that it is the one whose tokens `find_span` finds.
    start, end = _find_pair(text, *MEMORY_TAGS)
    if start != -1:
        turn.memory = text[start + len(MEMORY_TAGS[0]) : end - len(MEMORY_TAGS[1])]
        if "mem" not in sections:
            turn.errors.append("The memory stands inside another section.")
    turn.thought = thoughts[0] if thoughts else None
    turn.answer = answers[-1] if answers else None
    if any(piece.strip() for piece in outside):
        turn.errors.append("There is text outside the tags.")
    if not _SECTION_ORDER.fullmatch("".join(f"{name} " for name in sections)):
        found = ", ".join(sections) or "none"
        turn.errors.append(
            f"The sections must be a memory, a thought, then tool calls or one answer, but they are: {found}."
        )
    return turn


def without_memory(text: str) -> str:
    """A turn without its memory, which is what a baseline without memories would have written.

    Nor are there tags of a memory elsewhere, for instance in a thought about it.
    """
    start, end = _find_pair(text, *MEMORY_TAGS)
    text = text if start == -1 else text[:start] + text[end:].lstrip()
    for tag in MEMORY_TAGS:
        text = text.replace(tag, "")
    return text


def check_trajectory(texts: list[str]) -> list[str]:
    """Check the format of a whole rollout.

    Args:
        texts: what the policy wrote, one string a turn.

    Returns:
        Sentences, one for each breach of the protocol; empty for a well-formed rollout. Every turn must be well-formed
        and have a thought, every turn after the first must have a memory, and only the last answers.
    """
    errors = []
    for number, text in enumerate(texts, start=1):
        turn = parse_turn(text)
        errors += [f"Turn {number}: {error}" for error in turn.errors]
        if turn.thought is None:
            errors.append(f"Turn {number} has no thought.")
        if number > 1 and turn.memory is None:
            errors.append(f"Turn {number} has no memory.")
        if (turn.answer is not None) != (number == len(texts)):
            errors.append(f"Turn {number} {'does not answer' if turn.answer is None else 'answers too early'}.")
    return errors if texts else ["There is no turn."]


def encode_piece(tokenizer: "PreTrainedTokenizerBase", text: str) -> tuple[list[int], list[tuple[int, int]] | None]:
    """Encode text that stands in the middle of a sequence.

    It is encoded behind the end-of-turn token, which is dropped again: tokenizers of the SentencePiece family put a
    blank before the beginning of a text.

    Args:
        tokenizer: the tokenizer.
        text: the text.

    Returns:
        The ids, and for a fast tokenizer the character positions of each, end exclusive.
    """
    if not text:
        return [], []
    anchor = tokenizer.eos_token or ""
    encoding = tokenizer(anchor + text, add_special_tokens=False, return_offsets_mapping=tokenizer.is_fast)
    ids = list(encoding["input_ids"])
    anchored = bool(anchor) and ids[0] == tokenizer.eos_token_id
    if not anchored:
        encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=tokenizer.is_fast)
        ids = list(encoding["input_ids"])
    if not tokenizer.is_fast:
        return ids[anchored:], None
    shift = len(anchor) if anchored else 0
    return ids[anchored:], [(start - shift, end - shift) for start, end in encoding["offset_mapping"][anchored:]]


def find_span(
    tokenizer: "PreTrainedTokenizerBase", ids: list[int], open_tag: str, close_tag: str
) -> tuple[int, int] | None:
    """Find the tokens of the first closed pair of tags.

    Positions come from decoding growing pieces of `ids`, never from encoding text again, so they are right for any
    tokenizer, also where a tag is split over several tokens or shares one with its neighbours.

    Args:
        tokenizer: the tokenizer that `ids` belong to.
        ids: token ids as they were sampled.
        open_tag: text that opens the span, e.g. `<mem>`.
        close_tag: text that closes it.

    Returns:
        `(start, end)`, token indices with `end` exclusive: the fewest tokens that hold everything from the first
        `open_tag` to the first `close_tag` after it, tags included. `None` if there is no such pair.
    """

    def decode(start: int, end: int) -> str:
        text = tokenizer.decode(ids[start:end], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return cast(str, text)

    if _find_pair(decode(0, len(ids)), open_tag, close_tag)[0] == -1:
        return None
    opened = _first(range(1, len(ids) + 1), lambda end: open_tag in decode(0, end))
    end = _first(range(opened, len(ids) + 1), lambda end: _find_pair(decode(0, end), open_tag, close_tag)[0] != -1)
    # The first start at which the tag is no longer whole, less one.
    start = _first(range(opened + 1), lambda start: open_tag not in decode(start, opened)) - 1
    return start, end


def _find_pair(text: str, open_tag: str, close_tag: str) -> tuple[int, int]:
    """Character positions of the first closed pair, tags included, end exclusive; `(-1, -1)` if there is none."""
    start = text.find(open_tag)
    end = text.find(close_tag, start + len(open_tag)) if start != -1 else -1
    return (start, end + len(close_tag)) if end != -1 else (-1, -1)


def _first(candidates: range, holds) -> int:
    """The first candidate for which `holds`, which is false up to some candidate and true from it on."""
    low, high = 0, len(candidates) - 1
    while low < high:
        middle = (low + high) // 2
        if holds(candidates[middle]):
            high = middle
        else:
            low = middle + 1
    return candidates[low]
