"""The rows of a source, as dictionaries: a file, a folder of files, a data set on the Hub. Nothing here needs torch."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..run_folder import short


Row = dict[str, Any]

SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".parquet")
_SPLITS = {"train": "train", "test": "test", "dev": "validation", "val": "validation", "valid": "validation"}
_SPLITS |= {"validation": "validation", "eval": "validation"}


def read_rows(source: str | Path, split: str | None, config: str | None, revision: str | None) -> Iterator[Row]:
    """Read the rows of a source, one after the other.

    Args:
        source, split, config, revision: see [`mempo_trl.data.read_questions`].

    Raises:
        FileNotFoundError: if there is no such source.
        ValueError: if an argument is wrong, or a file or line is damaged.
    """
    path = Path(source).expanduser()
    if path.is_file():
        if split or config or revision:
            raise ValueError(f"{source} is a file: leave out split, config and revision.")
        yield from _rows_of_file(path)
    elif path.is_dir() and not (config or (path / "README.md").exists()):
        for file in _files(path, split):
            yield from _rows_of_file(file)
    elif path.is_dir() or _may_be_on_hub(str(source)):
        yield from _rows_of_dataset(str(path) if path.is_dir() else str(source), split, config, revision)
    else:
        raise FileNotFoundError(f"There is no file, folder or data set {source}.")


def _may_be_on_hub(name: str) -> bool:
    return not name.startswith((".", "/", "~")) and name.count("/") <= 1 and not name.endswith(SUFFIXES)


def _files(folder: Path, split: str | None) -> list[Path]:
    """The files of a split in a folder, which are told by their names: `train.jsonl`, `test-00000-of-00002.parquet`."""
    places = [place for place in (folder, folder / "data") if place.is_dir()]
    files = sorted(file for place in places for file in place.iterdir() if file.name.endswith(SUFFIXES))
    files = [file for file in files if not file.name.startswith(".")]
    if not files:
        raise ValueError(f"There is no {', '.join(SUFFIXES)} file in {folder}.")
    by_split: dict[str, list[Path]] = {}
    for file in files:
        stem = file.name.partition(".")[0]
        word = stem.replace("_", "-").partition("-")[0].lower()
        by_split.setdefault(_SPLITS.get(word, stem), []).append(file)
    wanted = split if split is None else _SPLITS.get(split, split)
    if wanted is None and len(by_split) == 1:
        return files
    if wanted not in by_split:
        wrong = "several splits" if split is None else f"no split {split!r}"
        raise ValueError(f"{folder} has {wrong}: name one of {', '.join(sorted(by_split))} as split.")
    return by_split[wanted]


def _rows_of_file(file: Path) -> Iterator[Row]:
    if file.name.endswith(".parquet"):
        yield from _rows_of_parquet(file)
    elif file.name.endswith(".json"):
        yield from _rows_of_json(file)
    elif file.name.endswith((".jsonl", ".jsonl.gz")):
        yield from _rows_of_lines(file)
    else:
        raise ValueError(f"{file} is in no form that is known: it must be a {', '.join(SUFFIXES)} file.")


def _rows_of_parquet(file: Path) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            for batch in table.iter_batches(1024):
                yield from batch.to_pylist()
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{file} is no Parquet file, or damaged: {error}") from error


def _rows_of_json(file: Path) -> Iterator[Row]:
    """The rows of a list, or of the list in a `data`."""
    try:
        content = json.loads(file.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        lines = _first_line_is_whole(file)
        hint = ": it has one JSON object a line, so name it .jsonl" if lines else f": {error}"
        raise ValueError(f"{file} is no JSON{hint}.") from error
    rows = content.get("data") if isinstance(content, dict) else content
    if not isinstance(rows, list):
        raise ValueError(f"{file} holds no list of rows, nor one in `data`.")
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise ValueError(f"Row {number} of {file} is no object: {short(row)}")
        yield row


def _first_line_is_whole(file: Path) -> bool:
    with file.open(encoding="utf-8-sig", errors="replace") as lines:
        try:
            return isinstance(json.loads(lines.readline()), dict)
        except (ValueError, RecursionError):
            return False


def _rows_of_lines(file: Path) -> Iterator[Row]:
    opened = gzip.open(file, "rb") if file.name.endswith(".gz") else file.open("rb")
    with opened as lines:
        number = 0
        try:
            for number, line in enumerate(lines, start=1):
                text = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
                if not text.strip():
                    continue
                row = json.loads(text)
                if not isinstance(row, dict):
                    raise ValueError("it is no object")
                yield row
        except (ValueError, RecursionError) as error:
            raise ValueError(f"Line {number} of {file} is no row ({error}): mend or remove it.") from error
        except (EOFError, gzip.BadGzipFile) as error:
            raise ValueError(f"{file} is damaged after line {number}: {error}") from error


def _rows_of_dataset(name: str, split: str | None, config: str | None, revision: str | None) -> Iterator[Row]:
    import datasets
    from datasets.exceptions import DatasetNotFoundError

    try:
        configs = datasets.get_dataset_config_names(name, revision=revision)
        if config is None and len(configs) > 1 and "default" not in configs:
            raise ValueError(f"{name} has several configurations: name one of {', '.join(configs)} as config.")
        splits = datasets.get_dataset_split_names(name, config, revision=revision)
        if split is None and len(splits) > 1:
            raise ValueError(f"{name} has several splits: name one of {', '.join(map(str, splits))} as split.")
        loaded = datasets.load_dataset(name, config, split=split or splits[0], revision=revision)
    except DatasetNotFoundError as error:
        raise FileNotFoundError(f"There is no file, folder or data set {name}: {error}") from error
    yield from loaded
