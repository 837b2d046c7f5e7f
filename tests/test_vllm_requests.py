"""Prompts that have less room than others are asked for on their own, and answered in their own place."""

from types import SimpleNamespace

import pytest

from mempo_trl.vllm_requests import fit_into_context


@pytest.mark.parametrize("scored", [True, False])
def test_every_prompt_gets_its_completions(scored):
    requests = []

    def generate(prompts, max_tokens, n, temperature):
        requests.append((prompts, max_tokens, n, temperature))
        turns = [[*prompt, copy] for prompt in prompts for copy in range(n)]
        scores = [[[-float(i)] for i in turn] for turn in turns] if scored else None
        return {"prompt_ids": prompts, "completion_ids": turns, "logprobs": scores}

    client = SimpleNamespace(generate=generate)
    fit_into_context(client, 10)
    prompts = [[1], [2] * 8, [3] * 2, [4] * 8, [5] * 6]
    output = client.generate(prompts=prompts, features=None, n=2, max_tokens=5, temperature=0.7)
    assert requests == [
        ([[1], [3] * 2], 5, 2, 0.7),
        ([[5] * 6], 4, 2, 0.7),
        ([[2] * 8, [4] * 8], 2, 2, 0.7),
    ]
    assert output["prompt_ids"] == prompts
    turns = [[*prompt, copy] for prompt in prompts for copy in (0, 1)]
    assert output["completion_ids"] == turns
    assert output["logprobs"] == ([[[-float(i)] for i in turn] for turn in turns] if scored else None)
    assert output["logprob_token_ids"] is None
