# SPDX-License-Identifier: Apache-2.0
"""Question files in the formats of public data sets.

- HotpotQA (Yang et al. 2018, arXiv 1809.09600) and 2WikiMultihopQA (Ho et al. 2020, arXiv 2011.01060)
- MuSiQue (Trivedi et al. 2022, arXiv 2108.00573), the answerable and the full version
- LongBench (Bai et al. 2024, arXiv 2308.14508), its question-answering sets
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

from pydantic import BaseModel, Field, StrictBool

from app.documents.document import Document
from measuring.quality.metrics import REFUSAL
from measuring.quality.questions.questions import JsonlRecord, Question, QuestionRecord, to_questions
from measuring.quality.questions.records import QuestionFileError, Record, Text, read_records

CHUNK_CHARACTERS = 2000
"""About so long are the chunks of a LongBench context that isn't divided into passages."""

_PASSAGE = re.compile(r"^Passage \d+:[ \t]*\n", re.MULTILINE)


class _HotpotRecord(QuestionRecord):
    id: Text = Field(alias="_id")
    question: Text
    answer: Text
    context: list[tuple[str, list[str]]] = Field(min_length=1)

    def to_question(self, number: int) -> Question:
        told = ((title, " ".join(map(str.strip, sentences))) for title, sentences in self.context)
        chunks = _with_text(Document(text, title=title) for title, text in told)
        return Question(self.id, "", chunks, self.question, (self.answer,))


class _Paragraph(BaseModel):
    title: str
    paragraph_text: str


class _MusiqueRecord(QuestionRecord):
    id: Text
    question: Text
    answer: Text
    answer_aliases: tuple[str, ...] = ()
    answerable: StrictBool = True
    paragraphs: list[_Paragraph] = Field(min_length=1)

    def to_question(self, number: int) -> Question:
        chunks = _with_text(Document(paragraph.paragraph_text, title=paragraph.title) for paragraph in self.paragraphs)
        if not self.answerable:  # the full version has it twice, answerable and not, under one id
            return Question(f"{self.id} (unanswerable)", "", chunks, self.question, ())
        answers = [answer for answer in (self.answer, *self.answer_aliases) if answer.strip()]
        return Question(self.id, "", chunks, self.question, tuple(answers))


class _LongBenchRecord(QuestionRecord):
    id: Text = Field(alias="_id")
    input: Text
    context: Text
    answers: list[Text] = Field(min_length=1)

    def to_question(self, number: int) -> Question:
        chunks = tuple(_passages(self.context)) or tuple(_pieces(self.context))
        # Qasper's word for it.
        answers = [] if set(self.answers) == {"unanswerable"} else self.answers
        return Question(self.id, "", chunks, self.input, tuple(answers))


_FORMATS: Final[tuple[tuple[str, set[str], type[QuestionRecord]], ...]] = (
    ("Tessera's own", {"chunks"}, JsonlRecord),
    ("MuSiQue", {"paragraphs"}, _MusiqueRecord),
    ("LongBench", {"input", "context"}, _LongBenchRecord),
    ("HotpotQA, 2WikiMultihopQA", {"context"}, _HotpotRecord),
)
"""A file is of the first format all of whose fields here its first record has."""


def load_questions(path: Path, refusal: str = REFUSAL) -> list[Question]:
    """The questions of a file of any known format.

    Public data sets have no system prompt: theirs asks for short answers, and for ``refusal`` if there is none.
    Raises :class:`QuestionFileError`, which names file, line or record, and field.
    """
    records = read_records(path)
    kind = _detected(records[0])
    questions = to_questions(records, kind)
    if kind is JsonlRecord:
        return questions
    for record, question in zip(records, questions, strict=True):
        if not question.chunks:
            raise QuestionFileError(f"{record.place}: has no document with text in it")
    return [replace(question, system=_instruction(refusal)) for question in questions]


def _instruction(refusal: str) -> str:
    return f"Answer from the documents, in as few words as possible. If they don't have the answer, say: {refusal}"


def _detected(first: Record) -> type[QuestionRecord]:
    fields = set(first.value) if isinstance(first.value, dict) else set()
    for _, signs, kind in _FORMATS:
        if signs <= fields:
            return kind
    known = "; ".join(f"{name} ({', '.join(_required(kind))})" for name, _, kind in _FORMATS)
    raise QuestionFileError(f"{first.place}: is of no known format. Known, with the fields they need: {known}")


def _required(kind: type[QuestionRecord]) -> list[str]:
    return [field.alias or name for name, field in kind.model_fields.items() if field.is_required()]


def _with_text(chunks: Iterable[Document]) -> tuple[Document, ...]:
    """Data sets have an empty paragraph now and then."""
    return tuple(chunk for chunk in chunks if chunk.text.strip())


def _passages(context: str) -> Iterator[Document]:
    """Passages under headings ``Passage N:``, titled by their first line; none after other text."""
    before, *passages = _PASSAGE.split(context)
    if before.strip():
        return
    for passage in map(str.strip, passages):
        title, _, text = passage.partition("\n")
        if text.strip():
            yield Document(text.strip(), title=title.strip())
        elif title:
            yield Document(title)


def _pieces(context: str) -> Iterator[Document]:
    """Paragraphs together until they have :data:`CHUNK_CHARACTERS`; a longer paragraph stays whole."""
    piece = ""
    for paragraph in filter(str.strip, context.split("\n")):
        piece = f"{piece}\n{paragraph}" if piece else paragraph
        if len(piece) >= CHUNK_CHARACTERS:
            yield Document(piece)
            piece = ""
    if piece:
        yield Document(piece)
