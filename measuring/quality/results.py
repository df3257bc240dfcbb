# SPDX-License-Identifier: Apache-2.0
"""The folder of a `tessera eval` run, which may be resumed."""

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from app.modes import mode_of
from measuring.kit import folder
from measuring.kit.client import Answer
from measuring.kit.folder import RUN, FolderError, RecordFile
from measuring.quality.client import Judged
from measuring.quality.questions.questions import Question

RESULTS, SUMMARY, PLOT, LOG = "results.jsonl", "summary.json", "accuracy.png", "server.log"

Key = tuple[str, str]
"""A question's id, and the mode it was asked in."""


class RunSettings(BaseModel):
    """Settings that may change the answers or their times. A run is resumed with the same settings only."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    questions: str
    questions_sha256: str
    modes: tuple[str, ...]
    model: str | None
    server_arguments: tuple[str, ...]
    served_model: str
    max_tokens: int
    refusal: str
    concurrency: int
    tessera: str
    vllm: str


class Result(BaseModel):
    """The outcome of one question in one mode: an answer, or the server's ``error``. ``chunks`` is their number."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    question: str
    mode: str
    chunks: int
    answers: tuple[str, ...]
    kind: str | None = None
    text: str = ""
    logprob: float | None = None
    """Log probability of the first right answer, or of a refusal if that is right, in nats; ``None`` if unknown."""
    top_logprobs: tuple[dict[str, float], ...] = ()
    """Log probabilities of likely tokens at each token of that answer."""
    ttft_s: float | None = None
    total_s: float | None = None
    cache: dict[str, Any] | None = None
    error: str | None = None

    @classmethod
    def of_answer(cls, question: Question, mode: str, answer: Answer, judged: Judged | None) -> "Result":
        """The result of a question that was answered, in whatever mode."""
        return cls(
            **_asked(question, mode),
            text=answer.text,
            logprob=judged and judged.logprob,
            top_logprobs=judged.top_logprobs if judged else (),
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
        """The mode it ran in: ``full`` also for a fallback to full attention."""
        return None if self.cache is None else mode_of(self.cache)


def _asked(question: Question, mode: str) -> dict[str, Any]:
    return {
        "question": question.id,
        "mode": mode,
        "chunks": len(question.chunks),
        "answers": question.answers,
        "kind": question.kind,
    }


class ResultsFolder:
    """Opens a new folder, or an unfinished one of the same settings.

    ``overwrite`` removes what a run has left first. Raises :class:`measuring.kit.folder.FolderError`.
    """

    def __init__(self, path: Path, settings: RunSettings, overwrite: bool = False) -> None:
        self.path = path
        self.settings = settings
        self.results: dict[Key, Result] = {}
        with folder.errors():
            if overwrite:
                folder.remove(path, (RESULTS, RUN, SUMMARY, PLOT))
            folder.make(path)
            self._check()
            if (path / RESULTS).exists():
                self.results = {result.key: result for result in folder.read_records(path / RESULTS, Result)}
            if not (path / RUN).exists():
                folder.write_run(path, settings)
            self._file = RecordFile(path / RESULTS)

    def append(self, result: Result) -> None:
        """Keeps the result; it is in the file when this returns."""
        self.results[result.key] = result
        self._file.append(result)

    def answered(self) -> set[Key]:
        """Questions that need not be asked again. Refused ones are: the server may be another one now."""
        return {key for key, result in self.results.items() if result.error is None}

    def close(self) -> None:
        self._file.close()

    def _check(self) -> None:
        if not (self.path / RUN).exists():
            if (self.path / RESULTS).exists():
                raise FolderError(f"{self.path} has results, but no {RUN} says of what; {folder.ADVICE}")
            return
        try:
            before = RunSettings.model_validate_json((self.path / RUN).read_bytes()).model_dump()
        except ValidationError as error:
            raise FolderError(f"{self.path / RUN} isn't a run's description; {folder.ADVICE}") from error
        changes = [
            f"{n} was {before[n]!r}, is {now!r}" for n, now in self.settings.model_dump().items() if before[n] != now
        ]
        if changes:
            raise FolderError(f"{self.path} has results of another run: {'; '.join(changes)}. {folder.ADVICE}")
