"""Engines that sample token ids: a model of transformers, vLLM in the process, or a server that takes ids.

They run `AgentLoop`, as the trainer does: what a turn sees is what it would see in training, to the token.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from ..agent_settings import AgentSettings
from ..chat_templates import ObservationRenderer, prompt_ids
from ..rollout import AgentLoop, Trajectory
from ..tools import ToolRunner, tool_name
from ..turn_reader import TurnReader, add_response_format
from .base import Episodes, RefusedError, Sampling, in_threads, last_turn
from .episode import Episode, Message, Step


class Sampler(Protocol):
    """Samples a turn for each context.

    Attributes:
        identity: what is sampled from, in words.
        eos_token_ids: ids that end a turn, as the model's generation configuration has them.
        max_context_length: tokens that the model takes, context and turn together; `None` if there is no limit.
        threads: turns that are best sampled at the same time by as many calls from threads; 0 if one call should
            sample many.
    """

    identity: str
    eos_token_ids: list[int]
    max_context_length: int | None
    threads: int

    def __call__(self, contexts: list[list[int]], max_new_tokens: int, seeds: list[int]) -> list[list[int]]:
        """Token ids of one turn for each context, up to and including the end-of-turn token.

        What a context draws depends on its own seed alone.
        """
        ...


class TokenEngine:
    """Runs an agent on a sampler of token ids. See `Engine`.

    Args:
        tokenizer: the model's tokenizer, with a chat template.
        sampler: samples from the model.
        tools: what the agent may call.
        settings: what it is run with.
        sampling: how tokens are drawn.
        batch_size: questions that are run together, where one call of the sampler samples many.
        tool_timeout: seconds that a call of a tool may take, in the main thread; `None` for no limit.
        max_unavailable_turns: turns in a row in which a tool could not be reached, after which the run stops.

    Raises:
        ValueError: if the tokenizer has no chat template, or one that cannot render an observation.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        sampler: Sampler,
        tools: list[Callable],
        settings: AgentSettings,
        sampling: Sampling,
        batch_size: int = 16,
        tool_timeout: float | None = 60.0,
        max_unavailable_turns: int | None = 10,
    ):
        if tokenizer.chat_template is None:
            raise ValueError("The tokenizer has no chat template: set `chat_template`, or take a chat model.")
        if not isinstance(batch_size, int) or batch_size < 1:
            raise ValueError(f"`batch_size={batch_size!r}` is not allowed: it must be a whole number, at least 1.")
        self.identity = sampler.identity
        self.details: dict[str, Any] = {}
        self.tokenizer, self.sampler, self.tools, self.sampling = tokenizer, sampler, tools, sampling
        self.settings, self.batch_size = settings, batch_size
        if tools:
            add_response_format(tokenizer)
        ends = list(settings.eos_token_ids or sampler.eos_token_ids)
        if tokenizer.eos_token_id is not None and tokenizer.eos_token_id not in ends:
            ends.insert(0, tokenizer.eos_token_id)
        if not ends:
            raise ValueError("The tokenizer has no end-of-turn token: set its `eos_token`.")
        sampler.eos_token_ids = ends
        self.renderer = ObservationRenderer(
            tokenizer, ends, settings.max_observation_length, settings.chat_template_kwargs, tools
        )
        reader = TurnReader(tokenizer, ends)
        self._loop = AgentLoop(
            renderer=self.renderer,
            runner=ToolRunner(tool_timeout),
            generate=_no_sampler,
            decode=reader.text,
            eos_token_ids=ends,
            max_turns=settings.max_turns,
            max_turn_length=settings.max_turn_length,
            max_completion_length=settings.completion_length,
            max_context_length=sampler.max_context_length,
            context_turns=settings.context_turns,
            max_unavailable_turns=max_unavailable_turns,
            parse_native_calls=(lambda ids, context, row: reader.native_calls(ids, context, tools)) if tools else None,
        )
        self._tools = {tool_name(tool): tool for tool in tools}

    def _opening(self, prompt: list[Message]) -> list[int]:
        return prompt_ids(self.tokenizer, self.renderer, prompt, self.tools, self.settings.chat_template_kwargs)

    def turns(self, prompt: list[Message]) -> Iterator[Episode]:
        """See `Engine.turns`."""
        return self._turns(prompt, self.sampling.seed)

    def rollout(self, prompts: Sequence[list[Message]], seeds: Sequence[int]) -> Episodes:
        """See `Engine.rollout`."""
        if self.sampler.threads:
            yield from in_threads(
                [
                    functools.partial(last_turn, functools.partial(self._turns, prompt, seed))
                    for prompt, seed in zip(prompts, seeds, strict=True)
                ],
                self.sampler.threads,
            )
            return
        for start in range(0, len(prompts), self.batch_size):
            batch = [self._opening(prompt) for prompt in prompts[start : start + self.batch_size]]
            loop = self._seeded_loop(seeds[start : start + self.batch_size])
            for position, trajectory in enumerate(loop.run(batch, [self._tools] * len(batch)), start):
                yield position, episode(trajectory)

    def _turns(self, prompt: list[Message], seed: int) -> Iterator[Episode]:
        """The growing episode of one question."""
        opening, so_far = self._opening(prompt), Episode()
        try:
            for trajectories in self._seeded_loop([seed]).turns([opening], [self._tools]):
                so_far = episode(trajectories[0])
                yield so_far
        except RefusedError as error:
            so_far.stop_reason, so_far.error = error.stop_reason, str(error)
            yield so_far

    def _seeded_loop(self, seeds: Sequence[int]) -> AgentLoop:
        """A loop in which each rollout draws with its own seed, whatever it is batched with."""
        loop = dataclasses.replace(self._loop)
        turns = 0

        def generate(contexts: list[list[int]], max_new_tokens: int, first: bool) -> tuple[list[list[int]], None]:
            nonlocal turns
            turns += 1
            # Every turn draws anew.
            own = [(seeds[row] + 7919 * turns) % 2**31 for row in loop.sampled_rows]
            return self.sampler(contexts, max_new_tokens, own), None

        loop.generate = generate
        return loop


