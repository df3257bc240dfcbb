# SPDX-License-Identifier: Apache-2.0
"""The folder of a run: `run.json` says what is measured, `samples.jsonl` has the samples, each written at once."""

from datetime import datetime
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict

from measuring.speed.samples import Sample

RUN, SAMPLES = "run.json", "samples.jsonl"
_DERIVED = ("summary.json", "report.html", "trace.jsonl")


class FolderError(ValueError):
    """The folder can't take this run; the message says why. Nothing in it was changed."""


class WorkloadRun(BaseModel):
    """What is measured by one workload; see :class:`measuring.speed.workloads.base.Workload`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    title: str
    axis: str
    sizes: dict[str, Any]


class Run(BaseModel):
    """What is measured, of what, and where; ``complete`` once all of it was, else ``stopped_by`` may say why not."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    command: tuple[str, ...]
    model: str
    flags: tuple[str, ...]
    seed: int
    is_long: bool
    workloads: dict[str, WorkloadRun]
    tessera: str
    vllm: str | None = None
    """``None`` until a server was asked."""
    cpu: str
    cores: int
    started_at: datetime
    complete: bool = False
    stopped_by: str | None = None


class RunFolder:
    """The folder of a new run, partial until it is marked as complete; a context manager.

    ``overwrite`` removes what an earlier run has left. Raises :class:`FolderError`.
    """

    def __init__(self, path: Path, run: Run, overwrite: bool = False) -> None:
        self.path = path
        self.run = run
        self.num_samples = 0
        try:
            path.mkdir(parents=True, exist_ok=True)
            if overwrite:
                _remove_run(path)
            elif left := [name for name in (RUN, SAMPLES) if (path / name).exists()]:
                raise FolderError(f"{path} has {left[0]} of another run; give another --output, or --overwrite")
            self.mark()
            self._file = (path / SAMPLES).open("a", encoding="utf-8")
        except OSError as error:
            raise FolderError(f"{error.filename}: {error.strerror}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def record(self, sample: Sample) -> None:
        """Keeps the sample; it is in the file when this returns."""
        self._file.write(sample.model_dump_json() + "\n")
        self._file.flush()
        self.num_samples += 1

    def mark(self, **changes: Any) -> None:
        """Writes ``run.json`` with these fields changed."""
        self.run = self.run.model_copy(update=changes)
        # In one step: a reader, or a crash, must not find half a file.
        new = self.path / f"{RUN}.new"
        new.write_text(self.run.model_dump_json(indent=1) + "\n", encoding="utf-8")
        new.replace(self.path / RUN)


def read_run(path: Path) -> tuple[Run, list[Sample]]:
    """What the folder has; raises ``OSError`` or ``ValueError`` if that isn't a run."""
    run = Run.model_validate_json((path / RUN).read_bytes())
    lines = (path / SAMPLES).read_text(encoding="utf-8").splitlines()
    return run, [Sample.model_validate_json(line) for line in lines]


def _remove_run(path: Path) -> None:
    # Samples first: those that are left without their run would look like another's.
    plots = [f"{name}.png" for name in _workloads(path / RUN)]
    for name in (SAMPLES, *_DERIVED, *plots, RUN):
        (path / name).unlink(missing_ok=True)


def _workloads(file: Path) -> list[str]:
    """Of the run that is to be removed, if this is its description."""
    try:
        return list(Run.model_validate_json(file.read_bytes()).workloads)
    except (OSError, ValueError):
        return []
