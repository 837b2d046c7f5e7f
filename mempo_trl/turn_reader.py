"""Reading a sampled turn: its text, and tool calls in the model's own format."""

from typing import Any

from transformers import PreTrainedTokenizerBase
from trl.chat_template_utils import add_response_schema, parse_response

from .protocol import TAG, ToolCall


class TurnReader:
    """Reads the token ids of a turn.

    Args:
        tokenizer: the tokenizer that they belong to.
        eos_token_ids: every id that ends a turn.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, eos_token_ids: list[int]):
        self.tokenizer = tokenizer
        # Special tokens carry no text, unless a vocabulary made one of the protocol's tags special.
        self._silent_ids = {
            i for i in (*tokenizer.all_special_ids, *eos_token_ids) if not TAG.search(str(tokenizer.decode([i])))
        }

    def text(self, ids: list[int]) -> str:
        """What a turn says, without end-of-turn and other special tokens."""
        return str(
            self.tokenizer.decode(
                [i for i in ids if i not in self._silent_ids],
                skip_special_tokens=False,
                clean_up_tokenization_spaces=False,
            )
        )

    def native_calls(self, ids: list[int], context: list[int], tools: list[Any]) -> list[ToolCall]:
        """Read tool calls that the model wrote in the format of its own chat template, as TRL does.

        Args:
            ids: the turn.
            context: what it was sampled from.
            tools: what the prompt was rendered with.

        Returns:
            The calls; none if that format is not known, see `add_response_format`.
        """
        if getattr(self.tokenizer, "response_template", None) is None:
            return []
        message = parse_response(self.tokenizer, ids, prefix=context, tools=tools)
        calls = [call.get("function", call) for call in message.get("tool_calls") or []]
        return [ToolCall(name=call["name"], arguments=call["arguments"]) for call in calls]


def add_response_format(tokenizer: PreTrainedTokenizerBase) -> None:
    """Let a tokenizer know how its chat template writes tool calls, where TRL knows that."""
    if getattr(tokenizer, "response_template", None) is None:
        try:
            add_response_schema(tokenizer)
        except ValueError:  # a template that TRL does not know
            pass
