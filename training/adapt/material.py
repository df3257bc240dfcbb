# SPDX-License-Identifier: Apache-2.0
"""Prompts for training, made from any documents: chunks as the server cuts them, and tasks about their sentences.

No labels are needed, since the teacher is the model's own full attention. A task asks for something that is in the
chunks, in one of them or in several, so that the model has to read them.
"""

import asyncio
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

from app.documents.document import Document
from app.documents.extraction import Extraction
from app.documents.readers import READERS, UnreadableFileError
from app.prompt.tokenization import SegmentTokenizer
from cache.positions.layout import Chunk, ChunkedPrompt, TokenIds
from measuring.quality.metrics import REFUSAL
from measuring.quality.questions.questions import Question
from training.adapt.rows import Branch

LEAST_PASSAGES: Final = 16
"""With fewer passages there is too little to learn from, and nothing to hold out."""
_SYSTEMS: Final = (
    "You answer questions about the documents below. Keep answers short.",
    "Answer from the documents.",
    "You are a helpful assistant. Use the documents below.",
)
_ABOUT: Final = ("What do the documents say about {}?", "Tell me about {}.", "What is known about {}?")
_BLANK: Final = ('Fill in the blank: "{}"', 'Which words are missing here? "{}"', 'Complete from the documents: "{}"')
_CONTINUE: Final = ('Continue this sentence from the documents: "{}"', 'How does this go on? "{}"')
_BOTH: Final = ("What do the documents say about {}, and what about {}?", "Tell me about {} and {}.")
_COUNT: Final = ("How many of the documents mention {}?", "In how many of the documents does {} occur?")
_SENTENCE: Final = re.compile(r"(?<=[.!?])\s+|\n\s*\n")
_MOST_ANSWER_TOKENS: Final = 48
_ACROSS: Final = 0.4
"""Share of tasks about several passages."""
_HELD_OUT: Final = 10
_BLOCKS: Final = (None, 16, 32)
"""Sizes of blocks that are shared in place, to which white space pads segments."""


Part = Literal["train", "heldout"]
T = TypeVar("T")


class MaterialError(ValueError):
    """The documents can't be used; the message says why."""


@dataclass(frozen=True, slots=True)
class Task:
    """A question and its answer, from the chunks."""

    question: str
    answer: str


def read_passages(folder: Path, tokenizer: SegmentTokenizer, most_tokens: int) -> list[Document]:
    """The folder's files in passages of at most ``most_tokens``.

    Raises :class:`MaterialError`.
    """
    if not folder.is_dir():
        raise MaterialError(f"{folder} is not a folder")

    extraction = Extraction(tokenizer.json)
    passages = list[Document]()
    try:
        for path in sorted(each for each in folder.rglob("*") if each.suffix.lower() in READERS):
            pieces = asyncio.run(extraction.split(path.read_bytes(), path.name, most_tokens))
            passages += [Document(piece.text, None, piece.title) for piece in pieces]
    except (OSError, UnreadableFileError) as error:
        raise MaterialError(f"{path}: {error}") from error
    finally:
        extraction.close()
    if len(passages) < LEAST_PASSAGES:
        what = f"{len(passages)} passages of at most {most_tokens} tokens"
        raise MaterialError(f"{folder} has {what}; {LEAST_PASSAGES} are needed: give more files")
    return passages


