# SPDX-License-Identifier: Apache-2.0
"""Episodes: documents and many questions that are answered from these documents alone."""

import random
from dataclasses import dataclass

from app.documents.document import Document
from measuring.quality.questions.demo_language import (
    ANSWER,
    ATTRIBUTES,
    DEFAULT_SYSTEM,
    FILLERS,
    KINDS,
    QUESTIONS,
    STATEMENTS,
    SYSTEM_PROMPTS,
    UNKNOWN,
    Fact,
    Split,
    Words,
    tell,
)


@dataclass(frozen=True, slots=True)
class Shape:
    """Size and variety of episodes."""

    chunks: int
    questions: int
    facts: tuple[int, int] = (2, 4)
    """Minimum and maximum facts per chunk."""
    statements: int = len(STATEMENTS)
    """Number of statement phrasings in use; `phrasings` likewise for questions."""
    phrasings: int = len(QUESTIONS)
    unknown: float = 0.2
    """Fraction of questions that no document answers."""
    extras: bool = True
    """Whether chunks have titles and filler sentences, and system prompts differ."""


@dataclass(frozen=True, slots=True)
class Question:
    """A question, its full answer, and the value required in the answer (None: unknown)."""

    text: str
    answer: str
    value: str | None


@dataclass(frozen=True, slots=True)
class Episode:
    """Documents, and questions to ask about them one at a time."""

    system: str
    documents: tuple[Document, ...]
    questions: tuple[Question, ...]


@dataclass(frozen=True, slots=True)
class _Entity:
    name: str
    kind: str
    untold: list[str]
    """Attributes that no document has, in random order."""

    def tell(self, words: Words) -> Fact:
        """A fact about the next untold attribute."""
        attribute = self.untold.pop()
        return Fact(self.name, attribute, ATTRIBUTES[self.kind][attribute](words))


class _World:
    """Draws the entities of one episode, and facts about them."""

    def __init__(self, rng: random.Random, split: Split) -> None:
        self._rng = rng
        self._words = Words(rng, split)
        self._kinds = rng.sample(KINDS, rng.choice((1, 1, 2, len(KINDS))))
        self._entities: list[_Entity] = []

    def document_facts(self, least: int, most: int) -> list[Fact]:
        """Facts about one or two entities, occasionally about an earlier document's entity."""
        count = self._rng.randint(least, most)
        facts: list[Fact] = []
        while len(facts) < count:
            entity = self._entity()
            share = count - len(facts)
            if share > 1 and self._rng.random() < 0.3:
                share = self._rng.randint(1, share - 1)
            facts += [entity.tell(self._words) for _ in range(min(share, len(entity.untold)))]
        return facts

    def untold_fact(self, facts: list[Fact]) -> Fact:
        """A fact in no document, about a mentioned entity or a new one."""
        entity = self._rng.choice(self._entities)
        if entity.untold and self._rng.random() < 0.5:
            return Fact(entity.name, self._rng.choice(entity.untold), "")
        return Fact(self._new_entity(entity.kind).name, self._rng.choice(facts).attribute, "")

    def _entity(self) -> _Entity:
        again = [entity for entity in self._entities if len(entity.untold) >= 4]
        if again and self._rng.random() < 0.1:
            return self._rng.choice(again)
        entity = self._new_entity(self._rng.choice(self._kinds))
        self._entities.append(entity)
        return entity

    def _new_entity(self, kind: str) -> _Entity:
        words = self._words
        name = words.person() if kind == "person" and self._rng.random() < 0.5 else words.name()
        if any(entity.name == name for entity in self._entities):
            return self._new_entity(kind)
        attributes = list(ATTRIBUTES[kind])
        self._rng.shuffle(attributes)
        return _Entity(name, kind, attributes)


def make_episode(rng: random.Random, split: Split, shape: Shape) -> Episode:
    """Draws an episode with names of `split` only."""
    world = _World(rng, split)
    told = [world.document_facts(*shape.facts) for _ in range(shape.chunks)]
    documents = tuple(_document(rng, facts, shape) for facts in told)
    facts = [fact for facts in told for fact in facts]
    unknown = sum(rng.random() < shape.unknown for _ in range(shape.questions))
    known = rng.sample(facts, min(shape.questions - unknown, len(facts)))
    questions = [_question(rng, fact, fact.value, shape) for fact in known]
    questions += [_question(rng, world.untold_fact(facts), None, shape) for _ in range(unknown)]
    rng.shuffle(questions)
    system = rng.choice(SYSTEM_PROMPTS) if shape.extras and rng.random() < 0.5 else DEFAULT_SYSTEM
    return Episode(system, documents, tuple(questions))


def _document(rng: random.Random, facts: list[Fact], shape: Shape) -> Document:
    sentences = [tell(STATEMENTS[rng.randrange(shape.statements)], fact) for fact in facts]
    if not shape.extras:
        return Document(" ".join(sentences))
    if rng.random() < 0.2:
        sentences.insert(rng.randint(0, len(sentences)), rng.choice(FILLERS))
    return Document(" ".join(sentences), title=facts[0].entity if rng.random() < 0.3 else None)


def _question(rng: random.Random, fact: Fact, value: str | None, shape: Shape) -> Question:
    text = tell(QUESTIONS[rng.randrange(shape.phrasings)], fact)
    return Question(text, UNKNOWN if value is None else tell(ANSWER, fact), value)
