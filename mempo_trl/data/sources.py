"""Rows of files, folders and data sets on the Hub, with the place of each. Nothing here needs torch."""

import csv
import gzip
import json
import re
import warnings
import zlib
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO, cast

import yaml


ENDINGS = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".parquet", ".csv", ".tsv")
_SAMPLE = 100  # rows that tell which columns there are
_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
# Names of files that say nothing of what is in them.
_SPLIT_NAME = re.compile(
    r"(train|test|dev|valid|validation|val|eval|data|questions)([-_.]?\d+(-of-\d+)?)?", re.IGNORECASE
)
# What `datasets` itself writes beside rows.
_NOTES = ("dataset_infos.json", "dataset_info.json", "dataset_dict.json", "state.json")
_SYNONYMS = {"dev": "validation", "val": "validation", "valid": "validation"}

Place = str
Rows = Iterator[tuple[Place, Mapping[str, Any]]]


@dataclass(frozen=True)
class Source:
    """Where rows come from.

    Attributes:
        name: what the rows are said to come from, if they do not say themselves.
        shown: how messages call it.
        columns: the top-level columns of the first rows.
        sample: the first rows.
        rows: reads the rows, of these columns alone where that is faster (`None`: all).
    """

    name: str
    shown: str
    columns: list[str]
    sample: list[Mapping[str, Any]]
    rows: Callable[[Sequence[str] | None], Rows]


def open_source(
    source: str | Path | Iterable[Mapping[str, Any]],
    split: str | None = None,
    config: str | None = None,
    revision: str | None = None,
) -> Source:
    """Find what is to be read, and look at its first rows.

    Args:
        source: a file, a folder, the name of a data set on the Hub, or rows.
        split, config, revision: which part of a folder or of a data set on the Hub.

    Raises:
        FileNotFoundError: if there is none of that name.
        ValueError: if it must be said which part, or it cannot be read.
    """
    if not isinstance(source, str | Path):
        rows = source if isinstance(source, Sequence) or hasattr(source, "column_names") else list(source)
        return _source("questions", "the rows", lambda columns: _given(rows))
    path = Path(source).expanduser()
    if path.is_file():
        given = {"split": split, "config": config, "revision": revision}
        for name, value in given.items():
            if value is not None:
                raise ValueError(
                    f"`{name}={value}` belongs to a folder or a data set on the Hub, but {path} is a file."
                )
        if not path.name.lower().endswith(ENDINGS):
            raise ValueError(f"Questions are in {', '.join(ENDINGS)} files, but {path} is none of them.")
        return _source(_file_name(path), str(path), _reader(path))
    if path.is_dir():
        if revision is not None:
            raise ValueError(f"`revision={revision}` belongs to a data set on the Hub, but {path} is a folder.")
        return _folder_source(path, split, config)
    return _hub_source(str(source), split, config, revision)


def _source(name: str, shown: str, rows: Callable[[Sequence[str] | None], Rows]) -> Source:
    sample = [row for _, row in islice(rows(None), _SAMPLE)]
    columns = list(dict.fromkeys(str(key) for row in sample for key in row))
    return Source(name, shown, columns, sample, rows)


def _given(rows: Iterable[Any]) -> Rows:
    for number, row in enumerate(rows, start=1):
        place = f"row {number}"
        yield place, _mapping(row, place)


def _mapping(row: Any, place: Place) -> Mapping[str, Any]:
    if not isinstance(row, Mapping):
        raise ValueError(f"{place}: a question is an object with named columns, but this is a {type(row).__name__}.")
    return row


def _file_name(path: Path) -> str:
    """What a file's rows are said to come from."""
    stem = path.name
    for ending in sorted(ENDINGS, key=len, reverse=True):
        if stem.lower().endswith(ending):
            stem = stem[: -len(ending)]
            break
    return path.resolve().parent.name or stem if _SPLIT_NAME.fullmatch(stem) else stem


# --- Files ----------------------------------------------------------------------------------------------------------


def _reader(path: Path) -> Callable[[Sequence[str] | None], Rows]:
    """What reads a file's rows, again at every call."""
    name = path.name.lower()
    if name.endswith(".parquet"):
        return lambda columns: _read_parquet(path, columns)
    if name.endswith((".csv", ".tsv")):
        return lambda columns: _read_table(path, "\t" if name.endswith(".tsv") else ",")
    if name.endswith((".jsonl", ".jsonl.gz")):
        return lambda columns: _read_lines(path)
    # Such a file is parsed as a whole: once.
    load = cache(lambda: _load_json(path))

    def rows(columns: Sequence[str] | None) -> Rows:
        listed = load()
        if listed is None:
            yield from _read_lines(path)
            return
        for number, row in enumerate(listed, start=1):
            place = f"{path}, entry {number}"
            yield place, _mapping(row, place)

    return rows


