"""Rendering observations with the model's chat template, as the token ids that follow a sampled turn."""

import json
import logging
import re
from collections.abc import Callable
from typing import Any, cast

from transformers import PreTrainedTokenizerBase
from transformers.utils import get_json_schema
from trl.chat_template_utils import supports_tool_calling


logger = logging.getLogger(__name__)

TRUNCATION_MARK = " … [truncated]"

# Stands for the sampled turn when a template is asked what follows it. Plain ASCII letters, so that no template trims,
# escapes or splits it.
_SENTINEL = "MEMPOSAMPLEDTURN"
# Stand for tokens of the chat format that an observation spells out: private-use characters around a number.
_PLACEHOLDER = re.compile("\ue000([0-9]+)\ue001")

Message = dict[str, Any]


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

    Raises:
        ValueError: if the template can render an observation neither as a tool message nor as a user message.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        eos_token_ids: list[int],
        max_length: int,
        chat_template_kwargs: dict[str, Any] | None = None,
    ):
        self.tokenizer = tokenizer
        self.eos_token_ids = eos_token_ids
        self.max_length = max_length
        self.chat_template_kwargs = chat_template_kwargs or {}
        # Templates that do not know tools (SmolLM2, Gemma 2, …) get the tools described in the prompt and the results
        # as user messages.
        self.supports_tools = supports_tool_calling(tokenizer)
        self._end_of_turn = [str(tokenizer.decode([i])) for i in eos_token_ids]
        # Tokens of the chat format: spelled out in an observation, they must not become that token. Runs of blanks,
        # which some vocabularies add, are harmless.
        forbidden = sorted((token for token in tokenizer.get_added_vocab() if token.strip()), key=len, reverse=True)
        self._forbidden = forbidden
        self._forbidden_pattern = re.compile("|".join(map(re.escape, forbidden))) if forbidden else None
        self._check_template()

    def messages(self, results: list[tuple[str, str]]) -> list[Message]:
        """The messages that carry the results of one turn, cut to `max_length`.

        Args:
            results: `(tool name, text)`, one for each tool call, in order.
        """
        texts = self._cut([text for _, text in results])
        if self.supports_tools:
            return [
                {"role": "tool", "name": name, "content": text} for (name, _), text in zip(results, texts, strict=True)
            ]
        # One message, since many templates insist on alternating roles.
        return [{"role": "user", "content": "\n\n".join(texts)}]

    def suffix_ids(self, messages: list[Message], turn_ids: list[int]) -> list[int]:
        """The ids that follow a sampled turn: its closing tokens if it lacks them, the messages, the next prompt.

        Args:
            messages: as `messages` returns them.
            turn_ids: the sampled turn. If its last token is the one that the template closes a turn with, that token is
                not repeated; if it was cut before an end-of-turn token, the suffix closes it.
        """
        safe: list[str] = []

        def hide(match: re.Match) -> str:
            safe.append(match.group())
            return f"\ue000{len(safe) - 1}\ue001"

        if self._forbidden_pattern is not None:
            messages = [
                {**message, "content": self._forbidden_pattern.sub(hide, _PLACEHOLDER.sub("", message["content"]))}
                for message in messages
            ]
        pieces = _PLACEHOLDER.split(self._text_after_turn(messages))
        ids: list[int] = []
        for index, piece in enumerate(pieces):
            ids += self._encode_as_text(safe[int(piece)]) if index % 2 else self._encode(piece)
        if turn_ids and turn_ids[-1] in self.eos_token_ids and ids[:1] == turn_ids[-1:]:
            ids = ids[1:]
        return ids

    def describe_tools(self, messages: list[Message], tools: list[Callable] | None) -> list[Message]:
        """Add the tools to the prompt, for a template that does not render them itself.

        Args:
            messages: the prompt. It is not changed.
            tools: functions with type hints and Google-style docstrings.
        """
        if not tools or self.supports_tools:
            return messages
        schemas = "\n".join(json.dumps(get_json_schema(tool), ensure_ascii=False) for tool in tools)
        description = (
            f"You may call these tools:\n<tools>\n{schemas}\n</tools>\n"
            'To call one, write <tool_call>{"name": …, "arguments": {…}}</tool_call>.'
        )
        if messages[0]["role"] == "system":
            return [{**messages[0], "content": f"{messages[0]['content']}\n\n{description}"}, *messages[1:]]
        return [{"role": "system", "content": description}, *messages]

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
        text = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False, **self.chat_template_kwargs
        )
        return cast(str, text)

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"] if text else []

    def _encode_as_text(self, text: str) -> list[int]:
        """Encode the spelling of an added token without producing that token: in the largest pieces that allow it."""
        for size in range(1, len(text)):
            head, tail = text[:size], text[size:]
            if not any(token in head or token in tail for token in self._forbidden if len(token) > 1):
                return self._encode(head) + self._encode(tail)
        return [i for character in text for i in self._encode(character)]

    def _cut(self, texts: list[str]) -> list[str]:
        """Cut the longest texts until all together have at most `max_length` tokens."""
        lengths = [len(self._encode(text)) for text in texts]
        if sum(lengths) <= self.max_length:
            return texts
        # Every text may be as long as the largest equal share that does not exceed the budget.
        limit, left = 0, self.max_length
        for position, length in enumerate(sorted(lengths)):
            limit = left // (len(lengths) - position)
            if length > limit:
                break
            left -= length
        return [
            self._cut_one(text, limit) if length > limit else text for text, length in zip(texts, lengths, strict=True)
        ]

    def _cut_one(self, text: str, limit: int) -> str:
        """The longest start of `text` that has, with the mark, at most `limit` tokens."""
        if self.tokenizer.is_fast:
            offsets = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
            ends = [end for _, end in offsets]
        else:
            ids = self._encode(text)
            ends = [len(self.tokenizer.decode(ids[: n + 1])) for n in range(limit)]
        for kept in range(min(limit, len(ends)), 0, -1):
            cut = text[: ends[kept - 1]].rstrip() + TRUNCATION_MARK
            if len(self._encode(cut)) <= limit:
                return cut
        return TRUNCATION_MARK.strip()

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
