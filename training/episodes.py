# SPDX-License-Identifier: Apache-2.0
"""Episodes: documents and many questions that are answered from these documents alone."""

import random
from dataclasses import dataclass

from app.documents.document import Document
from training.language import (
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


@dataclass(slots=True)
class _Entity:
    name: str
    kind: str
    untold: list[str]


def make_episode(rng: random.Random, split: Split, shape: Shape) -> Episode:
    """Draws an episode with names of `split` only."""
    words = Words(rng, split)
    kinds = rng.sample(KINDS, rng.choice((1, 1, 2, len(KINDS))))
    entities: list[_Entity] = []
    told = [_document_facts(words, kinds, entities, shape) for _ in range(shape.chunks)]
    documents = tuple(_document(rng, facts, shape) for facts in told)
    facts = [fact for facts in told for fact in facts]
    unknown = sum(rng.random() < shape.unknown for _ in range(shape.questions))
    known = rng.sample(facts, min(shape.questions - unknown, len(facts)))
    questions = [_question(rng, fact, fact.value, shape) for fact in known]
    questions += [_question(rng, _untold_fact(words, entities, facts), None, shape) for _ in range(unknown)]
    rng.shuffle(questions)
    system = rng.choice(SYSTEM_PROMPTS) if shape.extras and rng.random() < 0.5 else DEFAULT_SYSTEM
    return Episode(system, documents, tuple(questions))


def _document_facts(words: Words, kinds: list[str], entities: list[_Entity], shape: Shape) -> list[Fact]:
    """Facts about one or two entities, occasionally about an earlier document's entity."""
    count = words.rng.randint(*shape.facts)
    facts: list[Fact] = []
    while len(facts) < count:
        entity = _entity(words, kinds, entities)
        share = count - len(facts)
        if share > 1 and words.rng.random() < 0.3:
            share = words.rng.randint(1, share - 1)
        for _ in range(min(share, len(entity.untold))):
            attribute = entity.untold.pop()
            value = ATTRIBUTES[entity.kind][attribute](words)
            facts.append(Fact(entity.name, attribute, value))
    return facts


def _entity(words: Words, kinds: list[str], entities: list[_Entity]) -> _Entity:
    again = [entity for entity in entities if len(entity.untold) >= 4]
    if again and words.rng.random() < 0.1:
        return words.rng.choice(again)
    entity = _new_entity(words, words.rng.choice(kinds), entities)
    entities.append(entity)
    return entity


def _new_entity(words: Words, kind: str, entities: list[_Entity]) -> _Entity:
    name = words.person() if kind == "person" and words.rng.random() < 0.5 else words.name()
    if any(entity.name == name for entity in entities):
        return _new_entity(words, kind, entities)
    attributes = list(ATTRIBUTES[kind])
    words.rng.shuffle(attributes)
    return _Entity(name, kind, attributes)


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


def _untold_fact(words: Words, entities: list[_Entity], facts: list[Fact]) -> Fact:
    """A fact in no document, about an entity that the documents mention or a new one."""
    entity = words.rng.choice(entities)
    if entity.untold and words.rng.random() < 0.5:
        return Fact(entity.name, words.rng.choice(entity.untold), "")
    return Fact(_new_entity(words, entity.kind, entities).name, words.rng.choice(facts).attribute, "")
