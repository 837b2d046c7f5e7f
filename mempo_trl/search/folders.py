"""Folders of indexes: what may be replaced, how one appears whole, and the metadata file that says what it holds."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout


def check_target(path: Path, metadata_name: str, kind: str, overwrite: bool) -> None:
    """Raise unless an index may be written to a folder.

    Args:
        path: The folder.
        metadata_name: The file that only an index of this kind has.
        kind: What to call the index in errors, for example "dense index".
        overwrite: Whether an index of this kind may be replaced.

    Raises:
        FileExistsError: If `path` exists, is not empty, and must not be overwritten.
    """
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return
    if not (path / metadata_name).is_file():
        raise FileExistsError(f"{path} exists and is not a {kind}; choose another path.")
    if not overwrite:
        raise FileExistsError(f"There already is a {kind} at {path}; pass overwrite=True to replace it.")


@contextmanager
def building_folder(path: Path) -> Iterator[Path]:
    """The folder beside an index where the next one is put together, for one process at a time.

    What a build that was killed while it replaced the index has left is put in order first.

    Args:
        path: The folder of the index. Its parents are created.

    Raises:
        BlockingIOError: If another process is building there.
    """
    building = path.with_name(f".{path.name}.building")
    building.mkdir(parents=True, exist_ok=True)
    lock = FileLock(building / "lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise BlockingIOError(f"Another process is building the index {path}; wait for it, or end it.") from None
    try:
        replaced = _replaced(path)
        if replaced.exists() and not path.exists():
            replaced.rename(path)
        shutil.rmtree(replaced, ignore_errors=True)
        yield building
    finally:
        lock.release()


def move_into_place(complete: Path, path: Path) -> None:
    """Move a complete folder to its place, on the same file system. What was there before is removed afterwards."""
    if not path.exists():
        complete.rename(path)
        return
    replaced = _replaced(path)
    path.rename(replaced)
    try:
        complete.rename(path)
    except OSError:
        replaced.rename(path)
        raise
    shutil.rmtree(replaced, ignore_errors=True)


def _replaced(path: Path) -> Path:
    return path.with_name(f".{path.name}.replaced")


def write_json(file: Path, content: dict[str, Any]) -> None:
    """Write a JSON file that appears whole or not at all."""
    temporary = file.with_name(f".{file.name}.tmp")
    temporary.write_text(json.dumps(content) + "\n", encoding="utf-8")
    temporary.replace(file)


def read_metadata(path: Path, name: str, version: int, kind: str, maker: str) -> dict[str, Any]:
    """Read the metadata file of an index.

    Args:
        path: The folder of the index.
        name: The name of the file.
        version: The value of its "format" that can be read.
        kind: What to call the index in errors.
        maker: The function that makes such an index, likewise.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is damaged, or has another format.
    """
    file = path / name
    if not file.is_file():
        raise FileNotFoundError(f"There is no {kind} at {path}; make one with {maker}.")
    try:
        metadata = json.loads(file.read_text(encoding="utf-8"))
        found = metadata["format"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is damaged ({error!r}); build the index again.") from error
    if found != version:
        raise ValueError(
            f"The {kind} {path} has format {found!r}, but this version of mempo_trl reads format {version}; "
            "build the index again."
        )
    return metadata
