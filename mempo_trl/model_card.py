"""The model card of a trained agent: TRL's, with what it scored, the settings it needs, and how to run it."""

import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard

from .protocol import DEFAULT_SYSTEM_PROMPT


# Metrics that say what the agent does, as patterns of their names; the first group, if any, is the name in the card.
_METRICS = re.compile(
    r"reward|rewards/(.+)/mean|memory/(?:reward|probability|baseline_probability)|turns/mean"
    r"|tokens/(?:total|peak|full_context)|tools/call_frequency|stop/answer"
)
_REWARD_METRICS = {"exact_match_reward": "exact_match", "f1_reward": "f1"}  # names of the field
_FIRST = ("reward", "exact_match", "f1")


@dataclass
class AgentSettings:
    """What the agent was trained with and must be run with.

    Attributes:
        model_id: the repository, or whatever `from_pretrained` takes.
        eos_token_ids: ids that end a turn.
        max_turns, max_turn_length, max_observation_length, max_completion_length, context_turns: see `MemPOConfig`.
        max_context_length: tokens that the model takes; `None` if it has no limit.
        system_prompt: text of the system message, empty for none.
        temperature: sampling temperature in training.
        chat_template_kwargs: further arguments of `apply_chat_template`.
        tools: JSON schemas of the tools.
    """

    model_id: str
    eos_token_ids: list[int]
    max_turns: int
    max_turn_length: int
    max_observation_length: int
    max_completion_length: int
    max_context_length: int | None
    context_turns: int | None
    system_prompt: str
    temperature: float = 1.0
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    tools: list[dict[str, Any]] = field(default_factory=list)


def extend_card(path: Path, settings: AgentSettings, log_history: list[dict[str, Any]], dataset: str | None) -> None:
    """Make the card that TRL wrote one of an agent.

    Args:
        path: the card. It is overwritten.
        settings: what the agent must be run with.
        log_history: the trainer's log: the last metrics of training and of evaluation are shown.
        dataset: name of the dataset, if it is known.
    """
    card = ModelCard.load(path)
    training = _last(log_history, "")
    evaluation = _last(log_history, "eval_")
    card.data.tags = sorted(card.data.tags or [])
    results = [
        EvalResult(
            task_type="text-generation",
            task_name="Multi-turn question answering",
            dataset_type=dataset or "custom",
            dataset_name=dataset or "held-out questions",
            metric_type=name,
            metric_value=value,
        )
        for name, value in evaluation.items()
    ]
    if results:
        card.data.model_name = card.data.model_name or settings.model_id.split("/")[-1]
        card.data.eval_results = results
    # TRL's words where there is no base model on the Hub.
    text = card.text.replace(
        "This model is a fine-tuned version of [None](https://huggingface.co/None)", "This model was fine-tuned"
    )
    before, _, rest = text.partition("## Quick start")
    _, _, procedure = rest.partition("## Training procedure")
    sections = [before.rstrip(), _about(), _how_to_run(settings), _settings(settings), _metrics(training, evaluation)]
    card.text = "\n\n".join([*sections, f"## Training procedure{procedure}"])
    card.save(path)


def _last(log_history: list[dict[str, Any]], prefix: str) -> dict[str, float]:
    """The metrics of interest that were logged last with this prefix, under their names in the card."""
    for entry in reversed(log_history):
        if f"{prefix}reward" not in entry:
            continue
        metrics = {}
        for key, value in entry.items():
            match = _METRICS.fullmatch(key.removeprefix(prefix)) if key.startswith(prefix) else None
            # Neither YAML as the Hub reads it nor a table has a use for NaN.
            if match and isinstance(value, int | float) and math.isfinite(value):
                name = match.group(1) or match.group()
                metrics[_REWARD_METRICS.get(name, name)] = round(float(value), 6)
        return dict(sorted(metrics.items(), key=lambda item: item[0] not in _FIRST))
    return {}


def _about() -> str:
    return (
        "It is an agent: it answers a question over several turns, calls tools, and opens every turn after the first "
        "with a memory, `<mem>…</mem>`. It must be run in the loop below, not as a chat model."
    )


