"""The folder of a run: what it has done so far, so that a run that was killed goes on. Nothing here needs torch."""

import contextlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from .protocol import clean_text


TRAJECTORIES = "trajectories.jsonl"
SUMMARY, SUMMARY_TABLE = "summary.json", "summary.md"
SFT, SFT_NO_MEMORY = "sft.jsonl", "sft_no_memory.jsonl"
_ABOUT = "run.json"

Record = dict[str, Any]


class RunFolder:
    """A folder with what a run has done so far: `trajectories.jsonl`, one line for each episode, and `run.json`.

    Args:
        path: the folder; it is made if need be.
        about: what the run depends on. A folder that was begun with something else is refused.
        overwrite: whether to begin anew.

    Raises:
        ValueError: if the folder is that of another run, or a line of it is damaged.
        FileExistsError: if the folder holds something else than a run.
        OSError: if another process writes to the folder, or it cannot be written to.
    """

    def __init__(self, path: str | Path, about: dict[str, Any], overwrite: bool = False):
        self.path = Path(path)
        self.file = self.path / TRAJECTORIES
        if self.path.exists() and not self.path.is_dir():
            raise FileExistsError(f"{self.path} is a file: name a folder.")
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = FileLock(self.path / ".lock", timeout=0)
        try:
            self._lock.acquire()
        except Timeout as error:
            raise OSError(f"Another process writes to {self.path}: wait for it, or name another folder.") from error
        try:
            self._open(json.loads(json.dumps(about)), overwrite)
        except BaseException:
            self._lock.release()
            raise

    def _open(self, about: dict[str, Any], overwrite: bool) -> None:
        begun = self.path / _ABOUT
        if overwrite:
            for name in (SFT, SFT_NO_MEMORY, SUMMARY, SUMMARY_TABLE, TRAJECTORIES):
                (self.path / name).unlink(missing_ok=True)
        elif begun.exists():
            try:
                before = json.loads(begun.read_text(encoding="utf-8"))
            except ValueError as error:
                raise ValueError(f"{begun} is damaged ({error}): name another folder, or begin anew.") from error
            for name in {**before, **about}:
                if before.get(name) != about.get(name):
                    raise ValueError(
                        f"{self.path} was begun with another {name} ({short(before.get(name))}, now "
                        f"{short(about.get(name))}): name another folder, or begin anew (overwrite)."
                    )
        elif self.file.exists():
            raise FileExistsError(f"{self.file} exists, but not {begun.name}: name another folder.")
        if not begun.exists() or overwrite:
            temporary = begun.with_name(f".{begun.name}.tmp")
            temporary.write_text(json.dumps(about, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
            temporary.replace(begun)
        self.records: list[Record] = list(read_trajectories(self.path, repair=True)) if self.file.exists() else []
        self._out = self.file.open("a", encoding="utf-8")

    def append(self, record: Record) -> None:
        """Add an episode. Once this returns, it survives whatever happens to the process."""
        try:
            self._out.writelines(json_lines([record]))
            self._out.flush()
        except OSError as error:  # of a full disk, which does not know the file's name
            raise OSError(error.errno, error.strerror, str(self.file)) from error
        self.records.append(record)

    def write(self, name: str, pieces: Iterable[str]) -> None:
        """Write another file, which appears whole or not at all."""
        write_whole(self.path / name, pieces)

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(self, *exception: object) -> None:
        with contextlib.suppress(OSError):  # `append` has flushed all but what it failed to write, and said so
            self._out.close()
        self._lock.release()


def write_whole(file: Path, pieces: Iterable[str]) -> None:
    """Write a text file that appears whole or not at all."""
    temporary = file.with_name(f".{file.name}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as out:
            out.writelines(pieces)
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)


def json_lines(rows: Iterable[Any]) -> Iterator[str]:
    """Each row as a line of JSON that any encoding can write: lone surrogates become question marks."""
    for row in rows:
        yield clean_text(json.dumps(row, ensure_ascii=False)) + "\n"


def read_trajectories(path: str | Path, repair: bool = False) -> Iterator[Record]:
    """Read the episodes of a run.

    The unfinished line that a killed run ends in is left out.

    Args:
        path: the run's folder.
        repair: whether to cut that line off the file as well.

    Raises:
        FileNotFoundError: if there is no run in the folder.
        ValueError: if another line is damaged; it is named.
    """
    file = Path(path) / TRAJECTORIES
    if not file.is_file():
        raise FileNotFoundError(f"There is no {TRAJECTORIES} in {path}: name the folder of a run.")
    whole = 0
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.endswith(b"\n"):
                break
            whole += len(line)
            try:
                record = json.loads(line)
                record["id"], record["sample"], record["steps"]
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise ValueError(f"Line {number} of {file} is damaged ({error!r}): remove the line.") from error
            yield record
    if repair and whole < file.stat().st_size:
        os.truncate(file, whole)


def short(value: Any) -> str:
    """A value in a message."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else text[:77] + "…"
