"""The columns that `MemPOTrainer` reads, checked before anything is generated."""

from typing import Any

from ..protocol import build_prompt


def prepare_dataset(
    dataset: Any,
    name: str,
    system_prompt: str | None = None,
    needs_answers: bool = True,
    needs_prompt: bool = True,
) -> Any:
    """Check a data set's columns and make `prompt` from `question` where it is missing.

    Args:
        dataset: a `datasets.Dataset` or `IterableDataset`, a mapping of such, or `None`. Anything else is returned as
            it is, for the caller to refuse.
        name: the argument that the data set came in, for the error messages.
        system_prompt: see [`mempo_trl.protocol.build_prompt`].
        needs_answers: whether a column `answers` must exist and every row of it be valid. The rows of an
            `IterableDataset` are only checked as they come: see `check_answers`.
        needs_prompt: whether `prompt` or `question` must exist.

    Returns:
        The data set with a column `prompt`.

    Raises:
        ValueError: if a column is missing or not supported, or a row's answers are no answers.
    """
    from datasets import Dataset, IterableDataset

    if isinstance(dataset, dict):
        prepared = {
            key: prepare_dataset(part, f"{name}[{key!r}]", system_prompt, needs_answers, needs_prompt)
            for key, part in dataset.items()
        }
        return type(dataset)(prepared)
    if not isinstance(dataset, Dataset | IterableDataset):
        return dataset
    if isinstance(dataset, Dataset) and len(dataset) == 0:
        raise ValueError(f"`{name}` has no rows.")
    # A stream without declared features tells its columns only by its first row.
    columns = dataset.column_names or list(next(iter(dataset), {}))
    for column in ("image", "images"):
        if column in columns:
            raise ValueError(f"Images are not supported: remove the column `{column}` from `{name}`.")
    if needs_prompt and "prompt" not in columns and "question" not in columns:
        raise ValueError(
            f"`{name}` needs a column `prompt` (a conversation) or `question` (a string), but its columns are: "
            f"{', '.join(columns)}."
        )
    if needs_answers and "answers" not in columns:
        raise ValueError(
            f"`{name}` needs a column `answers` (accepted answers, list[str], or such a list for each objective), but "
            f"its columns are: {', '.join(columns)}. Without answers, set `memory_coefficient=0` and pass "
            "`reward_funcs` that need none."
        )
    if needs_answers and isinstance(dataset, Dataset):
        for row, answers in enumerate(dataset["answers"]):
            check_answers(answers, f"row {row} of `{name}`")
    if "prompt" in columns:
        if needs_prompt and isinstance(dataset, Dataset):
            for row, prompt in enumerate(dataset["prompt"]):
                if not prompt:
                    raise ValueError(f"The column `prompt` is empty in row {row} of `{name}`: remove the row.")
    elif "question" in columns:
        if isinstance(dataset, Dataset):
            for row, question in enumerate(dataset["question"]):
                if not isinstance(question, str) or not question.strip():
                    raise ValueError(f"The column `question` holds {question!r} in row {row} of `{name}`: give a text.")
        dataset = dataset.map(lambda example: {"prompt": build_prompt(example["question"], system_prompt)})
    return dataset


def check_answers(answers: Any, where: str) -> None:
    """Raise `ValueError` unless `answers` is a non-empty list of strings, or of such lists, without blank answers.

    Args:
        answers: what a row's column `answers` holds.
        where: the place, for the error message.
    """
    objectives = answers if isinstance(answers, list) and answers and isinstance(answers[0], list) else [answers]
    for accepted in objectives:
        if not isinstance(accepted, list) or not accepted:
            problem = "is empty" if accepted == [] else f"is {accepted!r}, not a list"
        elif not all(isinstance(answer, str) and answer.strip() for answer in accepted):
            problem = f"holds something else than text: {accepted!r}"
        else:
            continue
        raise ValueError(
            f"The column `answers` {problem} in {where}: give a non-empty list of accepted answers (list[str]), or one "
            "such list for each objective (list[list[str]])."
        )
