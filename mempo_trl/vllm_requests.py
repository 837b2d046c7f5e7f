"""Requests that a vLLM server accepts."""

from typing import Any


def fit_into_context(client: Any, max_context_length: int) -> None:
    """Make TRL's client ask for no more tokens after a prompt than the server has room for.

    TRL sends all prompts of a turn in one request with one limit, and most versions of vLLM refuse the whole request if
    a prompt and that limit together exceed the model's context. So prompts that have less room are sent on their own.

    Args:
        client: a `VLLMClient`, changed in place.
        max_context_length: tokens that the server takes, prompt and completion together.
    """
    ask = client.generate

    def generate(prompts: list[list[int]], max_tokens: int, n: int = 1, features=None, **kwargs) -> dict[str, Any]:
        if features is not None:
            raise ValueError("Images are not supported.")
        rooms = [min(max_tokens, max_context_length - len(prompt)) for prompt in prompts]
        outputs: dict[str, Any] = {"prompt_ids": prompts}
        for room in sorted(set(rooms), reverse=True):
            rows = [row for row, of_row in enumerate(rooms) if of_row == room]
            answer = ask(prompts=[prompts[row] for row in rows], max_tokens=room, n=n, **kwargs)
            for name in ("completion_ids", "logprobs", "logprob_token_ids"):
                values = answer.get(name)
                if values is None:
                    outputs[name] = None
                    continue
                # The completions of a prompt stand next to each other.
                together = outputs.setdefault(name, [None] * (n * len(prompts)))
                for index, row in enumerate(rows):
                    together[n * row : n * row + n] = values[n * index : n * index + n]
        return outputs

    client.generate = generate
