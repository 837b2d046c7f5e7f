"""Rendering observations with the model's chat template, as the token ids that follow a sampled turn."""

import functools
import json
import logging
import re
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

from transformers import PreTrainedTokenizerBase
from transformers.utils import get_json_schema
from trl.chat_template_utils import supports_tool_calling

from .protocol import TAG, encode_piece


logger = logging.getLogger(__name__)

TRUNCATION_MARK = " … [truncated]"

# Stands for the sampled turn when a template is asked what follows it. Plain ASCII letters, so that no template trims,
# escapes or splits it.
_SENTINEL = "MEMPOSAMPLEDTURN"
# Stand for tokens of the chat format that an observation spells out: a number between two code points that Unicode
# keeps from ever being characters.
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
_PLACEHOLDER = re.compile(f"{_OPEN}([0-9]+){_CLOSE}")
# A text of more characters than this for each token of the budget is cut before it is tokenized.
_CHARACTERS_PER_TOKEN = 50

Message = dict[str, Any]
Tool = Callable | dict[str, Any]


def describe_tools(messages: list[Message], tools: Sequence[Tool]) -> list[Message]:
    """The conversation with the tools described in its system message, for whoever shows no tools otherwise."""
    schemas = "\n".join(
        json.dumps(tool if isinstance(tool, dict) else get_json_schema(tool), ensure_ascii=False) for tool in tools
    )
    description = (
        f"You may call these tools:\n<tools>\n{schemas}\n</tools>\n"
        'To call one, write <tool_call>{"name": …, "arguments": {…}}</tool_call>.'
    )
    if messages[0]["role"] == "system":
        return [{**messages[0], "content": f"{messages[0]['content']}\n\n{description}"}, *messages[1:]]
    return [{"role": "system", "content": description}, *messages]


def prompt_ids(
    tokenizer: PreTrainedTokenizerBase,
    renderer: "ObservationRenderer",
    prompt: list[Message],
    tools: Sequence[Tool],
    chat_template_kwargs: dict[str, Any],
) -> list[int]:
    """What the first turn of a rollout sees: the conversation, the tools, the generation prompt."""
    apply = cast(Callable[..., Any], tokenizer.apply_chat_template)
    return list(
        apply(
            renderer.prompt(prompt, tools),
            tools=list(tools) or None,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
            **chat_template_kwargs,
        )
    )


def equal_share(lengths: list[int], budget: int) -> int:
    """The largest length to which all may be cut such that together they do not exceed the budget."""
    limit, left = 0, budget
    for position, length in enumerate(sorted(lengths)):
        limit = left // (len(lengths) - position)
        if length > limit:
            break
        left -= length
    return limit


