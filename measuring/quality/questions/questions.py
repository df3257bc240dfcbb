# SPDX-License-Identifier: Apache-2.0
"""Questions with documents, and Tessera's own format of them: JSON lines."""

import hashlib
import json
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from app.documents.document import Document
from measuring.quality.questions.records import QuestionFileError, Record, Text, checked


@dataclass(frozen=True, slots=True)
class Question:
    """A question behind chunks. Any of ``answers`` is right; with none of them, no chunk has it: refusing is right."""

    id: str
    system: str
    chunks: tuple[Document, ...]
    question: str
    answers: tuple[str, ...]
    kind: str | None = None
    """Results are also reported by kind."""


class QuestionRecord(BaseModel):
    """A record of a question file; a subclass is a format."""

    @abstractmethod
    def to_question(self, number: int) -> Question:
        """``number`` is the record's place in the file, counted from 1."""


def _as_object(chunk: Any) -> Any:
    if isinstance(chunk, str):
        return {"text": chunk}
    if isinstance(chunk, dict):
        return chunk
    raise PydanticCustomError("chunk", "must be a string or an object with a text")


class _ChunkRecord(BaseModel):
    model_config = ConfigDict(extra="forbid")

    text: Text
    title: str | None = None


class JsonlRecord(QuestionRecord):
    """Tessera's own format; see ``docs/quality.md``."""

    model_config = ConfigDict(extra="forbid")

    id: Text | None = None
    system: str = ""
    chunks: list[Annotated[_ChunkRecord, BeforeValidator(_as_object)]] = Field(min_length=1)
    question: Text
    answers: list[Text] | None = None
    answer: Text | None = None
    kind: Text | None = None
    metadata: Any = None

    @model_validator(mode="after")
    def _has_answers(self) -> "JsonlRecord":
        if (self.answers is None) == (self.answer is None):
            message = "needs either answers (a list; empty if no chunk has the answer) or answer (a string)"
            raise PydanticCustomError("answers", message)
        return self

    def to_question(self, number: int) -> Question:
        chunks = tuple(Document(chunk.text, title=chunk.title) for chunk in self.chunks)
        answers = self.answers if self.answer is None else [self.answer]
        return Question(self.id or str(number), self.system, chunks, self.question, tuple(answers or ()), self.kind)


def to_questions(records: Iterable[Record], model: type[QuestionRecord]) -> list[Question]:
    """Records of one format as questions; raises :class:`QuestionFileError`, also for duplicate ids."""
    questions: list[Question] = []
    places: dict[str, str] = {}
    for record in records:
        question = checked(model, record).to_question(record.number)
        if question.id in places:
            raise QuestionFileError(f"{record.place}, id: {question.id!r} is the id in {places[question.id]} too")
        places[question.id] = record.place
        questions.append(question)
    return questions


def digest(questions: Sequence[Question]) -> str:
    """SHA-256, in hexadecimal, of all that the questions say."""
    return hashlib.sha256(json.dumps([asdict(question) for question in questions]).encode()).hexdigest()
