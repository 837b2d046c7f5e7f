"""`MemPOTrainer`: GRPO with multi-turn rollouts and a memory-level advantage."""

import copy
import dataclasses
import logging
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from accelerate.utils import broadcast_object_list, is_peft_model
from datasets import Dataset
from transformers import AutoProcessor, PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin
from transformers.utils import get_json_schema
from trl.data_utils import is_conversational
from trl.trainer.utils import get_config_model_id, pad

from .advantages import memory_advantages, token_advantages
from .agent_settings import AgentSettings
from .chat_templates import ObservationRenderer
from .data.columns import check_answers, prepare_dataset
from .hub import HubTrainer
from .memory_reward import (
    AnswerTarget,
    MemoryBranches,
    build_answer_target,
    memory_branches,
    memory_rewards,
    score_memories,
)
from .mempo_config import MemPOConfig
from .prefix_tree import Branch, BranchScorer, Form, evaluation_mode
from .protocol import DEFAULT_SYSTEM_PROMPT, MEMORY_TAGS, ToolCall
from .rewards import outcome_reward
from .rollout import STOP_REASONS, AgentLoop, Trajectory
from .tools import ToolRunner, check_tools, tool_name
from .turn_reader import TurnReader, add_response_format
from .vllm_requests import fit_into_context


logger = logging.getLogger(__name__)

# A template that passes TRL's inspection with any tokenizer, see `_uninspected_template`.
_PLAIN_TEMPLATE = (
    "{% for message in messages %}{{ message.role + ': ' + message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.name + ' ' + call.function.arguments | tojson }}"
    "{% endfor %}{{ eos_token }}{% endfor %}"
)


