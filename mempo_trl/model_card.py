"""The model card of a trained agent: TRL's, with what it scored, the settings it needs, and how to run it."""

import json
import math
import re
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard

from .agent_settings import AgentSettings


# Metrics that say what the agent does, as patterns of their names; the first group, if any, is the name in the card.
_METRICS = re.compile(
    r"reward|rewards/(.+)/mean|memory/(?:reward|probability|baseline_probability)|turns/mean"
    r"|tokens/(?:total|peak|full_context)|tools/call_frequency|stop/answer"
)
_REWARD_METRICS = {"exact_match_reward": "exact_match", "f1_reward": "f1"}  # names of the field
_FIRST = ("reward", "exact_match", "f1")


def extend_card(
    path: Path, model_id: str, settings: AgentSettings, log_history: list[dict[str, Any]], dataset: str | None
) -> None:
    """Make the card that TRL wrote one of an agent.

    Args:
        path: the card. It is overwritten.
        model_id: the repository, or whatever `from_pretrained` takes.
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
        card.data.model_name = card.data.model_name or model_id.rsplit("/", maxsplit=1)[-1]
        card.data.eval_results = results
    # TRL's words where there is no base model on the Hub.
    text = card.text.replace(
        "This model is a fine-tuned version of [None](https://huggingface.co/None)", "This model was fine-tuned"
    )
    before, _, rest = text.partition("## Quick start")
    _, _, procedure = rest.partition("## Training procedure")
    sections = [before.rstrip(), _about(), _how_to_run(model_id, settings), _settings(settings)]
    sections.append(_metrics(training, evaluation))
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
        "max_completion_length": f"{settings.completion_length} tokens",
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


def _how_to_run(model_id: str, settings: AgentSettings) -> str:
    tools = 'tools=[make_search_tool(BM25Index.load("index"), k=3)]'
    code = f"""\
from mempo_trl import MemoryAgent
from mempo_trl.search import BM25Index, make_search_tool

agent = MemoryAgent({json.dumps(model_id)}, {tools if settings.tools else "tools=[]"})
for turn in agent.stream("Who wrote Dune?"):
    print(turn.text)
print(turn.answer)"""
    if not settings.tools:
        code = code.replace("from mempo_trl.search import BM25Index, make_search_tool\n", "")
    where = "The settings below are in `agent.json`, where `MemoryAgent` finds them."
    need = " The tools must have the schemas below." if settings.tools else ""
    return f"## How to run the agent\n\nIt needs the package `mempo_trl`. {where}{need}\n\n{_fenced(code, 'python')}"
