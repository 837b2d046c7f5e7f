"""Folders of indexes: what may be replaced, how one appears whole, and the metadata file that says what it holds."""

import errno
import json
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# As libraries say it that give no error number: tantivy, faiss and numpy.
_SAYS_FULL = re.compile(r"no space left|file too large|quota exceeded|requested and \d+ written", re.IGNORECASE)
_LITTLE = 1 << 20  # bytes of a disk that count as none
_PATIENCE = 10  # seconds that a process waits for another that is just replacing an index


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


class _DiskFullError(OSError):
    pass


@contextmanager
def told_if_full(path: Path) -> Iterator[None]:
    """Say in a sentence that an index cannot be written because the disk is full, however a library puts it.

    Args:
        path: The folder of the index.

    Raises:
        OSError: Instead of what was raised, if that means that the disk is full, or a limit on sizes was reached.
    """
    try:
        yield
    except (OSError, RuntimeError, ValueError) as raised:
        # Of an index within this one, this one is told.
        error = raised.__cause__ if isinstance(raised, _DiskFullError) else raised
        where = Path(getattr(error, "filename", None) or path)
        says_full = getattr(error, "errno", None) in _FULL or _SAYS_FULL.search(str(error))
        # tantivy's threads fail without a reason.
        if not says_full and not ("error occurred in a thread" in str(error) and _has_little_room(path)):
            raise
        raise _DiskFullError(
            f"{where} cannot be written, because the disk is full or a file may not be that large ({error}); make room "
            f"and try again. An index that was at {path} before is unchanged."
        ) from error


def _has_little_room(path: Path) -> bool:
    import resource  # which Windows has not

    if resource.getrlimit(resource.RLIMIT_FSIZE)[0] != resource.RLIM_INFINITY:
        return True
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free < _LITTLE


@contextmanager
def building_folder(path: Path) -> Iterator[Path]:
    """The folder beside an index where the next one is put together, for one process at a time.

    What a build that was killed while it replaced the index has left is put in order first. The folder is removed if
    nothing is left in it.

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
        # While the lock is held: without its file, others would take a lock of their own.
        if building.is_dir() and all(entry.name == "lock" for entry in building.iterdir()):
            shutil.rmtree(building, ignore_errors=True)
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


def put_back(path: Path) -> None:
    """Put an index back that a build was killed over, while it replaced it. To be called before an index is opened.

    Args:
        path: The folder of the index.

    Raises:
        OSError: If it cannot be put back; the message says where it is.
    """
    end = time.monotonic() + _PATIENCE
    while not path.exists() and _replaced(path).exists():
        try:
            with building_folder(path):
                pass
        except OSError as error:
            # Another process is at it: the old index or a new one is there in a moment.
            if isinstance(error, BlockingIOError) and time.monotonic() < end:
                time.sleep(0.02)
                continue
            raise OSError(
                f"The index {path} was being replaced when that was killed, and cannot be put back ({error}): rename "
                f"{_replaced(path)} to {path}."
            ) from error


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
