# SPDX-License-Identifier: Apache-2.0
"""The trainer: model, optimizers and progress; its steps, held-out accuracy and checkpoints."""

import shutil
import subprocess
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils import clip_grad_norm_
from torch.overrides import TorchFunctionMode

from measuring.quality.questions.demo_language import Split
from research.demo_model.batches import STRATEGIES, Batch, Encoder, to_device
from research.demo_model.curriculum import Stage, within
from research.demo_model.initialisation import look_back
from research.demo_model.model import MAX_LENGTH, forward, is_bfloat16_quick, new_model
from research.demo_model.tokenizer import train_tokenizer
from training.runs import save_state

LEARNING_RATE = 4e-3
EMBEDDING_RATE = 3e-3
GATE_EVERY = 50
GATE_BATCHES = 4


@dataclass(slots=True)
class Progress:
    """Progress of a training run, as checkpoints store it."""

    step: int = 0
    stage: int = 0
    stage_step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    accuracy: float = 0.0
    """On held-out questions, at the last check."""
    commit: str = ""
    """Commit of the code that started the run."""
    attention: tuple[str, ...] = STRATEGIES
    """Strategies by which contexts are masked and positioned, in equal shares."""
    end: float = 1.0
    """Fraction of the decaying stages' steps to run."""
    positions: int = MAX_LENGTH
    """Positions of the longest prompts."""

    @property
    def options(self) -> tuple[tuple[str, ...], float, int]:
        """The options that a resumed run must have again."""
        return tuple(self.attention), self.end, self.positions


class _Float32(TorchFunctionMode):
    """Keeps Muon in float32; it would convert its matrices to bfloat16."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.bfloat16:
            return args[0].clone()
        return func(*args, **(kwargs or {}))


class Trainer:
    """Model, optimizers and progress."""

    def __init__(
        self,
        seed: int,
        device: str,
        attention: tuple[str, ...] = STRATEGIES,
        end: float = 1.0,
        positions: int = MAX_LENGTH,
    ) -> None:
        self.seed = seed
        self.device = device
        self.progress = Progress(commit=_commit(), attention=attention, end=end, positions=positions)
        self.curriculum = [_shortened(stage, end) if stage.decay else stage for stage in within(positions)]
        self.tokenizer = train_tokenizer(seed, positions)
        self.encoder = Encoder(self.tokenizer)
        self.model = new_model(seed, positions)
        look_back(self.model, range(1, self.model.config.num_attention_heads + 1))
        self.model.to(device)
        self.optimizers = _optimizers(self.model)

    @property
    def step(self) -> int:
        return self.progress.step

    @property
    def is_finished(self) -> bool:
        return self.progress.stage == len(self.curriculum)

    @property
    def stage(self) -> Stage:
        return self.curriculum[self.progress.stage]

    def train_step(self) -> float:
        """Runs one step; returns its loss in nats per answer token."""
        started, progress = time.monotonic(), self.progress
        self._set_rates()
        batch = self._batch(self.stage, progress.stage_step, "train")
        loss, _ = forward(self.model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        clip_grad_norm_(self.model.parameters(), 1.0)
        with nullcontext() if is_bfloat16_quick(self.device) else _Float32():
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()
        progress.step += 1
        progress.stage_step += 1
        progress.tokens += batch.num_tokens
        if progress.stage_step % GATE_EVERY == 0:
            self._check_gate()
        progress.seconds += time.monotonic() - started
        return float(loss.detach())

    def _set_rates(self) -> None:
        """Sets the stage's learning rate: warm-up over 20 steps, linear decay in decaying stages."""
        scale = self.stage.rate * min(1.0, (self.progress.step + 1) / 20)
        if self.stage.decay:
            scale *= 1 - self.progress.stage_step / self.stage.most_steps
        for optimizer, rate in zip(self.optimizers, (LEARNING_RATE, EMBEDDING_RATE), strict=True):
            optimizer.param_groups[0]["lr"] = rate * scale

    def _batch(self, stage: Stage, step: int, split: Split) -> Batch:
        return to_device(stage.batch(self.seed, step, split, self.encoder, self.progress.attention), self.device)

    def _check_gate(self) -> None:
        progress = self.progress
        progress.accuracy = float(self.heldout(self.stage, GATE_BATCHES).mean())
        passed = not self.stage.decay and progress.accuracy >= self.stage.gate
        if passed or progress.stage_step >= self.stage.most_steps:
            progress.stage += 1
            progress.stage_step = 0

    @torch.no_grad()
    def heldout(self, stage: Stage, batches: int) -> torch.Tensor:
        """Per held-out answer, 1.0 if greedy decoding gets every token right, else 0.0."""
        answers = [_right_answers(self.model, self._batch(stage, -1 - i, "heldout")) for i in range(batches)]
        return torch.cat(answers).float()

    def save(self, path: Path) -> None:
        """Writes a checkpoint atomically: a crash keeps the previous one."""
        state = {
            "seed": self.seed,
            "progress": asdict(self.progress),
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }
        save_state(state, path)

    def load(self, path: Path) -> None:
        """Restores a checkpoint; raises `ValueError` if its seed or options differ."""
        state = torch.load(path, map_location=self.device, weights_only=True)
        if state["seed"] != self.seed:
            raise ValueError(f"{path} was trained with seed {state['seed']}, not {self.seed}: remove it to start over")
        progress = Progress(**state["progress"])
        if progress.options != self.progress.options:
            options = (
                f"--attention {','.join(progress.attention)} --end {progress.end} --positions {progress.positions}"
            )
            raise ValueError(f"{path} was trained with {options}: remove it to start over")
        self.progress = progress
        self.model.load_state_dict(state["model"])
        for optimizer, optimizer_state in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(optimizer_state)


def _shortened(stage: Stage, share: float) -> Stage:
    """Stage with this share of its steps, rounded to a multiple of the gate interval."""
    return replace(stage, most_steps=max(1, round(share * stage.most_steps / GATE_EVERY)) * GATE_EVERY)


def _commit() -> str:
    git = shutil.which("git")
    if git is None:
        return "unknown"
    command = [git, "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    described = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return described.stdout.strip() or "unknown"


def _optimizers(model: Any) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for the embedding and norms."""
    matrices: list[torch.nn.Parameter] = []
    others: list[torch.nn.Parameter] = []
    for name, parameter in model.named_parameters():
        (matrices if parameter.ndim == 2 and "embed" not in name else others).append(parameter)
    return [
        torch.optim.Muon(matrices, lr=LEARNING_RATE, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=EMBEDDING_RATE, weight_decay=0.0, betas=(0.9, 0.95)),
    ]


def _right_answers(model: Any, batch: Batch) -> torch.Tensor:
    """Whether each branch's whole answer is right; [branches], bool."""
    _, right = forward(model, batch)
    branches, index = torch.unique(batch.target_branches(), return_inverse=True)
    wrong = torch.zeros(len(branches), device=index.device).index_add_(0, index, (~right).float())
    return wrong == 0