class MemPOTrainer(HubTrainer):
    """
    Trainer for Self-Memory Policy Optimization (MemPO), introduced in [MemPO: Self-Memory Policy Optimization for
    Long-Horizon Agents](https://huggingface.co/papers/2603.00680).

    The policy answers questions over several turns with tools, and opens every turn after the first with a memory,
    `<mem>…</mem>`. Beside GRPO's outcome advantage, the tokens of each memory get an advantage of their own: how much
    more probable the right answer is given the question and this memory alone than given a baseline.

    Example:

    ```python
    >>> from datasets import Dataset
    >>> from mempo_trl import MemPOConfig, MemPOTrainer
    >>> from mempo_trl.search import BM25Index, make_search_tool

    >>> trainer = MemPOTrainer(
    ...     model="Qwen/Qwen2.5-7B-Instruct",
    ...     args=MemPOConfig(output_dir="outputs", num_generations=16, per_device_train_batch_size=16),
    ...     train_dataset=Dataset.from_dict({"question": ["Who wrote Dune?"], "answers": [["Frank Herbert"]]}),
    ...     tools=[make_search_tool(BM25Index.load("index"), k=3)],
    ... )
    >>> trainer.train()
    ```

    Args:
        model (`str` or [`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            Model to be trained, as in [`~trl.GRPOTrainer`]. Text only.
        reward_funcs (`RewardFunc | list[RewardFunc]`, *optional*):
            Outcome rewards, as in [`~trl.GRPOTrainer`]. If not given, and the environment does not bring its own,
            [`mempo_trl.rewards.outcome_reward`]: 1 if the answer matches exactly and the format is right, else 0.
            Functions get each turn's text as it was written, and its `tool_calls` beside it. If one of the rewards is a
            model, there is the text alone.
        args ([`MemPOConfig`], *optional*):
            Configuration.
        train_dataset ([`~datasets.Dataset`] or [`~datasets.IterableDataset`]):
            Rows with `prompt` (a conversation) or `question` (a string, from which the prompt is made), and `answers`:
            `list[str]`, the accepted answers of one objective, or `list[list[str]]`, those of several. Every column
            reaches the reward functions. `answers` may be missing if nothing uses it, that is with
            `memory_coefficient=0` and rewards of your own.
        eval_dataset:
            As in [`~trl.GRPOTrainer`], with the same columns.
        processing_class ([`~transformers.PreTrainedTokenizerBase`], *optional*):
            The tokenizer. Chat templates without tools work as well: then the tools are described in the system
            message, and observations are user messages.
        tools, environment_factory:
            As in [`~trl.GRPOTrainer`]. A tool may carry `.batch(list_of_arguments) -> list_of_results`, which answers
            the calls of all rollouts at once.
        rollout_func:
            Not supported: the agent loop is the rollout.
        reward_processing_classes, callbacks, optimizers, quantization_config, peft_config:
            As in [`~trl.GRPOTrainer`].

    Raises:
        ValueError, TypeError: for arguments and data that cannot be trained on, before anything is generated.
    """

    _tag_names = ["trl", "mempo"]  # noqa: RUF012, as in TRL
    _name = "MemPO"
    _paper = {  # noqa: RUF012
        "title": "MemPO: Self-Memory Policy Optimization for Long-Horizon Agents",
        "id": "2603.00680",
        # docstyle-ignore
        "citation": textwrap.dedent("""\
            @article{mempo2026,
                title        = {{MemPO: Self-Memory Policy Optimization for Long-Horizon Agents}},
                year         = 2026,
                eprint       = {arXiv:2603.00680},
            }"""),
    }

    args: MemPOConfig
    model: PreTrainedModel
    num_generations: int
    num_generations_eval: int
    max_completion_length: int
    chat_template_kwargs: dict[str, Any]

    def __init__(
        self,
        model,
        reward_funcs=None,
        args: MemPOConfig | None = None,
        train_dataset=None,
        eval_dataset=None,
        processing_class: PreTrainedTokenizerBase | None = None,
        reward_processing_classes=None,
        callbacks=None,
        optimizers=(None, None),
        quantization_config=None,
        peft_config=None,
        tools: list[Callable] | None = None,
        rollout_func=None,
        environment_factory=None,
    ):
        if args is None:
            name = model if isinstance(model, str) else get_config_model_id(model.config)
            args = MemPOConfig(f"{name.split('/')[-1]}-MemPO")
        if not isinstance(args, MemPOConfig):
            raise TypeError(f"`args` must be a `MemPOConfig`, but it is a `{type(args).__name__}`.")
        if rollout_func is not None:
            raise ValueError(
                "`rollout_func` is not supported: the agent loop is the rollout. Pass `tools` or `environment_factory` "
                "to shape it."
            )
        if processing_class is None:
            processing_class = _load_tokenizer(model, args)
        if isinstance(processing_class, ProcessorMixin):
            raise ValueError(
                "Images are not supported: pass the tokenizer of a text model as `processing_class`, not a "
                f"`{type(processing_class).__name__}`."
            )
        if processing_class.eos_token_id is None:
            raise ValueError("`processing_class` has no end-of-turn token: set its `eos_token`.")
        check_tools(tools)
        _check_sampling(args)
        if reward_funcs is None and not _brings_reward(environment_factory):
            reward_funcs = outcome_reward

        rewards = reward_funcs if isinstance(reward_funcs, list) else [reward_funcs]
        self._memory_coefficient = args.memory_coefficient
        if train_dataset is None and environment_factory is not None and args.memory_coefficient > 0:
            logger.warning(
                "The environment owns the data, so the right answers are not known and memories cannot be scored: "
                "training goes on with outcome advantages alone."
            )
            self._memory_coefficient = 0.0
        self._needs_answers = self._memory_coefficient > 0 or any(
            getattr(reward, "__module__", None) == outcome_reward.__module__ for reward in rewards
        )
        train_dataset, eval_dataset = (
            prepare_dataset(
                dataset,
                name,
                args.system_prompt,
                needs_answers=self._needs_answers,
                needs_prompt=environment_factory is None,
            )
            for name, dataset in (("train_dataset", train_dataset), ("eval_dataset", eval_dataset))
        )

        with _uninspected_template(processing_class, tools or environment_factory):
            super().__init__(
                model=model,
                reward_funcs=reward_funcs,
                args=args,
                train_dataset=train_dataset,
                eval_dataset=eval_dataset,
                processing_class=processing_class,
                reward_processing_classes=reward_processing_classes,
                callbacks=callbacks,
                optimizers=optimizers,
                quantization_config=quantization_config,
                peft_config=peft_config,
                tools=tools,
                environment_factory=environment_factory,
            )
        if args.context_turns is not None and self.aux_loss_enabled:
            raise ValueError(
                "`context_turns` does not work with the load-balancing loss of a mixture of experts: set "
                "`router_aux_loss_coef=0`, or leave `context_turns` at None."
            )
        if (
            args.context_turns is not None
            and args.max_tokens_per_forward is not None
            and args.gradient_checkpointing
            and cast(dict[str, Any], args.gradient_checkpointing_kwargs or {}).get("use_reentrant")
            and args.distributed_state is not None
            and args.distributed_state.use_distributed
        ):
            raise ValueError(
                "`max_tokens_per_forward` would make several forwards of one backward, which reentrant gradient "
                "checkpointing cannot do over several processes (with adapters, DeepSpeed ZeRO-3 needs it reentrant): "
                "leave it at None and lower `per_device_train_batch_size`, or set `gradient_checkpointing=False`."
            )
        self._trajectories: list[Trajectory] = []
        self._segments: torch.Tensor | None = None  # of the rows that log-probabilities are being taken of
        self._memory_pass: _MemoryPass | None = None  # of the batch that is being generated
        self._generation_seconds = 0.0
        self._warned_of_long_prompts = False
        if self.use_vllm:
            # vLLM knows the end tokens of the checkpoint that it loaded, which need not be those of the tokenizer given
            # here. The limit of a turn is set turn by turn.
            own = {
                name: value for name, value in self.vllm_generation.generation_kwargs.items() if name != "max_tokens"
            }
            ends = [*own.get("stop_token_ids", []), *self.eos_token_ids]
            self.vllm_generation.generation_kwargs = {**own, "stop_token_ids": list(dict.fromkeys(ends))}
        self._loop = self._make_loop()
        if self.use_vllm and self.vllm_mode == "server" and self.accelerator.is_main_process:
            length = self._loop.max_context_length
            if length is not None:
                fit_into_context(self.vllm_generation.vllm_client, length)
        self._scorer = BranchScorer(
            self._tokenizer.pad_token_id,
            self.accelerator.device,
            unwrap=self._core_model,
            form=cast(Form, args.prefix_tree_form),
            max_tokens=args.max_tokens_per_forward,
            max_over_processes=self._max_over_processes,
            temperature=self.temperature,
        )

    def _make_loop(self) -> AgentLoop:
        args = self.args
        renderer = None
        if self._tokenizer.chat_template is not None:
            renderer = ObservationRenderer(
                self._tokenizer, self.eos_token_ids, args.max_observation_length, self.chat_template_kwargs, self.tools
            )
        self._reader = TurnReader(self._tokenizer, self.eos_token_ids)
        turns = args.max_turns
        if args.max_tool_calling_iterations is not None:
            turns = min(turns, args.max_tool_calling_iterations + 1)
        return AgentLoop(
            renderer=renderer,
            runner=ToolRunner(args.tool_timeout, getattr(self, "async_loop", None)),
            generate=self._generate_turn,
            decode=self._reader.text,
            eos_token_ids=self.eos_token_ids,
            max_turns=turns,
            max_turn_length=args.max_turn_length,
            max_completion_length=self.max_completion_length,
            max_context_length=self._max_context_length(),
            context_turns=args.context_turns,
            max_malformed_turns=args.max_malformed_turns,
            max_unavailable_turns=args.max_unavailable_turns,
            max_over_processes=self._max_over_processes,
            equal_sizes=self.use_vllm and (self.vllm_mode == "server" or self.vllm_tensor_parallel_size > 1),
            parse_native_calls=self._parse_native_calls if self.tools else None,
            how_to_go_on="go on with `train(resume_from_checkpoint=True)`",
        )

    # --- Rollouts -----------------------------------------------------------------------------------------------

    def _tokenize_prompts(self, prompts: list):
        if self._loop.renderer is not None and not isinstance(prompts[0], str):
            prompts = [
                self._loop.renderer.prompt(prompt, tools)
                for prompt, tools in zip(prompts, self._tools_of_rows(len(prompts)), strict=True)
            ]
        return super()._tokenize_prompts(prompts)

    def _tools_of_rows(self, rows: int) -> list[list[Any]]:
        """The tools that each row's prompt was rendered with."""
        if self.environment_factories is None:
            return [self.tools] * rows
        return [self._env_tools[name] for name in self._batch_environments]

    def _generate(self, prompts: list):
        prompt_ids, images, _ = self._tokenize_prompts(prompts)
        if images is not None:
            raise ValueError("Images are not supported: remove image content from the prompts.")
        conversational = is_conversational({"prompt": prompts[0]})
        tools: list[dict[str, Callable]] = [{} for _ in prompts]
        if self.tools:
            tools = [
                sync | coroutines
                for sync, coroutines in zip(self._sync_tool_dicts, self._async_tool_dicts, strict=True)
            ]
        # Nothing can be appended to a prompt that is plain text: it gets a single turn.
        loop = self._loop if conversational else dataclasses.replace(self._loop, renderer=None)
        started, self._generation_seconds = time.perf_counter(), 0.0
        self._trajectories = loop.run(prompt_ids, tools)
        self._mode_metrics["time/generation"].append(self._generation_seconds)
        self._mode_metrics["time/tools"].append(time.perf_counter() - started - self._generation_seconds)

        completion_ids = [t.completion_ids for t in self._trajectories]
        tool_mask = [t.tool_mask for t in self._trajectories]
        logprobs = None
        if self.use_vllm or any(turn.logprobs is not None for t in self._trajectories for turn in t.turns):
            logprobs = [t.logprobs for t in self._trajectories]
        for row, ids in enumerate(completion_ids):
            if not ids:  # no room for a single token: TRL needs one, that counts for nothing
                completion_ids[row], tool_mask[row] = [self._tokenizer.eos_token_id], [0]
                if logprobs is not None:
                    logprobs[row] = [0.0]
        completions: list[Any]
        if conversational:
            completions = [t.messages or [{"role": "assistant", "content": ""}] for t in self._trajectories]
        else:
            completions = ["".join(turn.text for turn in t.turns) for t in self._trajectories]
        if self.args.context_turns is not None:
            self._segments = pad(
                [torch.tensor(t.segments or [-1], device=self.accelerator.device) for t in self._trajectories],
                padding_value=-1,
                padding_side="right",
                pad_to_multiple_of=cast("int | None", self.pad_to_multiple_of),
            )
        self._warn_of_long_prompts(prompt_ids)
        self._log_rollouts(prompt_ids, completion_ids, tool_mask)
        return prompt_ids, completion_ids, tool_mask, completions, logprobs, {}, None, []

    def run_agent(self, prompts: list[list[dict[str, Any]]], temperature: float | None = None) -> list[Trajectory]:
        """Roll out prompts with the policy as it is, apart from training: nothing is rewarded, logged or counted.

        Every process must call this, each with as many prompts.

        Args:
            prompts: conversations that open a rollout, see [`mempo_trl.protocol.build_prompt`].
            temperature: sampling temperature; 0 takes the most probable token each time, `None` is that of training.

        Returns:
            One trajectory for each prompt, in order.

        Raises:
            ValueError: if the environments of `environment_factory` own the questions.
            RuntimeError: if a tool could not be reached again and again.
        """
        if self.environment_factories is not None:
            raise ValueError("With `environment_factory`, questions come from the environment: use `evaluate`.")
        assert self._loop.renderer is not None
        prompt_ids, _, _ = self._tokenize_prompts(prompts)
        tools = {tool_name(tool): tool for tool in self.tools or []}
        loop = dataclasses.replace(
            self._loop, generate=lambda contexts, length, first: self._generate_turn(contexts, length, False)
        )
        # What training draws next must not depend on what is drawn here.
        device = self.accelerator.device
        own_draws = torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])
        with own_draws, evaluation_mode(self.model), self._sampling_at(temperature):
            return loop.run(prompt_ids, [tools] * len(prompts))

    @contextmanager
    def _sampling_at(self, temperature: float | None) -> Iterator[None]:
        """Sample at another temperature in the body."""
        if temperature is None:
            yield
            return
        if self.use_vllm:
            own, self.vllm_generation.temperature = self.vllm_generation.temperature, temperature
            try:
                yield
            finally:
                self.vllm_generation.temperature = own
            return
        config, kwargs = self.generation_config, self.generation_kwargs
        changes: dict[str, Any] = {"do_sample": temperature > 0, "temperature": temperature or None}
        if temperature == 0:
            changes |= {"top_p": None, "top_k": None, "min_p": None}
        self.generation_kwargs = {**kwargs, **changes}
        self.generation_config = copy.deepcopy(config)
        self.generation_config.update(**changes)
        try:
            yield
        finally:
            self.generation_config, self.generation_kwargs = config, kwargs

    def _warn_of_long_prompts(self, prompt_ids: list[list[int]]) -> None:
        limit = self._loop.max_context_length
        longest = max(map(len, prompt_ids))
        if limit is not None and longest >= limit and not self._warned_of_long_prompts:
            self._warned_of_long_prompts = True
            logger.warning(
                "A prompt has %d tokens, but the model's context holds %d: the rollouts of such questions are empty. "
                "Shorten the prompts, or remove those questions from the data. This is said once.",
                longest,
                limit,
            )

    def _generate_turn(self, contexts: list[list[int]], max_new_tokens: int, first: bool):
        """Sample one turn after each context, through whatever engine TRL was told to use."""
        own: Any = self.args.generation_kwargs or {}
        limit = own.get("max_tokens" if self.use_vllm else "max_new_tokens")
        max_new_tokens = max_new_tokens if limit is None else min(max_new_tokens, limit)
        if self.use_vllm:
            self.vllm_generation.max_completion_length = max_new_tokens
        else:
            self.generation_config.max_new_tokens = max_new_tokens
            self.generation_kwargs["max_new_tokens"] = max_new_tokens
        mode_generations = self.num_generations if self.model.training else self.num_generations_eval
        # An environment may have told each rollout of a question something else.
        shared = first and self.environment_factories is None
        started = time.perf_counter()
        turns = self._generate_single_turn(contexts, None, {}, mode_generations if shared else 1)
        self._generation_seconds += time.perf_counter() - started
        return turns

    def _parse_native_calls(self, ids: list[int], context: list[int], row: int) -> list[ToolCall]:
        return self._reader.native_calls(ids, context, self._tools_of_rows(row + 1)[row])

    def _max_context_length(self) -> int | None:
        own = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        if not self.use_vllm:
            return own
        # vLLM's limit is what it refuses prompts by. It knows which rotary positions reach beyond the model's own.
        if self.vllm_mode == "colocate":
            return self.vllm_generation.llm.llm_engine.model_config.max_model_len
        served: list[Any] = [None]
        if self.accelerator.is_main_process:  # the only one that is connected to the server
            served = [self.vllm_generation.vllm_client.get_server_info()["model_config"].get("max_model_len")]
        lengths = [broadcast_object_list(served)[0] or own, self.args.vllm_max_model_length]
        return min((length for length in lengths if length is not None), default=None)

    def _max_over_processes(self, value: int) -> int:
        return int(self.accelerator.gather(torch.tensor([value], device=self.accelerator.device)).max())

    # --- Outcome rewards ----------------------------------------------------------------------------------------

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        # Rewards written for `GRPOTrainer` look for `tool_calls`. A reward model's chat template would write them a
        # second time, and the table of logged completions cannot hold arguments of several types: neither gets them.
        if self.tools and not any(isinstance(reward, torch.nn.Module) for reward in self.reward_funcs):
            completions = [
                completion if isinstance(completion, str) else trajectory.messages_with_calls or completion
                for trajectory, completion in zip(self._trajectories, completions, strict=True)
            ]
        return super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)

    # --- Memory rewards and advantages --------------------------------------------------------------------------

    def _generate_and_score_completions(self, inputs):
        if self._needs_answers:
            for example in inputs:
                check_answers(example.get("answers"), "this batch")
        if self._memory_coefficient > 0:
            preamble = self.args.answer_preamble
            targets = [build_answer_target(self._tokenizer, example["answers"], preamble) for example in inputs]
            self._memory_pass = _MemoryPass(targets)
        try:
            with self._using_segments(None):
                output = super()._generate_and_score_completions(inputs)
                if self._segments is not None:
                    output["segments"] = self._segments
            if self._memory_pass is not None:
                started = time.perf_counter()
                output["advantages"] = self._add_memory_advantages(inputs, output)
                seconds = self._memory_pass.seconds + time.perf_counter() - started
                self._mode_metrics["time/memory"].append(seconds)
        finally:
            self._memory_pass = None
        return output

    def _add_memory_advantages(self, inputs, output) -> torch.Tensor:
        """Turn the outcome advantages, shape (rows,), into token-level ones, shape (rows, completion tokens)."""
        memory_pass = self._memory_pass
        assert memory_pass is not None
        completion_ids = output["completion_ids"]
        if memory_pass.logps is None:
            trees = self._lay_out_memories(memory_pass)
            with evaluation_mode(self.model), self.accelerator.autocast():
                memory_pass.logps = self._scorer.unit_logps(self.model, trees)
        scored = memory_pass.scored
        p_memory, p_baseline = self._probabilities(scored, memory_pass.logps)
        rewards = memory_rewards(p_memory, None if self.args.memory_baseline == "none" else p_baseline)
        turn_ids = torch.full_like(completion_ids, -1)
        for row, memories in enumerate(scored):
            for memory in memories:
                turn_ids[row, slice(*memory.span)] = memory.turn

        # A question's rollouts may be spread over several processes: pool them all, then take this one's rows.
        all_rewards = self.accelerator.gather(rewards)
        group_size = self.num_generations if self.model.training else self.num_generations_eval
        groups = torch.arange(len(all_rewards), device=all_rewards.device) // group_size
        floor = cast(float, self.args.memory_std_floor)
        all_advantages = memory_advantages(all_rewards, groups, self.args.memory_scale, floor)
        first = self.accelerator.process_index * len(inputs)
        advantages = all_advantages[first : first + len(inputs)]
        self._log_memories(all_rewards, all_advantages, groups, p_memory, p_baseline, scored)
        return token_advantages(output["advantages"], advantages, turn_ids, self._memory_coefficient)

    def _room_before(self, target: AnswerTarget) -> int | None:
        """Tokens that a context may have before an answer target."""
        length = self._loop.max_context_length
        return None if length is None else max(length - len(target.ids), 1)

    def _lay_out_memories(self, memory_pass: "_MemoryPass") -> list[list[Branch]]:
        """Find the memories of the rollouts; for each rollout, the target after each memory, then after each baseline.

        A rollout's sequences are one prefix tree, hence in one forward.
        """
        memory_pass.scored = [
            memory_branches(self._tokenizer, trajectory, self.args.memory_baseline, self._room_before(target))
            for trajectory, target in zip(self._trajectories, memory_pass.targets, strict=True)
        ]
        return [
            [target.after(memory.memory) for memory in memories]
            + [target.after(memory.baseline) for memory in memories if memory.baseline is not None]
            for target, memories in zip(memory_pass.targets, memory_pass.scored, strict=True)
        ]

    def _probabilities(
        self, scored: list[list[MemoryBranches]], logps: list[list[torch.Tensor]]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """P of all memories and of their baselines, shape (rows, turns) each, NaN where there is none."""
        p_memory = torch.full((len(scored), self.args.max_turns), torch.nan, device=self.accelerator.device)
        p_baseline = p_memory.clone()
        for row, memories in enumerate(scored):
            if not memories:
                continue
            turns = [memory.turn for memory in memories]
            table = torch.stack(logps[row])  # (memories and baselines, gold tokens)
            after_baseline = table[len(memories) :] if len(table) > len(memories) else None
            memory, baseline = score_memories(
                table[: len(memories)],
                after_baseline,
                torch.ones(table.size(1), dtype=torch.bool, device=table.device),
                self.args.memory_filter,
                self.args.memory_filter_threshold,
            )
            p_memory[row, turns] = memory
            if baseline is not None:
                p_baseline[row, turns] = baseline
        return p_memory, p_baseline

    def _policy_and_memories(self, memory_pass: "_MemoryPass", shape: tuple[int, int]) -> torch.Tensor:
        """Score the memories in the forwards that TRL's `old_per_token_logps`, shape (rows, tokens), need anyway.

        A rollout and the sequences that judge its memories are one prefix tree. As those are, the rollout is scored
        without dropout, as it was sampled.
        """
        started = time.perf_counter()
        memories = self._lay_out_memories(memory_pass)
        policy = [self._policy_branches(trajectory) for trajectory in self._trajectories]
        trees = [branches + tree for (branches, _), tree in zip(policy, memories, strict=True)]
        with evaluation_mode(self.model), self.accelerator.autocast():
            logps, _, _ = self._scorer.logps_and_entropies(self.model, trees)
        old = torch.zeros(shape, device=self.accelerator.device)
        memory_pass.logps = []
        for row, (branches, columns) in enumerate(policy):
            if branches:
                old[row, columns] = torch.cat(logps[row][: len(branches)]).float()
            memory_pass.logps.append(logps[row][len(branches) :])
        memory_pass.seconds = time.perf_counter() - started
        return old

    def _policy_branches(self, trajectory: Trajectory) -> tuple[list[Branch], list[int]]:
        """The branches that score what a rollout sampled, and the columns of their tokens in the completion."""
        prompt, completion = trajectory.prompt_ids, trajectory.completion_ids
        if self.args.context_turns is not None:
            return turn_branches(prompt, completion, trajectory.segments, self.args.context_turns)
        if not completion:
            return [], []
        return [Branch(prompt + completion, len(prompt))], list(range(len(completion)))

    def _is_policy(self, model) -> bool:
        """Whether a model is the one being trained, and not the reference that its adapters are switched off for."""
        if model is not self.model:
            return False
        core = self.accelerator.unwrap_model(model)
        if not is_peft_model(core):
            return True
        status = core.get_model_status()
        return status.enabled is True and "ref" not in status.active_adapters

    # --- Log-probabilities --------------------------------------------------------------------------------------

    def _get_per_token_logps_and_entropies(
        self,
        model,
        input_ids,
        attention_mask,
        logits_to_keep,
        batch_size=None,
        compute_entropy=False,
        compute_aux_loss=False,
        **kwargs,
    ):
        if (
            self._memory_pass is not None
            and self._memory_pass.logps is None
            and self._is_policy(model)
            and self._scorer.mixes_temperatures(model)
        ):
            return self._policy_and_memories(self._memory_pass, (len(input_ids), logits_to_keep)), None, None
        if self._segments is None:
            return super()._get_per_token_logps_and_entropies(
                model,
                input_ids,
                attention_mask,
                logits_to_keep,
                batch_size,
                compute_entropy,
                compute_aux_loss,
                **kwargs,
            )
        prompts = [
            ids[mask.bool()].tolist()
            for ids, mask in zip(input_ids[:, :-logits_to_keep], attention_mask[:, :-logits_to_keep], strict=True)
        ]
        completions = input_ids[:, -logits_to_keep:].tolist()
        batch_size = batch_size or len(prompts)
        chunks = []
        for start in range(0, len(prompts), batch_size):
            rows = slice(start, start + batch_size)
            chunks.append(self._windowed_logps(model, prompts[rows], completions[rows], self._segments[rows]))
        logps, entropies = (torch.cat(parts) for parts in zip(*chunks, strict=True))
        return logps, entropies if compute_entropy else None, None

    def _windowed_logps(
        self, model, prompts: list[list[int]], completions: list[list[int]], segments: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities and entropies of sampled tokens under what their turn saw, 0 elsewhere, (rows, tokens)."""
        trees, rows, columns = [], [], []
        for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
            branches, sampled = turn_branches(
                prompt, completion, segments[row].tolist(), cast(int, self.args.context_turns)
            )
            trees.append(branches)
            rows += [row] * len(sampled)
            columns += sampled
        with self.accelerator.autocast():
            logps, entropies, zero = self._scorer.logps_and_entropies(model, trees)
        index = (torch.tensor(rows, device=zero.device), torch.tensor(columns, device=zero.device))
        empty = torch.zeros(segments.shape, device=zero.device) + zero

        def spread(values: list[list[torch.Tensor]]) -> torch.Tensor:
            parts = [part for branches in values for part in branches]
            return empty.index_put(index, torch.cat(parts)) if parts else empty

        return spread(logps), spread(entropies)

    @contextmanager
    def _using_segments(self, segments: torch.Tensor | None) -> Iterator[None]:
        self._segments = segments
        try:
            yield
        finally:
            self._segments = None

    def _compute_loss(self, model, inputs):
        with self._using_segments(inputs.get("segments")):
            return super()._compute_loss(model, inputs)

    def _core_model(self, model):
        """The causal language model inside of a wrapped one."""
        model = self.accelerator.unwrap_model(model)
        return model.get_base_model() if is_peft_model(model) else model

    # --- Inference ----------------------------------------------------------------------------------------------------

    def _agent_settings(self) -> AgentSettings:
        system_prompt = self.args.system_prompt
        if isinstance(self.train_dataset, Dataset) and "prompt" in self.train_dataset.column_names:
            prompt = self.train_dataset[0]["prompt"]
            has_one = not isinstance(prompt, str) and prompt and prompt[0]["role"] == "system"
            system_prompt = prompt[0]["content"] if has_one else ""
        return AgentSettings(
            eos_token_ids=list(self.eos_token_ids),
            max_turns=self._loop.max_turns,
            max_turn_length=self.args.max_turn_length,
            max_observation_length=self.args.max_observation_length,
            max_completion_length=self.max_completion_length,
            context_turns=self.args.context_turns,
            system_prompt=DEFAULT_SYSTEM_PROMPT if system_prompt is None else system_prompt,
            temperature=self.temperature,
            chat_template_kwargs=self.chat_template_kwargs,
            tools=[get_json_schema(tool) for tool in self.tools or []],
        )

    # --- Metrics ------------------------------------------------------------------------------------------------

    @property
    def _mode_metrics(self) -> dict[str, list[float]]:
        """The metrics of training, or of evaluation, whichever goes on."""
        return self._metrics["train" if self.model.training else "eval"]

    def _log_rollouts(self, prompt_ids, completion_ids, tool_mask) -> None:
        """Log lengths, ends, turns and tool calls, under TRL's names where it has one."""
        metrics = self._mode_metrics
        last = [*self.eos_token_ids, self._tokenizer.pad_token_id]
        rows = [
            [
                len(prompt),
                sum(mask),
                ids[-1] not in last,
                len(t.turns),
                t.tool_calls,
                t.tool_failures,
                t.unavailable_calls,
                t.malformed_calls,
                sum(len(turn.observation_ids) for turn in t.turns),
                *t.token_counts(),
                *(t.stop_reason == reason for reason in STOP_REASONS),
            ]
            for prompt, ids, mask, t in zip(prompt_ids, completion_ids, tool_mask, self._trajectories, strict=True)
        ]
        table = self.accelerator.gather(torch.tensor(rows, dtype=torch.float32, device=self.accelerator.device))
        # Fail clearly if the generation backend returned no completions.
        if table.numel() == 0:
            raise RuntimeError("No completions were generated: the batch is empty.")
        prompts, lengths, clipped, turns, calls, failed, unavailable, malformed, observed, *others = table.unbind(1)
        total, peak, full, *stops = others
        if self.model.training:
            self.state.num_input_tokens_seen += int((prompts + lengths).sum())
        metrics["num_tokens"] = [self.state.num_input_tokens_seen]

        ended = lengths[clipped == 0]
        ended = ended if len(ended) else torch.zeros(1)
        for name, values in (("", lengths), ("terminated_", ended)):
            metrics[f"completions/mean_{name}length"].append(values.mean().item())
            metrics[f"completions/min_{name}length"].append(values.min().item())
            metrics[f"completions/max_{name}length"].append(values.max().item())
        metrics["completions/clipped_ratio"].append(clipped.mean().item())
        metrics["turns/mean"].append(turns.mean().item())
        metrics["turns/max"].append(turns.max().item())
        metrics["tokens/total"].append(total.mean().item())
        metrics["tokens/peak"].append(peak.mean().item())
        metrics["tokens/full_context"].append(full.mean().item())
        for reason, share in zip(STOP_REASONS, stops, strict=True):
            metrics[f"stop/{reason}"].append(share.mean().item())
        if self.tools:
            metrics["observations/mean_length"].append(observed.mean().item())
            metrics["tools/call_frequency"].append(calls.mean().item())
            for name, values in (("failure", failed), ("unavailable", unavailable), ("malformed", malformed)):
                metrics[f"tools/{name}_frequency"].append((values.sum() / calls.sum().clamp(min=1)).item())

    def _log_memories(self, rewards, advantages, groups, p_memory, p_baseline, scored) -> None:
        """Log how much the memories of all processes tell."""
        metrics = self._mode_metrics
        lengths = rewards.new_full(p_memory.shape, torch.nan)
        for row, branches in enumerate(scored):
            for branch in branches:
                lengths[row, branch.turn] = branch.span[1] - branch.span[0]
        truncated = torch.tensor(
            [any(turn.cut_inside(MEMORY_TAGS) for turn in t.turns) for t in self._trajectories],
            dtype=torch.float32,
            device=rewards.device,
        )
        for name, values in (
            ("memory/reward", rewards),
            ("memory/probability", self.accelerator.gather(p_memory)),
            ("memory/baseline_probability", self.accelerator.gather(p_baseline)),
            ("memory/length", self.accelerator.gather(lengths)),
        ):
            metrics[name].append(values.nanmean().item())
        metrics["memory/per_rollout"].append((~rewards.isnan()).sum(1).float().mean().item())
        metrics["memory/truncated"].append(self.accelerator.gather(truncated).mean().item())
        # Questions whose memories are all alike teach nothing about memory.
        silent = [not bool(advantages[groups == group].any()) for group in groups.unique()]
        metrics["memory/frac_zero_std"].append(sum(silent) / len(silent))


@dataclasses.dataclass
class _MemoryPass:
    """How the memories of a batch are scored.

    Attributes:
        targets: for each rollout, the answer that its memories should make probable.
        scored: for each rollout, its memories.
        logps: for each rollout, log-probabilities of the gold's tokens after each memory, then after each baseline;
            `None` as long as nothing has been scored.
        seconds: what the forwards took, if they scored the policy's tokens as well.
    """

    targets: list[AnswerTarget]
    scored: list[list[MemoryBranches]] = dataclasses.field(default_factory=list)
    logps: list[list[torch.Tensor]] | None = None
    seconds: float = 0.0


def turn_branches(
    prompt: list[int], completion: list[int], segments: list[int], context_turns: int
) -> tuple[list[Branch], list[int]]:
    """Cut a row into its turns, each with what it saw.

    Args:
        prompt: token ids.
        completion: token ids, padding included.
        segments: for each completion token 2t if turn t sampled it, 2t + 1 if it stands between turn t and the next, −1
            for padding.
        context_turns: earlier turns that a turn sees beside the prompt.

    Returns:
        One branch for each turn, its sampled tokens scored, and the columns of all these tokens in order.
    """
    last = max(segments, default=-1)
    starts = [segments.index(segment) for segment in range(0, last + 1, 2)]
    branches: list[Branch] = []
    columns: list[int] = []
    for turn, start in enumerate(starts):
        seen = starts[max(turn - context_turns, 0)]
        length = segments.count(2 * turn)
        context = prompt + completion[seen:start]
        branches.append(Branch(context + completion[start : start + length], len(context)))
        columns += range(start, start + length)
    return branches, columns


def _load_tokenizer(model, args: MemPOConfig):
    """Load what TRL would load, before TRL does, so that it can be looked at."""
    kwargs: Any = args.model_init_kwargs or {}
    return AutoProcessor.from_pretrained(
        model if isinstance(model, str) else get_config_model_id(model.config),
        revision=kwargs.get("revision") if isinstance(model, str) else None,
        truncation_side="left",
        padding_side="left",
        trust_remote_code=kwargs.get("trust_remote_code", args.trust_remote_code),
    )


def _check_sampling(args: MemPOConfig) -> None:
    """Raise `ValueError` if vLLM is told to return anything but one turn, with the log-probabilities of its tokens."""
    own: Any = (args.use_vllm and args.generation_kwargs) or {}
    for name, value in (("n", 1), ("logprobs", 0)):
        if own.get(name, value) != value:
            raise ValueError(
                f"`generation_kwargs={{{name!r}: {own[name]!r}}}` is not supported with `use_vllm`: leave {name!r} out."
            )


def _brings_reward(environment_factory) -> bool:
    """Whether an environment may define the reward itself. Only a class tells without being called."""
    if environment_factory is None:
        return False
    factories = environment_factory.values() if isinstance(environment_factory, dict) else [environment_factory]
    return any(not isinstance(factory, type) or hasattr(factory, "get_reward") for factory in factories)


@contextmanager
def _uninspected_template(tokenizer: PreTrainedTokenizerBase, tools) -> Iterator[None]:
    """Hide the chat template while TRL constructs a trainer with tools.

    TRL refuses chat templates that its own tool loop and response parser cannot work with: those without a tool role,
    those that rewrite earlier turns, those it does not know. None of that concerns `AgentLoop`, which appends ids and
    parses the protocol's tags, so TRL is shown a plain template. A response format that TRL knows for the real template
    is kept, to read tool calls in the model's own format.
    """
    if not tools or tokenizer.chat_template is None:
        yield
        return
    add_response_format(tokenizer)
    template, response_template = tokenizer.chat_template, getattr(tokenizer, "response_template", None)
    tokenizer.chat_template, tokenizer.response_template = _PLAIN_TEMPLATE, response_template or {}
    try:
        yield
    finally:
        tokenizer.chat_template, tokenizer.response_template = template, response_template