def tasks_of(text: str, rng: random.Random) -> Iterator[Task]:
    """Tasks about one passage, endlessly, each about a random sentence."""
    sentences = _sentences(text)
    while True:
        sentence = rng.choice(sentences)
        words = sentence.split()
        kind = rng.random()
        if kind < 0.4 and len(words) >= 6:
            start = rng.randrange(1, len(words) - 1)
            end = min(len(words), start + rng.randint(1, 3))
            blank = " ".join([*words[:start], "____", *words[end:]])
            yield Task(rng.choice(_BLANK).format(blank), " ".join(words[start:end]).strip(".,;:"))
        elif kind < 0.7 and (names := _names(words)):
            yield Task(rng.choice(_ABOUT).format(rng.choice(names)), sentence)
        else:
            cut = rng.randint(2, max(2, len(words) // 2))
            yield Task(rng.choice(_CONTINUE).format(" ".join(words[:cut]) + " …"), " ".join(words[cut:]) or sentence)


def task_across(texts: Sequence[str], rng: random.Random) -> Task:
    """A task about several passages: what two of them say, or how many mention something."""
    sentences = [rng.choice(_sentences(text)) for text in rng.sample(texts, 2)]
    names = [rng.choice(_names(sentence.split()) or sentence.split() or [sentence]) for sentence in sentences]
    if rng.random() < 0.5:
        return Task(rng.choice(_BOTH).format(*names), " ".join(sentences))
    counted = sum(names[0].lower() in text.lower() for text in texts)
    return Task(rng.choice(_COUNT).format(names[0]), str(counted))


def _sentences(text: str) -> list[str]:
    return [each.strip() for each in _SENTENCE.split(text) if len(each.split()) >= 5] or [text.strip()]


def _names(words: Sequence[str]) -> list[str]:
    """Words inside the sentence that look like names: capitals, figures, or just long."""
    plain = [word.strip(".,;:()\"'") for word in words[1:]]
    return [word for word in plain if word[:1].isupper() or any(map(str.isdigit, word)) or len(word) > 8]


class Template:
    """The model's chat template and tokenizer: prompts as segments, as the server makes them."""

    def __init__(self, tokenizer: Any) -> None:
        if not tokenizer.chat_template:
            raise MaterialError("the model has no chat template, so it can't be asked questions over documents")
        self._tokenizer = tokenizer
        self.segments = SegmentTokenizer(tokenizer)

    def prompt(self, system: str, documents: Sequence[Document]) -> ChunkedPrompt:
        """System segment and chunks; the question is a place holder."""
        before, _ = self._around(system, "")
        chunks = tuple(Chunk(self.segments.pack_document(each.render(), "adapt")) for each in documents)
        return ChunkedPrompt(self.segments.encode_template(before), chunks, (0,))

    def branch(self, system: str, task: Task) -> Branch:
        """A question with its ended answer."""
        _, after = self._around(system, task.question)
        answer = self.segments.encode_document(task.answer)[:_MOST_ANSWER_TOKENS]
        return Branch(self.segments.encode_template(after), (*answer, *self._end))

    @property
    def _end(self) -> TokenIds:
        end = self._tokenizer.eos_token_id
        return () if end is None else (int(end),)

    def _around(self, system: str, question: str) -> tuple[str, str]:
        """The rendered text before the chunks, and from the question on."""
        mark = "[tessera-documents]"
        messages = [{"role": "system", "content": system}, {"role": "user", "content": mark + question}]
        text = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        before, found, after = text.partition(mark)
        if not found or mark in after:
            raise MaterialError("the model's chat template doesn't print the user's message once, unchanged")
        return before, after


@dataclass(frozen=True, slots=True)
class Sample:
    """A prompt with several branches about its chunks.

    Where chunks can be shared in place, the server would pad the segments to blocks of ``block_tokens``.
    """

    prompt: ChunkedPrompt
    branches: tuple[Branch, ...]
    block_tokens: int | None = None


class Material:
    """Samples by seed and step, so that training can resume; every tenth passage and question is held out.

    ``chunks`` are the numbers of chunks in a prompt. With ``questions``, about every second sample is one of them.
    """

    def __init__(
        self,
        passages: Sequence[Document],
        template: Template,
        chunks: Sequence[int],
        num_tasks: int,
        questions: Sequence[Question] = (),
    ) -> None:
        self._template, self._chunks, self._num_tasks = template, chunks, num_tasks
        self._passages, self._questions = _divided(passages), _divided(questions)

    def sample(self, part: Part, seed: int, number: int) -> Sample:
        """One of the samples of a part."""
        rng = random.Random(f"{part} {seed} {number}")
        passages = self._passages[part]
        number_of_chunks = min(rng.choice(self._chunks), len(passages))
        # As retrieval finds them: of one subject, or of several.
        first = rng.randrange(len(passages) - number_of_chunks + 1)
        found = passages[first : first + number_of_chunks] if rng.random() < 0.5 else passages
        documents = rng.sample(found, number_of_chunks)
        system, tasks = rng.choice(_SYSTEMS), []
        if (questions := self._questions[part]) and rng.random() < 0.5:
            asked = rng.choice(questions)
            documents, system = list(asked.chunks), asked.system or system
            tasks.append(Task(asked.question, asked.answers[0] if asked.answers else REFUSAL))
        texts = [each.text for each in documents]
        while len(tasks) < self._num_tasks:
            is_across = len(texts) > 1 and rng.random() < _ACROSS
            tasks.append(task_across(texts, rng) if is_across else next(tasks_of(rng.choice(texts), rng)))
        branches = tuple(self._template.branch(system, task) for task in tasks)
        return Sample(self._template.prompt(system, documents), branches, rng.choice(_BLOCKS))


def _divided(every: Sequence[T]) -> dict[Part, list[T]]:
    held_out = list(every[::_HELD_OUT])
    return {"train": [each for number, each in enumerate(every) if number % _HELD_OUT], "heldout": held_out}