def _settings(settings: AgentSettings) -> str:
    window = "all" if settings.context_turns is None else settings.context_turns
    rows = {
        "context_turns": f"{settings.context_turns} (earlier turns that a turn sees beside the question: {window})",
        "max_turns": f"{settings.max_turns}",
        "max_turn_length": f"{settings.max_turn_length} tokens",
        "max_observation_length": f"{settings.max_observation_length} tokens",
        "max_completion_length": f"{settings.max_completion_length} tokens",
        "temperature": f"{settings.temperature:g} (in training)",
    }
    if settings.chat_template_kwargs:
        rows["chat_template_kwargs"] = f"`{json.dumps(settings.chat_template_kwargs)}`"
    table = "\n".join(f"| `{name}` | {value} |" for name, value in rows.items())
    text = f"## Settings\n\n| setting | value |\n| --- | --- |\n{table}\n\n"
    text += (
        f"System prompt:\n\n{_fenced(settings.system_prompt, 'text')}"
        if settings.system_prompt
        else "No system prompt."
    )
    if settings.tools:
        text += f"\n\nTools:\n\n{_fenced(json.dumps(settings.tools, indent=2, ensure_ascii=False), 'json')}"
    return text


def _metrics(training: dict[str, float], evaluation: dict[str, float]) -> str:
    if not training and not evaluation:
        return "## Metrics\n\nNothing has been logged yet."
    rows = "\n".join(
        f"| {name} | {training.get(name, '')} | {evaluation.get(name, '')} |" for name in training | evaluation
    )
    return f"## Metrics\n\n| metric | last training log | last evaluation |\n| --- | --- | --- |\n{rows}"


def _fenced(text: str, language: str) -> str:
    """A code block whose fence is longer than any in the text."""
    fence = "`" * max([3, *(len(run) + 1 for run in re.findall("`+", text))])
    return f"{fence}{language}\n{text}\n{fence}"


def _how_to_run(settings: AgentSettings) -> str:
    system_prompt = "DEFAULT_SYSTEM_PROMPT"
    if settings.system_prompt != DEFAULT_SYSTEM_PROMPT:
        system_prompt = json.dumps(settings.system_prompt, ensure_ascii=False)
    tools = 'tools = [make_search_tool(BM25Index.load("index"), k=3)]  # or others with the schemas below'
    code = f"""\
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from mempo_trl.chat_templates import ObservationRenderer
from mempo_trl.protocol import DEFAULT_SYSTEM_PROMPT, build_prompt
from mempo_trl.rollout import AgentLoop
from mempo_trl.search import BM25Index, make_search_tool
from mempo_trl.tools import ToolRunner

model_id = {json.dumps(settings.model_id)}
tokenizer = AutoTokenizer.from_pretrained(model_id)
model = AutoModelForCausalLM.from_pretrained(model_id, device_map="auto").eval()
{tools if settings.tools else "tools = []"}
eos_token_ids = {settings.eos_token_ids}
template_kwargs = {settings.chat_template_kwargs!r}


def generate(contexts, max_new_tokens, first):
    turns = []
    for context in contexts:
        ids = torch.tensor([context], device=model.device)
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, eos_token_id=eos_token_ids
        )
        turns.append(output[0, len(context) :].tolist())
    return turns, None


renderer = ObservationRenderer(tokenizer, eos_token_ids, {settings.max_observation_length}, template_kwargs, tools)
loop = AgentLoop(
    renderer=renderer,
    runner=ToolRunner(timeout=60),
    generate=generate,
    decode=lambda ids: tokenizer.decode([i for i in ids if i not in eos_token_ids]),
    eos_token_ids=eos_token_ids,
    max_turns={settings.max_turns},
    max_turn_length={settings.max_turn_length},
    max_completion_length={settings.max_completion_length},
    max_context_length={settings.max_context_length},
    context_turns={settings.context_turns},
)
question = build_prompt("Who wrote Dune?", {system_prompt})
prompt = tokenizer.apply_chat_template(
    renderer.prompt(question, tools),
    tools=tools or None,
    add_generation_prompt=True,
    return_dict=False,
    **template_kwargs,
)
(trajectory,) = loop.run([prompt], [{{tool.__name__: tool for tool in tools}}])
for turn in trajectory.turns:
    print(turn.text)
print(trajectory.turns[-1].parsed.answer)"""
    return f"## How to run the agent\n\nIt needs the package `mempo_trl`:\n\n{_fenced(code, 'python')}"
