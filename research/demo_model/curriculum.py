# SPDX-License-Identifier: Apache-2.0
"""Training stages in order; a stage ends when held-out accuracy passes its gate."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from measuring.quality.questions.demo_episodes import Shape, make_episode
from measuring.quality.questions.demo_language import PLAIN_QUESTIONS, PLAIN_STATEMENTS, QUESTIONS, STATEMENTS, Split
from research.demo_model.batches import STRATEGIES, Batch, Encoder, Sample, make_batch, repeat_sample
from research.demo_model.tokenizer import VOCABULARY


@dataclass(frozen=True, slots=True)
class Copying:
    """Continue excerpts of random chunks: find the place by its preceding tokens."""

    alphabet: int
    chunks: int = 2
    branches: int = 12

    def samples(self, rng: random.Random, split: Split, encoder: Encoder, tokens: int) -> list[Sample]:
        """Samples of about `tokens` tokens; `split` is ignored, since nothing can be memorised."""
        del split, encoder
        rows = tokens // (30 * self.chunks + 14 * self.branches)
        arguments = (VOCABULARY, self.alphabet, self.chunks, self.branches)
        return [repeat_sample(rng, *arguments) for _ in range(rows)]


@dataclass(frozen=True, slots=True)
class Answering:
    """Answer questions from documents; one number of chunks per batch. Other fields as in `Shape`."""

    chunks: tuple[int, ...]
    statements: int = len(STATEMENTS)
    phrasings: int = len(QUESTIONS)
    unknown: float = 0.2
    extras: bool = True

    def shape(self, chunks: int) -> Shape:
        questions = min(24, 4 + 3 * chunks)
        return Shape(chunks, questions, (2, 4), self.statements, self.phrasings, self.unknown, self.extras)

    def samples(self, rng: random.Random, split: Split, encoder: Encoder, tokens: int) -> list[Sample]:
        """Samples of about `tokens` tokens with names of `split`."""
        shape = self.shape(rng.choice(self.chunks))
        rows = max(1, tokens // (16 + 40 * shape.chunks + 25 * shape.questions))
        return [encoder.sample(make_episode(rng, split, shape)) for _ in range(rows)]


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of the training."""

    name: str
    task: Copying | Answering
    gate: float
    """Fraction of held-out answers right in every token that starts the next stage."""
    most_steps: int
    """Upper limit of steps before the next stage."""
    tokens: int = 4096
    """Approximate tokens per step."""
    rate: float = 1.0
    """Learning rate relative to the first stage."""
    decay: bool = False
    """Whether the learning rate falls to zero over `most_steps`; the gate is then ignored."""

    def batch(
        self, seed: int, step: int, split: Split, encoder: Encoder, attention: Sequence[str] = STRATEGIES
    ) -> Batch:
        """Batch of a step: a pure function of the arguments, so that training can resume."""
        rng = random.Random(f"{split} {seed} {self.name} {step}")
        samples = self.task.samples(rng, split, encoder, self.tokens)
        return make_batch(samples, [rng.choice(attention) for _ in samples])


_PLAIN = Answering((1, 2), statements=2, phrasings=2, unknown=0.0, extras=False)
_ALIKE = Answering((1, 2, 4), statements=PLAIN_STATEMENTS, phrasings=PLAIN_QUESTIONS)
_PLAINLY_ASKED = Answering((2, 4, 8, 16, 20), statements=PLAIN_STATEMENTS, phrasings=PLAIN_QUESTIONS)

CURRICULUM = (
    Stage("copy, many letters", Copying(alphabet=200), gate=0.9, most_steps=500),
    Stage("copy, few letters", Copying(alphabet=16, chunks=4), gate=0.75, most_steps=300),
    Stage("facts, plainly told", _PLAIN, gate=0.93, most_steps=400, rate=0.5),
    Stage("told in the answer's words", _ALIKE, gate=0.95, most_steps=500, rate=0.5),
    Stage("all phrasings", Answering((1, 2, 4)), gate=0.95, most_steps=400, rate=0.5),
    Stage(
        "up to 20 chunks", Answering((1, 2, 4, 8, 16, 20)), gate=1.0, most_steps=1000, tokens=8192, rate=0.5, decay=True
    ),
    Stage("up to 20 chunks, plainly", _PLAINLY_ASKED, gate=1.0, most_steps=200, tokens=8192, rate=0.25, decay=True),
)

_LONGEST_CHUNK, _LONGEST_REST = 60, 32
"""Tokens of nearly all chunks, and of system segment, question and answer together."""


def most_chunks(positions: int) -> int:
    """The most chunks of a prompt that the curriculum has for this many positions."""
    tasks = [stage.task for stage in within(positions)]
    return max(number for task in tasks if isinstance(task, Answering) for number in task.chunks)


def within(positions: int) -> list[Stage]:
    """The curriculum with no more chunks than fit in this many positions."""
    most = (positions - _LONGEST_REST) // _LONGEST_CHUNK
    return [
        replace(stage, task=replace(stage.task, chunks=tuple(number for number in stage.task.chunks if number <= most)))
        if isinstance(stage.task, Answering)
        else stage
        for stage in CURRICULUM
    ]
