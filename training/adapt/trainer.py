# SPDX-License-Identifier: Apache-2.0
"""Steps, held-out loss and checkpoints of `tessera adapt`."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.functional import kl_div
from torch.nn.utils import clip_grad_norm_

from training.adapt.material import Material, Sample
from training.adapt.rows import Way
from training.adapt.student import RATE, Student
from training.runs import save_state

SAMPLES_A_STEP: Final = 4
CHECK_EVERY: Final = 50
"""Steps between two checks of the held-out loss."""
_HELD_OUT_SAMPLES: Final = 12
_PATIENCE: Final = 6
"""Checks without a better held-out loss before training ends."""
_WARM_UP: Final = 0.1
"""Share of the steps, at the start, in which the rate rises."""
_MOST_WARM_UP: Final = 20


@dataclass(frozen=True, slots=True)
class Plan:
    """Settings of a run, which a resumed run must have as well, ``steps`` aside: a finished run may go on.

    ``weights`` is the digest of the model's files.
    """

    model: str
    weights: str
    documents: str
    positions: tuple[Way, ...]
    steps: int
    seed: int
    passage_tokens: int
    chunks: tuple[int, ...]
    tasks: int
    questions: str | None
    rank: int


@dataclass(slots=True)
class Progress:
    """Progress of a run, as checkpoints store it."""

    step: int = 0
    tokens: int = 0
    best: float = math.inf
    """Least held-out loss, in nats per token."""
    best_step: int = 0
    checks: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    """Held-out loss by way at each check."""


class Trainer:
    """Teaches a student; its samples are functions of seed and step, so that it can resume."""

    def __init__(self, student: Student, material: Material, plan: Plan) -> None:
        self.plan, self.progress = plan, Progress()
        self.student, self._material = student, material
        self._parameters = student.parameters()
        self._optimizer = torch.optim.AdamW(list(self._parameters.values()), lr=RATE, weight_decay=0.0)
        self._best = self._values()
        held_out = (material.sample("heldout", plan.seed, number) for number in range(_HELD_OUT_SAMPLES))
        self._held_out = [(sample, student.taught(sample)) for sample in held_out]

    @property
    def is_finished(self) -> bool:
        """Whether all steps are done, or the held-out loss hasn't fallen for long."""
        waited = self.progress.step - self.progress.best_step
        return self.progress.step >= self.plan.steps or waited >= _PATIENCE * CHECK_EVERY

    def check(self) -> dict[str, float]:
        """Held-out loss by way, in nats per token; keeps the best parameters."""
        with torch.no_grad():
            losses: dict[str, float] = {
                way: float(torch.stack([self._loss(each, taught, way) for each, taught in self._held_out]).mean())
                for way in self.plan.positions
            }
        progress = self.progress
        mean = sum(losses.values()) / len(losses)
        progress.checks.append((progress.step, losses))
        if mean < progress.best:
            progress.best, progress.best_step, self._best = mean, progress.step, self._values()
        return losses

    def train_step(self) -> float:
        """Runs one step; returns its loss in nats per token."""
        progress = self.progress
        for group in self._optimizer.param_groups:
            group["lr"] = RATE * self._relative_rate()
        total, ways = 0.0, self.plan.positions
        for number in range(progress.step * SAMPLES_A_STEP, (progress.step + 1) * SAMPLES_A_STEP):
            sample = self._material.sample("train", self.plan.seed, number)
            loss = self._loss(sample, self.student.taught(sample), ways[number % len(ways)])
            (loss / SAMPLES_A_STEP).backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach()) / SAMPLES_A_STEP
            progress.tokens += sample.prompt.num_context_tokens + sum(len(each.tokens) for each in sample.branches)
        clip_grad_norm_(self._parameters.values(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        progress.step += 1
        return total

    def use_best(self) -> None:
        """Sets the parameters to those with the least held-out loss."""
        with torch.no_grad():
            for name, value in self._best.items():
                self._parameters[name].copy_(value)

    def save(self, path: Path) -> None:
        """Writes a checkpoint atomically: a crash keeps the previous one."""
        state = {
            "plan": asdict(self.plan),
            "progress": asdict(self.progress),
            "parameters": self._values(),
            "best": self._best,
            "optimizer": self._optimizer.state_dict(),
        }
        save_state(state, path)

    def restore(self, state: dict[str, Any]) -> None:
        """Goes on where the state of :func:`read_checkpoint` was."""
        self.progress = Progress(**state["progress"])
        self._best = state["parameters"]
        self.use_best()
        self._best = state["best"]
        self._optimizer.load_state_dict(state["optimizer"])

    def _loss(self, sample: Sample, taught: Tensor, way: Way) -> Tensor:
        """Mean Kullback-Leibler divergence D(teacher ‖ student) of the branches' tokens, in nats."""
        found = self.student.log_probabilities(sample, way)
        return kl_div(found, taught, reduction="sum", log_target=True) / len(found)

    def _relative_rate(self) -> float:
        step, steps = self.progress.step, self.plan.steps
        warm_up = min(_MOST_WARM_UP, math.ceil(_WARM_UP * steps))
        return min(1.0, (step + 1) / warm_up) * 0.5 * (1 + math.cos(math.pi * step / steps))

    def _values(self) -> dict[str, Tensor]:
        return {name: value.detach().clone() for name, value in self._parameters.items()}


def read_checkpoint(path: Path, plan: Plan) -> dict[str, Any]:
    """The state in a checkpoint of :meth:`Trainer.save`; raises ``ValueError`` if it is damaged or of another run."""
    try:
        state: dict[str, Any] = torch.load(path, weights_only=True)
    except (EOFError, OSError, RuntimeError, UnpicklingError) as error:
        raise ValueError(f"{path} can't be read as a checkpoint: remove it to start over") from error
    if changed := [
        name for name, value in asdict(plan).items() if name != "steps" and state["plan"].get(name) != value
    ]:
        told = ", ".join(f"{name} {state['plan'].get(name)}" for name in changed)
        raise ValueError(f"{path} is of another run ({told}): give the same options, or remove it to start over")
    return state


def ways_of(positions: Sequence[str]) -> tuple[Way, ...]:
    """The ways that the values of ``--positions`` name."""
    every: Sequence[Way] = ("offset", "shared", "parallel")
    return tuple(way for way in every if {way, "all"}.intersection(positions))
