# SPDX-License-Identifier: Apache-2.0
"""The folder of a run: `run.json` says what was asked, `results.jsonl` has the results, each written at once."""

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from app.modes import mode_of
from measuring.kit.client import Answer
from measuring.quality.client import ChunkOrder
from measuring.quality.questions.questions import Question
from tools.progress import say

RUN, RESULTS, SUMMARY, PLOT, LOG = "run.json", "results.jsonl", "summary.json", "accuracy.png", "server.log"

_ADVICE = "give another --output, or --overwrite"

Key = tuple[str, str]
"""A question's id, and the mode it was asked in."""


class ResultsError(ValueError):
    """The folder can't take this run's results; the message says why. Nothing in it was changed."""


class RunSettings(BaseModel):
    """All that may change the answers or their times. A run is resumed with the same settings only."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    questions: str
    questions_sha256: str
    modes: tuple[str, ...]
    model: str | None
    server_arguments: tuple[str, ...]
    served_model: str
    max_tokens: int
    order: ChunkOrder
    concurrency: int
    tessera: str
    vllm: str


class Result(BaseModel):
    """What came of one question in one mode: an answer, or the server's ``error``. ``chunks`` is their number."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    question: str
    mode: str
    chunks: int
    answers: tuple[str, ...]
    text: str = ""
    logprob: float | None = None
    """Of the first right answer, in nats; ``None`` if there is none, or the server could not be made to say it."""
    ttft_s: float | None = None
    total_s: float | None = None
    cache: dict[str, Any] | None = None
    error: str | None = None

    @classmethod
    def of_answer(cls, question: Question, mode: str, answer: Answer, logprob: float | None = None) -> "Result":
        """The result of a question that was answered, in whatever mode."""
        return cls(
            **_asked(question, mode),
            text=answer.text,
            logprob=logprob,
            ttft_s=answer.ttft_s,
            total_s=answer.total_s,
            cache=answer.cache,
        )

    @classmethod
    def of_error(cls, question: Question, mode: str, message: str) -> "Result":
        """The result of a question that the server refused."""
        return cls(**_asked(question, mode), error=message)

    @property
    def key(self) -> Key:
        return self.question, self.mode

    @property
    def ran_as(self) -> str | None:
        """The mode it ran in: ``full`` for an answer that was to reuse chunks, but fell back to full attention."""
        return None if self.cache is None else mode_of(self.cache)


def _asked(question: Question, mode: str) -> dict[str, Any]:
    return {"question": question.id, "mode": mode, "chunks": len(question.chunks), "answers": question.answers}


def make_folder(path: Path) -> None:
    """Makes the folder, unless it is there; raises :class:`ResultsError` if it can't be."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ResultsError(f"{error.filename}: {error.strerror}") from error


class ResultsFolder:
    """Opens a new folder, or one that a run with the same settings has left unfinished.

    ``overwrite`` removes what a run has left first. Raises :class:`ResultsError`.
    """

    def __init__(self, path: Path, settings: RunSettings, overwrite: bool = False) -> None:
        self.path = path
        self.settings = settings
        try:
            if overwrite:
                self._remove()
            make_folder(path)
            self._check()
            self.results = self._read()
            if not (path / RUN).exists():
                (path / RUN).write_text(settings.model_dump_json(indent=1) + "\n", encoding="utf-8")
            self._file = (path / RESULTS).open("a", encoding="utf-8")
        except OSError as error:
            raise ResultsError(f"{error.filename}: {error.strerror}") from error

    def append(self, result: Result) -> None:
        """Keeps the result; it is in the file when this returns."""
        self.results[result.key] = result
        self._file.write(result.model_dump_json() + "\n")
        self._file.flush()

    def answered(self) -> set[Key]:
        """What need not be asked again. Refused questions are: the server may be another one now."""
        return {key for key, result in self.results.items() if result.error is None}

    def close(self) -> None:
        self._file.close()

    def _remove(self) -> None:
        for name in (RESULTS, RUN, SUMMARY, PLOT):
            (self.path / name).unlink(missing_ok=True)

    def _check(self) -> None:
        if not (self.path / RUN).exists():
            if (self.path / RESULTS).exists():
                raise ResultsError(f"{self.path} has results, but no {RUN} says of what; {_ADVICE}")
            return
        try:
            before = RunSettings.model_validate_json((self.path / RUN).read_bytes()).model_dump()
        except ValidationError as error:
            raise ResultsError(f"{self.path / RUN} isn't a run's description; {_ADVICE}") from error
        changes = [
            f"{n} was {before[n]!r}, is {now!r}" for n, now in self.settings.model_dump().items() if before[n] != now
        ]
        if changes:
            raise ResultsError(f"{self.path} has results of another run: {'; '.join(changes)}. {_ADVICE}")

    def _read(self) -> dict[Key, Result]:
        """The results so far; a torn last line, left by a crash, is removed."""
        file = self.path / RESULTS
        if not file.exists():
            return {}
        lines = file.read_bytes().split(b"\n")
        results = {}
        for number, line in enumerate(lines[:-1], 1):
            try:
                result = Result.model_validate_json(line)
            except ValidationError as error:
                raise ResultsError(f"{file}, line {number}: isn't a result; {_ADVICE}") from error
            results[result.key] = result
        if lines[-1]:
            say(f"{file}: dropped the last line, which was torn")
            _truncate(file, sum(len(line) + 1 for line in lines[:-1]))
        return results


def _truncate(file: Path, size_bytes: int) -> None:
    with file.open("r+b") as opened:
        opened.truncate(size_bytes)
