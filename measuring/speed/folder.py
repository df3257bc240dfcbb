# SPDX-License-Identifier: Apache-2.0
"""The folder of a `tessera bench` run."""

from datetime import datetime
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict

from measuring.kit import folder
from measuring.kit.folder import RUN, FolderError, RecordFile
from measuring.speed.samples import Sample

SAMPLES = "samples.jsonl"
_DERIVED = ("summary.json", "trace.jsonl")


class WorkloadRun(BaseModel):
    """Title, axis and sizes of one workload; see :class:`measuring.speed.workloads.base.Workload`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    title: str
    axis: str
    sizes: dict[str, Any]


class Run(BaseModel):
    """Description of a run: ``complete`` once all was measured, else ``stopped_by`` may say why not."""

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
    """Folder of a new run, partial until marked as complete; a context manager.

    ``overwrite`` removes what an earlier run has left. Raises :class:`FolderError`.
    """

    def __init__(self, path: Path, run: Run, overwrite: bool = False) -> None:
        self.path = path
        self.run = run
        self.num_samples = 0
        folder.make(path)
        with folder.errors():
            if overwrite:
                _remove_run(path)
            elif left := [name for name in (RUN, SAMPLES) if (path / name).exists()]:
                raise FolderError(f"{path} has {left[0]} of another run; {folder.ADVICE}")
            self.mark()
            self._samples = RecordFile(path / SAMPLES)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._samples.close()

    def record(self, sample: Sample) -> None:
        """Keeps the sample; it is in the file when this returns."""
        self._samples.append(sample)
        self.num_samples += 1

    def mark(self, **changes: Any) -> None:
        """Writes ``run.json`` with these fields changed."""
        self.run = self.run.model_copy(update=changes)
        folder.write_run(self.path, self.run)


def read_run(path: Path) -> tuple[Run, list[Sample]]:
    """Description and samples; raises ``OSError`` or ``ValueError`` if the folder isn't a run's."""
    return Run.model_validate_json((path / RUN).read_bytes()), folder.read_records(path / SAMPLES, Sample)


def _remove_run(path: Path) -> None:
    # Samples first: those that are left without their run would look like another's.
    folder.remove(path, (SAMPLES, *_DERIVED, RUN))