def _open(path: Path) -> BinaryIO:
    return cast(BinaryIO, gzip.open(path)) if path.suffix.lower() == ".gz" else path.open("rb")


def _read_lines(path: Path) -> Rows:
    number = 0
    with _open(path) as lines:
        try:
            for number, line in enumerate(lines, start=1):
                if not line.strip(b" \t\r\n" + BOM_UTF8):
                    continue
                place = f"{path}, line {number}"
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError) as error:  # no JSON, no UTF-8, a number too long, too deep
                    raise ValueError(f"{place}: the line is not JSON in UTF-8: {error}.") from error
                yield place, _mapping(row, place)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ValueError(f"{path} is cut short or damaged after line {number}: {error}.") from error


def _load_json(path: Path) -> list[Any] | None:
    """The questions in a file; `None` if it has one object a line, as many programs write to a file of this ending."""
    try:
        with _open(path) as file:
            content = file.read()
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} is cut short or damaged: {error}.") from error
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        first, _, rest = content.partition(b"\n")
        if rest.strip() and _is_object(first):
            return None
        raise ValueError(f"{path} is not JSON in UTF-8: {error}.") from error
    if isinstance(value, dict):
        lists = [part for part in value.values() if isinstance(part, list)]
        if any(isinstance(value.get(name), str | dict) for name in ("question", "reward_model")):
            value = [value]
        elif len(lists) == 1:
            value = lists[0]
    if not isinstance(value, list):
        raise ValueError(f"{path} must hold a list of questions, but it holds a {type(value).__name__}.")
    return value


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _read_parquet(path: Path, columns: Sequence[str] | None) -> Rows:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            present = file.schema_arrow.names
            wanted = present if columns is None else [name for name in present if name in columns]
            for batch in file.iter_batches(batch_size=_SAMPLE if columns is None else 1000, columns=wanted):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}, row {number}", row
    except (pyarrow.ArrowException, OSError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(f"{path} is no Parquet file, or damaged after row {number}: {reason}") from error


def _read_table(path: Path, delimiter: str) -> Rows:
    csv.field_size_limit(1 << 30)  # the passages that some sets bring in a cell are longer than the default
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, delimiter=delimiter, strict=True)
        try:
            header = next(reader, [])
            if twice := [name for name, count in Counter(header).items() if count > 1]:
                raise ValueError(f"{path}, line 1: the header names the column {twice[0]!r} twice.")
            for cells in reader:
                place = f"{path}, line {reader.line_num}"
                if not cells:
                    continue
                if len(cells) != len(header):
                    raise ValueError(f"{place}: the row has {len(cells)} cells, but the header names {len(header)}.")
                yield place, dict(zip(header, cells, strict=True))
        except csv.Error as error:
            raise ValueError(f"{path}, line {reader.line_num}: the row cannot be read: {error}.") from error
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not text in UTF-8 after line {reader.line_num}: {error}.") from error


# --- Folders, and the Hub -------------------------------------------------------------------------------------------


class FilesIgnored(UserWarning):
    """A folder has files beside those that are read."""


def _folder_source(path: Path, split: str | None, config: str | None) -> Source:
    found, ignored = _files_of(path, config)
    chosen = _choose_split(split, list(found), str(path))
    if ignored:
        names = ", ".join(ignored[:5]) + (" …" if len(ignored) > 5 else "")
        warnings.warn(
            f"{path}: these files belong to no split by their names and are not read: {names}. "
            "Name the file itself to read it.",
            FilesIgnored,
            stacklevel=4,
        )
    readers = {name: [_reader(file) for file in files] for name, files in found.items()}
    parts: list[tuple[str, int, int | None]]
    if chosen in found:
        files, parts = found[chosen], [(chosen, 0, None)]
    else:
        parts = _slices(chosen, readers)
        files = list(dict.fromkeys(file for name, _, _ in parts for file in found[name]))

    def rows(columns: Sequence[str] | None) -> Rows:
        for name, start, end in parts:
            yield from islice(chain.from_iterable(read(columns) for read in readers[name]), start, end)

    return _source(
        _file_name(files[0]) if len(files) == 1 else path.resolve().name,
        f"{path} ({len(files)} files)" if len(files) > 1 else str(files[0]),
        rows,
    )


def _slices(
    split: str, readers: Mapping[str, list[Callable[[Sequence[str] | None], Rows]]]
) -> list[tuple[str, int, int | None]]:
    """The split, first row and end of each part of a split like `train[:100]+validation[50%:]`."""
    from datasets import ReadInstruction

    names = {part.partition("[")[0].strip() for part in split.split("+")}
    sizes = {name: sum(1 for read in readers[name] for _ in read(None)) for name in names}
    try:
        return [(part.splitname, part.from_, part.to) for part in ReadInstruction.from_spec(split).to_absolute(sizes)]
    except (ValueError, AssertionError) as error:
        raise ValueError(f"`split={split}` cannot be read: {' '.join(str(error).split())}") from error