def _no_sampler(contexts: list[list[int]], max_new_tokens: int, first: bool) -> tuple[list[list[int]], None]:
    raise AssertionError("every run has a sampler of its own")


def episode(trajectory: Trajectory) -> Episode:
    """The episode in a trajectory of token ids."""
    steps = [
        Step(
            text=turn.text,
            prompt_tokens=len(trajectory.context_ids(number)),
            completion_tokens=len(turn.ids),
            observation=[
                {"role": "tool", "name": name, "content": text} for name, text in turn.results if turn.observation
            ],
        )
        for number, turn in enumerate(trajectory.turns)
    ]
    return Episode(
        steps,
        trajectory.stop_reason,
        trajectory.tool_calls,
        trajectory.tool_failures,
        trajectory.unavailable_calls,
        trajectory.malformed_calls,
    )


class TransformersSampler:
    """Samples from a model of transformers, on the devices where it is.

    Args:
        model: the model; it is left in the mode that it is in.
        pad_token_id: what shorter contexts are filled up with.
        sampling: how tokens are drawn.
        identity: what the model is called.
    """

    threads = 0

    def __init__(self, model: Any, pad_token_id: int, sampling: Sampling, identity: str):
        own = model.generation_config.eos_token_id
        self.eos_token_ids = [own] if isinstance(own, int) else list(own or [])
        self.max_context_length = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        self.model, self.pad_token_id, self.sampling, self.identity = model, pad_token_id, sampling, identity

    def __call__(self, contexts: list[list[int]], max_new_tokens: int, seeds: list[int]) -> list[list[int]]:
        import torch
        from transformers import GenerationConfig

        from ..prefix_tree import evaluation_mode

        # Nothing of the checkpoint's own configuration (penalties, …) is taken over: training does not either.
        config = GenerationConfig(
            max_new_tokens=max_new_tokens,
            eos_token_id=self.eos_token_ids,
            pad_token_id=self.pad_token_id,
            do_sample=False,
        )
        draws = [] if self.sampling.temperature == 0 else [_draw(self.sampling, seeds, self.model.device)]
        length = max(map(len, contexts))
        device = self.model.device
        ids = torch.tensor(
            [[self.pad_token_id] * (length - len(context)) + context for context in contexts], device=device
        )
        mask = torch.tensor([[0] * (length - len(context)) + [1] * len(context) for context in contexts], device=device)
        with torch.inference_mode(), evaluation_mode(self.model):
            own, self.model.generation_config = self.model.generation_config, config
            try:
                output = self.model.generate(
                    input_ids=ids, attention_mask=mask, generation_config=config, logits_processor=draws
                )
            finally:
                self.model.generation_config = own
        return [self._up_to_the_end(row) for row in output[:, length:].tolist()]

    def _up_to_the_end(self, ids: list[int]) -> list[int]:
        for position, token in enumerate(ids):
            if token in self.eos_token_ids:
                return ids[: position + 1]
        return ids


def _draw(sampling: Sampling, seeds: list[int], device: Any) -> Callable[[Any, Any], Any]:
    """Scores whose largest is a draw from the distribution, each row's with its own seed.

    Of all -log(E) + score with E from the exponential distribution, the largest is a draw from softmax(score) (Gumbel,
    1954). `generate` itself would draw for all rows of a batch from one stream: what a question draws would depend on
    the questions beside it.
    """
    import torch
    from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    warp = LogitsProcessorList([TemperatureLogitsWarper(float(sampling.temperature))])
    if sampling.top_k:
        warp.append(TopKLogitsWarper(int(sampling.top_k)))
    if sampling.top_p < 1:
        warp.append(TopPLogitsWarper(float(sampling.top_p)))
    generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]

    def draw(ids: Any, scores: Any) -> Any:
        scores = warp(ids, scores.float())
        noise = [torch.empty_like(row).exponential_(generator=own) for row, own in zip(scores, generators, strict=True)]
        return scores - torch.stack(noise).log()

    return draw


class VLLMSampler:
    """Samples from vLLM in this process.

    Args:
        llm: a `vllm.LLM`.
        eos_token_ids: ids that end a turn.
        sampling: how tokens are drawn.
        identity: what the model is called.
    """

    threads = 0

    def __init__(self, llm: Any, eos_token_ids: list[int], sampling: Sampling, identity: str):
        self.llm, self.eos_token_ids, self.sampling, self.identity = llm, eos_token_ids, sampling, identity
        self.max_context_length = llm.llm_engine.model_config.max_model_len

    def __call__(self, contexts: list[list[int]], max_new_tokens: int, seeds: list[int]) -> list[list[int]]:
        from vllm import SamplingParams

        draws = [
            SamplingParams(
                temperature=self.sampling.temperature,
                top_p=self.sampling.top_p,
                top_k=self.sampling.top_k,
                seed=seed if self.sampling.temperature > 0 else None,
                max_tokens=max_new_tokens,
                stop_token_ids=self.eos_token_ids,
                detokenize=False,
            )
            for seed in seeds
        ]
        outputs = self.llm.generate(
            [{"prompt_token_ids": context} for context in contexts], sampling_params=draws, use_tqdm=False
        )
        return [list(output.outputs[0].token_ids) for output in outputs]
