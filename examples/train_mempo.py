"""Train a search agent with memory: any model, questions and corpus, on one CPU or many GPUs.

    accelerate launch --config_file accelerate_configs/zero3.yaml examples/train_mempo.py \\
        --config examples/configs/qwen2.5_7b_zero3_vllm.yaml --learning_rate 2e-6

A recipe is a YAML file of arguments: those below, and all of `MemPOConfig` and TRL's `ModelConfig` (LoRA and
quantization among them). The command line overrides it. A run that was killed goes on from its last checkpoint with
`--resume_from_checkpoint last`, which begins anew if there is none yet.
"""

import importlib
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accelerate import PartialState
from datasets import Dataset, load_dataset
from transformers.trainer_utils import get_last_checkpoint
from trl import ModelConfig, ScriptArguments, TrlParser, get_peft_config, get_quantization_config

from mempo_trl import MemPOConfig, MemPOTrainer, rewards
from mempo_trl.data import read_answers
from mempo_trl.search import BM25Index, CachedSearch, HttpSearch, make_search_tool, open_index
from mempo_trl.search.arguments import token_of_environment


@dataclass
class MemPOScriptArguments(ScriptArguments):
    """
    Arguments of this script, beside those of the trainer and of the model.

    Args:
        search (`str`, *optional*):
            Where to search: the URL of a server (`http://localhost:8000/retrieve`; the environment variable
            `MEMPO_SERVER_TOKEN` may hold its token), or the path of an index as `mempo index` makes it.
        corpus (`str`, *optional*):
            Documents of a BM25 index. It is built if it does not exist yet, and refused if it is of other documents.
        search_results (`int`, *optional*, defaults to `3`):
            Documents that a search gives.
        search_timeout (`float`, *optional*, defaults to `30.0`):
            Seconds to wait for a search server.
        search_cache (`str`, *optional*):
            File that remembers what was found, over runs and processes, for a search that is slow or costs money.
        query_list (`bool`, *optional*, defaults to `False`):
            Whether the tool takes a list of queries, as verl's does.
        answers_column (`str`, *optional*):
            Column that the accepted answers are taken from, if not `answers`: a string, a list of strings, or such a
            list for each objective. Dots lead into nested columns: `reward_model.ground_truth.target`.
        reward_funcs (`list[str]`, *optional*):
            Names in `mempo_trl.rewards`, or paths of functions to import (`my_module.my_reward`). If not given, the
            trainer's default.
        max_eval_samples (`int`, *optional*):
            Questions to evaluate on; all of the split if not given.
    """

    search: str | None = field(default=None, metadata={"help": "URL of a search server, or path of an index."})
    corpus: str | None = field(
        default=None, metadata={"help": "Documents to build the BM25 index of, if it is missing."}
    )
    search_results: int = field(default=3, metadata={"help": "Documents that a search gives."})
    search_timeout: float = field(default=30.0, metadata={"help": "Seconds to wait for a search server."})
    search_cache: str | None = field(default=None, metadata={"help": "File that remembers what was found."})
    query_list: bool = field(default=False, metadata={"help": "Whether the tool takes a list of queries."})
    answers_column: str | None = field(
        default=None, metadata={"help": "Column that the accepted answers are taken from."}
    )
    reward_funcs: list[str] | None = field(
        default=None, metadata={"help": "Names in mempo_trl.rewards, or import paths."}
    )
    max_eval_samples: int | None = field(default=None, metadata={"help": "Questions to evaluate on."})


def open_search(arguments: MemPOScriptArguments):
    """The search backend that the arguments name."""
    if arguments.search is None:
        raise ValueError("`search` is missing: give the URL of a search server, or the path of a BM25 index.")
    if arguments.search.startswith(("http://", "https://")):
        return HttpSearch(arguments.search, timeout=arguments.search_timeout, token=token_of_environment())
    path = Path(arguments.search).expanduser()
    if arguments.corpus is None:
        if not path.exists():
            raise ValueError(f"`search={path}` does not exist. To build this index, give the documents as `corpus`.")
        return open_index(path)
    corpus = os.path.expanduser(arguments.corpus)
    # One process of each machine builds; the others find what it has built.
    with PartialState().local_main_process_first():
        try:
            return BM25Index.load(path, corpus=corpus)
        except FileNotFoundError:  # nothing, or what a build that was killed has left
            try:
                return BM25Index.build(corpus, path)
            except FileNotFoundError as error:
                raise ValueError(f"`corpus={corpus}` cannot be read: {error}") from error