class ObservationRenderer:
    """Renders what the environment answers, from right after the sampled turn to the next generation prompt.

    Sampled ids are never encoded again: a context is the ids sampled so far, followed by what this class returns. Where
    the template only appends, that equals the template's own rendering of the whole conversation.

    Args:
        tokenizer: the tokenizer, with a chat template.
        eos_token_ids: every id that ends a turn.
        max_length: tokens of observation text in one turn, all tool results together. Longer results are cut, the
            longest first, and end in `TRUNCATION_MARK`.
        chat_template_kwargs: further arguments of `apply_chat_template`.
        tools: what the prompts are rendered with. Some tokenizers have a template of its own for prompts with tools.

    Raises:
        ValueError: if the template can render an observation neither as a tool message nor as a user message.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        eos_token_ids: list[int],
        max_length: int,
        chat_template_kwargs: dict[str, Any] | None = None,
        tools: Sequence[Tool] | None = None,
    ):
        self.tokenizer = tokenizer
        self.eos_token_ids = eos_token_ids
        self.max_length = max_length
        template = tokenizer.get_chat_template(tools=cast(Any, list(tools or [])) or None)
        kwargs: Any = {**(chat_template_kwargs or {}), "chat_template": template}
        self._apply = functools.partial(cast(Callable[..., Any], tokenizer.apply_chat_template), **kwargs)
        # Templates that do not know tools (SmolLM2, Gemma 2, …) get the tools described in the prompt and the results
        # as user messages.
        self.supports_tools = supports_tool_calling(
            SimpleNamespace(chat_template=template, apply_chat_template=self._apply)
        )
        self.supports_system = self._accepts([{"role": "system", "content": "s"}, {"role": "user", "content": "u"}])
        self._end_of_turn = [str(tokenizer.decode([i])) for i in eos_token_ids]
        # Tokens of the chat format: spelled out in an observation, they must not become that token. Runs of blanks,
        # which some vocabularies add, are harmless.
        self._forbidden = sorted((t for t in tokenizer.get_added_vocab() if t.strip()), key=len, reverse=True)
        self._forbidden_pattern = _any_of(self._forbidden)
        special = set(tokenizer.all_special_tokens)
        self._special_pattern = _any_of([t for t in self._forbidden if t in special and not TAG.search(t)])
        self._check_template()

    def prompt(self, messages: list[Message], tools: Sequence[Tool] | None) -> list[Message]:
        """The prompt in a form that the template takes.

        A template that does not render tools gets them described in the system message; one that refuses a system
        message gets that text at the beginning of the first user message.

        Args:
            messages: the prompt. It is not changed.
            tools: functions with type hints and Google-style docstrings, or JSON schemas.
        """
        if tools and not self.supports_tools:
            messages = describe_tools(messages, tools)
        if not self.supports_system and len(messages) > 1 and messages[0]["role"] == "system":
            first = {**messages[1], "content": f"{messages[0]['content']}\n\n{messages[1]['content']}"}
            messages = [first, *messages[2:]]
        return messages

    def messages(self, results: list[tuple[str, str]]) -> list[Message]:
        """The messages that carry the results of one turn, cut to `max_length`.

        Args:
            results: `(tool name, text)`, one for each tool call, in order.
        """
        texts = self._cut([text.replace(_OPEN, "").replace(_CLOSE, "") for _, text in results])
        if self.supports_tools:
            return [
                {"role": "tool", "name": name, "content": text} for (name, _), text in zip(results, texts, strict=True)
            ]
        # One message, since many templates insist on alternating roles.
        return [{"role": "user", "content": "\n\n".join(texts)}]

    def turn_ids(self, text: str) -> list[int]:
        """A turn as a policy would sample it: the ids of its text, and of the end-of-turn token that the template has.

        Special tokens that the text spells out do not become that token, unless they are tags of the protocol.

        Args:
            text: what the turn says.
        """
        hidden: list[str] = []
        text = text.replace(_OPEN, "").replace(_CLOSE, "")
        ids = self._encode(self._hide(text, hidden, self._special_pattern), hidden)
        return [*ids, self._end_of_turn_id]

    @functools.cached_property
    def _end_of_turn_id(self) -> int:
        """The end-of-turn token that the template closes a turn with; the tokenizer's, if it closes none."""
        tail = self.suffix_ids(self.messages([("search", "observation")]), [])
        if tail[:1] and tail[0] in self.eos_token_ids:
            return tail[0]
        return cast(int, self.tokenizer.eos_token_id)

    def suffix_ids(self, messages: list[Message], turn_ids: list[int]) -> list[int]:
        """The ids that follow a sampled turn: its closing tokens if it lacks them, the messages, the next prompt.

        Args:
            messages: as `messages` returns them.
            turn_ids: the sampled turn. If its last token is the one that the template closes a turn with, that token is
                not repeated; if it was cut before an end-of-turn token, the suffix closes it.
        """
        hidden: list[str] = []
        shown = [{**message, "content": self._hide(message["content"], hidden)} for message in messages]
        ids = self._encode(self._text_after_turn(shown), hidden)
        if turn_ids and turn_ids[-1] in self.eos_token_ids and ids[:1] == turn_ids[-1:]:
            ids = ids[1:]
        return ids

    def _text_after_turn(self, messages: list[Message]) -> str:
        """What the template writes after the content of an assistant turn that `messages` follow."""
        question = {"role": "user", "content": "question"}
        try:
            text = self._render([question, {"role": "assistant", "content": _SENTINEL}, *messages])
            if _SENTINEL in text:
                return text.partition(_SENTINEL)[2]
        except Exception as error:  # templates raise whatever they like
            logger.debug("The chat template refuses a tool message after a plain assistant turn: %s", error)
        # Some templates want the call that a tool message answers. Then the turn ends at the first end-of-turn token.
        calls = [
            {"type": "function", "id": f"call{n:05d}", "function": {"name": message.get("name"), "arguments": {}}}
            for n, message in enumerate(messages)
        ]
        answers = [{**message, "tool_call_id": call["id"]} for message, call in zip(messages, calls, strict=True)]
        turn = {"role": "assistant", "content": _SENTINEL, "tool_calls": calls}
        text = self._render([question, turn, *answers]).partition(_SENTINEL)[2]
        ends = [text.find(end) for end in self._end_of_turn if end in text]
        if not ends:
            raise ValueError("The chat template never closes an assistant turn that calls a tool.")
        return text[min(ends) :]

    def _render(self, messages: list[Message]) -> str:
        return cast(str, self._apply(messages, add_generation_prompt=True, tokenize=False))

    def _accepts(self, messages: list[Message]) -> bool:
        try:
            self._render(messages)
        except Exception:
            return False
        return True

    def _hide(self, text: str, hidden: list[str], pattern: re.Pattern | None = None) -> str:
        """Put placeholders where the text spells a token of the chat format, and add these spellings to `hidden`."""

        def hide(match: re.Match) -> str:
            hidden.append(match.group())
            return f"{_OPEN}{len(hidden) - 1}{_CLOSE}"

        return (pattern or self._forbidden_pattern).sub(hide, text)

    def _encode(self, text: str, hidden: list[str]) -> list[int]:
        """Encode a text with placeholders for what is hidden."""
        ids: list[int] = []
        for index, piece in enumerate(_PLACEHOLDER.split(text)):
            if index % 2 == 0:
                ids += encode_piece(self.tokenizer, piece)[0]
                continue
            # The spelling without the token: in the largest pieces that are not one.
            spelling = hidden[int(piece)]
            cuts = [
                (spelling[:n], spelling[n:])
                for n in range(1, len(spelling))
                if not self._forbidden_pattern.search(spelling[:n]) and not self._forbidden_pattern.search(spelling[n:])
            ]
            ids += [i for part in (cuts[0] if cuts else spelling) for i in encode_piece(self.tokenizer, part)[0]]
        return ids

    def _length(self, text: str) -> int:
        """Tokens that a text has as an observation."""
        hidden: list[str] = []
        return len(self._encode(self._hide(text, hidden), hidden))

    def _cut(self, texts: list[str]) -> list[str]:
        """Cut the longest texts until all together have at most `max_length` tokens."""
        most = _CHARACTERS_PER_TOKEN * self.max_length
        lengths = [self._length(text) if len(text) <= most else self.max_length + 1 for text in texts]
        if sum(lengths) <= self.max_length:
            return texts
        limit = equal_share(lengths, self.max_length)
        return [
            self._cut_one(text[:most], limit) if length > limit else text
            for text, length in zip(texts, lengths, strict=True)
        ]

    def _cut_one(self, text: str, limit: int) -> str:
        """The longest start of `text` that has, with the mark, at most `limit` tokens; nothing if not even the mark."""
        kept, tried = 0, len(text)
        while kept < tried:
            middle = (kept + tried + 1) // 2
            if self._length(text[:middle].rstrip() + TRUNCATION_MARK) <= limit:
                kept = middle
            else:
                tried = middle - 1
        cut = (text[:kept].rstrip() + TRUNCATION_MARK).lstrip()
        return cut if self._length(cut) <= limit else ""

    def _check_template(self) -> None:
        """Refuse a template that cannot render an observation, and warn once of one that rewrites earlier turns."""
        turn = '<mem>m</mem>\n<think>t</think>\n<tool_call>\n{"name": "search", "arguments": {}}\n</tool_call>'
        messages = self.messages([("search", "observation")])
        try:
            tail = self._text_after_turn(messages)
        except Exception as error:
            raise ValueError(
                "The chat template cannot render an observation, neither as a tool message nor as a user message "
                f"({error}). Set `processing_class.chat_template` to one that can."
            ) from error
        question = {"role": "user", "content": "question"}
        prompt = self._render([question])
        if prompt.rstrip().endswith("<think>"):
            logger.warning(
                "The chat template opens <think> in the generation prompt, so a turn cannot begin with its memory: "
                "set `chat_template_kwargs` so that it does not (for many models {'enable_thinking': False})."
            )
        try:
            rendered = self._render([question, {"role": "assistant", "content": turn}, *messages])
        except Exception:  # wants structured tool calls: what it makes of a plain turn is not known
            return
        if rendered != prompt + turn + tail:
            logger.warning(
                "The chat template does not keep an earlier turn as it was written (it drops or moves <think> text, or "
                "trims). Rollouts keep every sampled token; whoever runs the model later must build contexts the same "
                "way, by appending, not by rendering the conversation again."
            )


def _any_of(texts: list[str]) -> re.Pattern:
    """Matches the first of these texts that fits, or nothing if there are none."""
    return re.compile("|".join(map(re.escape, texts)) or "(?!)")
