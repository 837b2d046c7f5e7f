"""Fine-tune a model on traces before reinforcement learning, on the very token ids that rollouts will have.

    python examples/sft_cold_start.py --model_name_or_path Qwen/Qwen2.5-7B-Instruct --traces outputs/traces/sft.jsonl \\
        --output_dir outputs/cold_start --learning_rate 1e-5 --num_train_epochs 1

Traces are the pairs of context and turn that `mempo collect` writes. The loss is on the turns alone. All arguments of
TRL's `SFTConfig` and `ModelConfig` (LoRA and quantization among them: `--use_peft`) work, on the command line or in a
YAML file given with `--config`.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer
from trl import ModelConfig, SFTConfig, SFTTrainer, TrlParser, get_peft_config, get_quantization_config

from mempo_trl.agent_settings import AgentSettings
from mempo_trl.data.sft import tokenize_pairs


@dataclass
class ColdStartArguments:
    """
    Arguments of this script, beside those of the trainer and of the model.

    Args:
        traces (`str`):
            A `.jsonl` file of pairs, as `mempo collect` writes them.
        max_turns, max_turn_length, max_observation_length (`int`):
            What the agent will be run with. Observations are cut to `max_observation_length` tokens here as there.
        context_turns (`int`, *optional*):
            Earlier turns that a turn sees, as the traces were written; all of them if not given.
        max_pairs (`int`, *optional*):
            Only the first so many pairs.
    """

    traces: str = field(metadata={"help": "A .jsonl file of pairs, as `mempo collect` writes them."})
    max_turns: int = field(default=16, metadata={"help": "Turns in a rollout of the agent."})
    max_turn_length: int = field(default=512, metadata={"help": "Tokens of one turn."})
    max_observation_length: int = field(default=512, metadata={"help": "Tokens of what a turn's tools answer."})
    context_turns: int | None = field(default=None, metadata={"help": "Earlier turns that a turn sees."})
    max_pairs: int | None = field(default=None, metadata={"help": "Only the first so many pairs."})


def read_pairs(path: str, max_pairs: int | None = None) -> list[dict[str, Any]]:
    """The pairs of a file."""
    pairs = []
    try:
        # Not `splitlines`: text from the web has line separators of its own, which JSON need not spell out.
        lines = Path(path).read_text(encoding="utf-8").rstrip("\n").split("\n")
    except (OSError, UnicodeError) as error:
        raise ValueError(f"`traces={path}` cannot be read: {error}") from error
    for number, line in enumerate(lines[:max_pairs] if lines != [""] else [], start=1):
        try:
            pair = json.loads(line)
            pair["prompt"][0]["role"], pair["completion"][0]["content"]
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise ValueError(
                f"`traces={path}`, line {number} is no pair of prompt and completion: {error!r}"
            ) from error
        pairs.append(pair)
    if not pairs:
        raise ValueError(f"`traces={path}` has no pairs: collect some that are right first.")
    return pairs


def settings_of(arguments: ColdStartArguments, pairs: list[dict[str, Any]]) -> AgentSettings:
    """What the agent is run with, for whoever evaluates or trains it further."""
    opening = pairs[0]["prompt"][0]
    return AgentSettings(
        max_turns=arguments.max_turns,
        max_turn_length=arguments.max_turn_length,
        max_observation_length=arguments.max_observation_length,
        context_turns=arguments.context_turns,
        system_prompt=opening["content"] if opening["role"] == "system" else "",
        tools=json.loads(pairs[0].get("tools") or "[]"),
    )


def main(arguments: ColdStartArguments, training_args: SFTConfig, model_args: ModelConfig) -> None:
    pairs = read_pairs(arguments.traces, arguments.max_pairs)
    settings = settings_of(arguments, pairs)
    name = str(model_args.model_name_or_path)
    tokenizer = AutoTokenizer.from_pretrained(
        name, revision=model_args.model_revision, trust_remote_code=training_args.trust_remote_code
    )
    dataset = tokenize_pairs(pairs, tokenizer, settings)
    longest = max(map(len, dataset["input_ids"]))
    if training_args.max_length is not None and longest > training_args.max_length:
        training_args.max_length = longest  # cut turns would teach to stop in the middle
    own: Any = training_args.model_init_kwargs or {}
    training_args.model_init_kwargs = {
        **own,
        "revision": model_args.model_revision,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
        "trust_remote_code": training_args.trust_remote_code,
    }
    trainer = SFTTrainer(
        model=name,
        args=training_args,
        train_dataset=dataset,
        processing_class=tokenizer,
        quantization_config=get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
    )
    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.save_model()
    if trainer.is_world_process_zero():
        settings.save(str(training_args.output_dir))
    if training_args.push_to_hub:
        trainer.push_to_hub()
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main(*TrlParser([ColdStartArguments, SFTConfig, ModelConfig]).parse_args_and_config())  # type: ignore[list-item]