def load_questions(arguments: MemPOScriptArguments, evaluates: bool) -> tuple[Dataset, Dataset | None]:
    """The questions to train on, and those to evaluate on."""
    if arguments.dataset_name is None:
        raise ValueError("`dataset_name` is missing: give a data set of the Hub, or a folder of data files.")
    splits = load_dataset(arguments.dataset_name, name=arguments.dataset_config, streaming=arguments.dataset_streaming)
    wanted = {"dataset_train_split": arguments.dataset_train_split}
    if evaluates:
        wanted["dataset_test_split"] = arguments.dataset_test_split
    for name, split in wanted.items():
        if split not in splits:
            raise ValueError(f"`{name}={split}` is not a split of {arguments.dataset_name}: {', '.join(splits)}.")
    parts = [splits[split] for split in wanted.values()]
    if evaluates and arguments.max_eval_samples is not None:
        if arguments.max_eval_samples < 1:
            raise ValueError(f"`max_eval_samples={arguments.max_eval_samples}` is not allowed: it must be at least 1.")
        parts[1] = parts[1].take(arguments.max_eval_samples)
    if (column := arguments.answers_column) is not None:
        parts = [part.map(lambda row: {"answers": read_answers(row, column)}) for part in parts]
    return parts[0], parts[1] if evaluates else None


def load_rewards(names: list[str] | None) -> list[Any] | None:
    """Reward functions by name."""
    if names is None:
        return None
    found = []
    for name in names:
        module, _, function = name.rpartition(".")
        if module:
            sys.path.insert(0, os.getcwd())
        try:
            reward = getattr(importlib.import_module(module) if module else rewards, function, None)
        except ModuleNotFoundError as error:
            raise ValueError(f"`reward_funcs`: {name!r} cannot be imported: {error}.") from error
        if not callable(reward):
            raise ValueError(f"`reward_funcs`: there is no function {function!r} in {module or 'mempo_trl.rewards'}.")
        found.append(reward)
    return found


def checkpoint_to_resume(args: MemPOConfig) -> str | None:
    """The checkpoint to go on from; `last` (or `true`) stands for the newest one, if there is any."""
    if str(args.resume_from_checkpoint).lower() not in ("last", "true"):
        return args.resume_from_checkpoint
    output_dir = str(args.output_dir)
    return get_last_checkpoint(output_dir) if os.path.isdir(output_dir) else None


def main(script_args: MemPOScriptArguments, training_args: MemPOConfig, model_args: ModelConfig) -> None:
    own: Any = training_args.model_init_kwargs or {}
    training_args.model_init_kwargs = {
        **own,
        "revision": model_args.model_revision,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
        "trust_remote_code": training_args.trust_remote_code,
    }
    search = open_search(script_args)
    if script_args.search_cache is not None:
        search = CachedSearch(search, script_args.search_cache)
    train_dataset, eval_dataset = load_questions(script_args, training_args.eval_strategy != "no")
    trainer = MemPOTrainer(
        model=model_args.model_name_or_path,
        reward_funcs=load_rewards(script_args.reward_funcs),
        args=training_args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        tools=[make_search_tool(search, script_args.search_results, script_args.query_list)],
        quantization_config=get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
    )
    trainer.train(resume_from_checkpoint=checkpoint_to_resume(training_args))
    if eval_dataset is not None:
        trainer.save_metrics("eval", trainer.evaluate())
    if training_args.push_to_hub:
        trainer.push_to_hub(dataset_name=script_args.dataset_name)  # saves it as well
    else:
        trainer.save_model()
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main(*TrlParser([MemPOScriptArguments, MemPOConfig, ModelConfig]).parse_args_and_config())  # type: ignore[list-item]
