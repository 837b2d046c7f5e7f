"""Records as a run writes them."""

CALL = '<tool_call>{"name": "search", "arguments": {"query": "q"}}</tool_call>'


def texts(turns, answer):
    """Well-formed texts of this many turns; the last answers."""
    written = [f"<think>t</think>{CALL}"]
    written += [f"<mem>m</mem><think>t</think>{CALL}" for _ in range(turns - 2)]
    last = f"<think>t</think><answer>{answer}</answer>"
    return [last] if turns == 1 else [*written, f"<mem>m</mem>{last}"]


def record(identifier, prediction="Paris", answers=(("Paris",),), sample=0, tokens=((10, 5),), **changes):
    """A well-formed record with a step for each pair (prompt tokens, completion tokens)."""
    steps = [
        {"text": text, "prompt_tokens": prompt, "completion_tokens": completion, "observation": []}
        for text, (prompt, completion) in zip(texts(len(tokens), prediction), tokens, strict=True)
    ]
    return {
        "id": identifier,
        "sample": sample,
        "question": f"What is {identifier}?",
        "answers": [list(accepted) for accepted in answers],
        "prediction": prediction,
        "stop_reason": "answer",
        "steps": steps,
        "tool_calls": len(steps) - 1,
        "tool_failures": 0,
        "unavailable_calls": 0,
        "malformed_calls": 0,
        **changes,
    }