def _files_of(path: Path, config: str | None) -> tuple[dict[str, list[Path]], list[str]]:
    """The files of each split, as `datasets` finds them: by names, or as README.md says. And those of no split."""
    from datasets import load_dataset_builder

    there = sorted(file for file in path.rglob("*") if _may_hold_rows(file.relative_to(path)) and file.is_file())
    if not there:
        raise ValueError(f"The folder {path} holds no {', '.join(ENDINGS)} files.")
    try:
        builder = load_dataset_builder(str(path), config)
    except (ValueError, FileNotFoundError) as error:
        raise type(error)(f"{path}: {_config_problem(str(path), config, None, error)}") from error
    except yaml.YAMLError as error:
        raise ValueError(_card_problem(path / "README.md", error)) from error
    found = {
        str(name): [Path(file) for file in files if str(file).lower().endswith(ENDINGS)]
        for name, files in (builder.config.data_files or {}).items()
    }
    found = {name: files for name, files in found.items() if files}
    if not found:
        raise ValueError(f"The folder {path} holds no {', '.join(ENDINGS)} files.")
    # What README.md leaves out is left out on purpose.
    read = {file.resolve() for files in found.values() for file in files}
    ignored = [str(file.relative_to(path)) for file in there if file.resolve() not in read]
    return found, ignored if builder.config.name == "default" else []


def _may_hold_rows(file: Path) -> bool:
    hidden = any(part.startswith((".", "_")) for part in file.parts)
    return file.name.lower().endswith(ENDINGS) and not hidden and file.name not in _NOTES


def _card_problem(card: object, error: yaml.YAMLError) -> str:
    return f"{card}: what stands between its lines of dashes is not YAML: {' '.join(str(error).split())}"


def _choose_split(split: str | None, there: list[str], shown: str) -> str:
    if split is None and len(there) == 1:
        return there[0]
    if split is None:
        raise ValueError(f"{shown} has several splits: say which to read (`split`): {', '.join(there)}.")
    parts = []
    for part in split.split("+"):
        name, bracket, rest = part.strip().partition("[")
        name = name if name in there else _SYNONYMS.get(name, name)
        if name not in there:
            raise ValueError(f"`split={split}` is not a split of {shown}: {', '.join(there)}.")
        parts.append(f"{name}{bracket}{rest}")
    return "+".join(parts)


def _config_problem(name: str, config: str | None, revision: str | None, error: Exception) -> str:
    """The sentence about a configuration that is missing or unknown, or about whatever else is wrong."""
    from datasets import get_dataset_config_names

    try:
        names = get_dataset_config_names(name, revision=revision)
    except Exception:  # nothing is known of it: the first error says why
        return " ".join(str(error).split())
    if config is None and len(names) > 1:
        return f"there are several configurations: say which to read (`config`): {', '.join(names)}."
    if config is not None and config not in names:
        return f"`config={config}` is not a configuration of it: {', '.join(names)}."
    return " ".join(str(error).split())


def _hub_source(name: str, split: str | None, config: str | None, revision: str | None) -> Source:
    if "://" in name:
        raise ValueError(
            f"{name} is a URL: download the file and name that, or give a data set on the Hub as owner/name."
        )
    if name.lower().endswith(ENDINGS) or not _HUB_NAME.fullmatch(name):
        raise FileNotFoundError(f"There is no file or folder {name}.")
    from datasets import load_dataset, load_dataset_builder

    try:
        builder = load_dataset_builder(name, config, revision=revision)
    except FileNotFoundError as error:
        reason = " ".join(str(error).split())
        raise FileNotFoundError(
            f"There is no file or folder {name}, and no data set of that name on the Hub: {reason}"
        ) from error
    except ValueError as error:
        raise ValueError(f"{name}: {_config_problem(name, config, revision, error)}") from error
    except yaml.YAMLError as error:
        raise ValueError(_card_problem(f"{name}, README.md", error)) from error
    there = [str(part) for part in builder.info.splits or builder.config.data_files or {}]
    chosen = _choose_split(split, there, name)
    try:
        dataset = load_dataset(name, config, split=chosen, revision=revision)
    except (ValueError, AssertionError) as error:
        raise ValueError(f"`split={chosen}` of {name} cannot be read: {' '.join(str(error).split())}") from error

    def rows(columns: Sequence[str] | None) -> Rows:
        kept = dataset.select_columns([c for c in dataset.column_names if columns is None or c in columns])
        for number, row in enumerate(kept, start=1):
            yield f"{name}, split {chosen}, row {number}", row

    return _source(name.rpartition("/")[2], f"{name}, split {chosen}", rows)
