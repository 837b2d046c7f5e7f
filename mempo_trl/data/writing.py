"""Question sets written to files that appear whole or not at all."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..run_folder import json_lines, write_whole


ENDINGS = (".parquet", ".jsonl")
_ROWS = 10_000  # in one piece


def check_output(path: str | Path, overwrite: bool = False) -> Path:
    """Check where questions are to be written, before the work that makes them.

    Raises:
        ValueError: if the file's ending is none that can be written.
        FileExistsError: if the file is there, and must not be replaced.
    """
    path = Path(path).expanduser()
    if not path.name.endswith(ENDINGS):
        raise ValueError(f"Questions are written to {' or '.join(ENDINGS)} files, but {path} is neither.")
    if path.is_dir():
        raise FileExistsError(f"{path} is a folder: name a file.")
    if path.exists() and not overwrite:
        raise FileExistsError(f"{path} exists: name another file, or overwrite it.")
    return path


def write_questions(rows: Sequence[Mapping[str, Any]], path: str | Path, overwrite: bool = False) -> None:
    """Write questions such that `read_questions` reads the same, and `MemPOTrainer` trains on them.

    Args:
        rows: as `read_questions` and `compose` make them.
        path: a `.parquet` or `.jsonl` file. It appears whole or not at all; folders are made.
        overwrite: whether to replace a file that is there.

    Raises:
        ValueError, FileExistsError: see `check_output`.
    """
    path = check_output(path, overwrite)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.name.endswith(".jsonl"):
        write_whole(path, json_lines(rows))
    else:
        _write_parquet(rows, path)


def _write_parquet(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    text, texts = pa.string(), pa.list_(pa.string())
    types = {
        "id": text,
        "question": text,
        "answers": pa.list_(texts),
        "source": text,
        "prompt": pa.list_(pa.struct([("role", text), ("content", text)])),
        "part_ids": texts,
        "part_sources": texts,
        "part_questions": texts,
    }
    schema = pa.schema([(name, kind) for name, kind in types.items() if any(name in row for row in rows)])
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with pq.ParquetWriter(temporary, schema) as out:
            for start in range(0, len(rows), _ROWS):
                out.write_table(pa.Table.from_pylist(list(rows[start : start + _ROWS]), schema=schema))
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
