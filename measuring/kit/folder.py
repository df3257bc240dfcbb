# SPDX-License-Identifier: Apache-2.0
"""The folder of a run: `run.json` describes it, JSON lines hold its records."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, TypeVar

from pydantic import BaseModel, ValidationError

from machine.progress import say

RUN: Final = "run.json"
ADVICE: Final = "give another --output, or --overwrite"

Model = TypeVar("Model", bound=BaseModel)


class FolderError(ValueError):
    """The folder can't take this run; the message says why. Nothing in it was changed."""


class RecordFile:
    """A file of JSON lines that is appended to."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def append(self, record: BaseModel) -> None:
        """Keeps the record; it is in the file when this returns."""
        self._file.write(record.model_dump_json() + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def make(path: Path) -> None:
    """Makes the folder, unless it is there; raises :class:`FolderError` if it can't be."""
    with errors():
        path.mkdir(parents=True, exist_ok=True)


@contextmanager
def errors() -> Iterator[None]:
    """Turns each ``OSError`` into a :class:`FolderError`."""
    try:
        yield
    except OSError as error:
        raise FolderError(f"{error.filename}: {error.strerror}") from error


def remove(folder: Path, names: Iterable[str]) -> None:
    """Removes these files, in this order."""
    for name in names:
        (folder / name).unlink(missing_ok=True)


def write_run(folder: Path, run: BaseModel) -> None:
    """Writes the description atomically: neither a reader nor a crash finds half a file."""
    new = folder / f"{RUN}.new"
    new.write_text(run.model_dump_json(indent=1) + "\n", encoding="utf-8")
    new.replace(folder / RUN)


def read_records(path: Path, model: type[Model]) -> list[Model]:
    """The records of a file; cuts off a last line that a crash has torn. Raises :class:`FolderError`."""
    whole, newline, torn = path.read_bytes().rpartition(b"\n")
    records = []
    for number, line in enumerate(whole.split(b"\n") if newline else [], 1):
        try:
            records.append(model.model_validate_json(line))
        except ValidationError as error:
            raise FolderError(f"{path}, line {number}: isn't a record; {ADVICE}") from error
    if torn:
        say(f"{path}: dropped the last line, which was torn")
        path.write_bytes(whole + newline)
    return records
