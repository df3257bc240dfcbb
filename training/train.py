# SPDX-License-Identifier: Apache-2.0
"""Trains the demo model: `make train-demo`.

Stops and goes on as told: every `--save-every` steps, on Ctrl-C and at the end it writes a checkpoint, and begins from
it the next time. What follows is the same as without a stop, number for number on the same machine.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils import clip_grad_norm_
from torch.overrides import TorchFunctionMode

from tools.folders import check_replaceable
from tools.progress import say
from training.batches import STRATEGIES, Batch, Encoder, to_device
from training.curriculum import CURRICULUM, Stage, make_stage_batch
from training.export import FACTS_FILE, export
from training.initialisation import look_back
from training.language import Split
from training.model import MAX_LENGTH, forward, is_bfloat16_quick, new_model
from training.tokenizer import train_tokenizer

LEARNING_RATE = 4e-3
EMBEDDING_RATE = 3e-3
GATE_EVERY = 50
GATE_BATCHES = 4


@dataclass(slots=True)
class Progress:
    """Where training is."""

    step: int = 0
    stage: int = 0
    stage_step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    accuracy: float = 0.0
    """Of the last look at held-out questions."""
    commit: str = ""
    """Of the code that the training began with."""
    attention: tuple[str, ...] = STRATEGIES
    """Kinds that contexts are masked and positioned as, in equal shares."""
    end: float = 1.0
    """Share of the steps of the stages whose learning rate decays."""

    @property
    def finished(self) -> bool:
        return self.stage == len(CURRICULUM)


class _Float32(TorchFunctionMode):
    """Keeps Muon, which converts its matrices to bfloat16, at float32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.bfloat16:
            return args[0].clone()
        return func(*args, **(kwargs or {}))


class Trainer:
    """The model, its optimizers and where they are."""

    def __init__(self, seed: int, device: str, attention: tuple[str, ...] = STRATEGIES, end: float = 1.0) -> None:
        self.seed = seed
        self.device = device
        self.progress = Progress(commit=_commit(), attention=attention, end=end)
        self.curriculum = [_shortened(stage, end) if stage.decay else stage for stage in CURRICULUM]
        self.tokenizer = train_tokenizer(seed, MAX_LENGTH)
        self.encoder = Encoder(self.tokenizer)
        self.model = new_model(seed)
        look_back(self.model, range(1, self.model.config.num_attention_heads + 1))
        self.model.to(device)
        self.optimizers = _optimizers(self.model)

    @property
    def stage(self) -> Stage:
        return self.curriculum[self.progress.stage]

    def train_step(self) -> float:
        """One step; returns its loss (nats per answer token)."""
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
        progress.tokens += batch.ids.numel()
        if progress.stage_step % GATE_EVERY == 0:
            self._look_at_gate()
        progress.seconds += time.monotonic() - started
        return float(loss.detach())

    def _set_rates(self) -> None:
        """The stage's rate, with a warm-up over the first 20 steps, and towards zero in a stage that decays."""
        scale = self.stage.rate * min(1.0, (self.progress.step + 1) / 20)
        if self.stage.decay:
            scale *= 1 - self.progress.stage_step / self.stage.most_steps
        for optimizer, rate in zip(self.optimizers, (LEARNING_RATE, EMBEDDING_RATE), strict=True):
            optimizer.param_groups[0]["lr"] = rate * scale

    def _batch(self, stage: Stage, step: int, split: Split) -> Batch:
        return to_device(
            make_stage_batch(stage, self.seed, step, split, self.encoder, self.progress.attention), self.device
        )

    def _look_at_gate(self) -> None:
        progress = self.progress
        progress.accuracy = float(self.heldout(self.stage, GATE_BATCHES).mean())
        passed = not self.stage.decay and progress.accuracy >= self.stage.gate
        if passed or progress.stage_step >= self.stage.most_steps:
            progress.stage += 1
            progress.stage_step = 0

    @torch.no_grad()
    def heldout(self, stage: Stage, batches: int) -> torch.Tensor:
        """For each held-out answer, 1 if every token is the likeliest, and so the one that greedy decoding gives."""
        answers = [_right_answers(self.model, self._batch(stage, -1 - i, "heldout")) for i in range(batches)]
        return torch.cat(answers).float()

    def save(self, path: Path) -> None:
        """Writes a checkpoint; a crash leaves the one before."""
        state = {
            "seed": self.seed,
            "progress": asdict(self.progress),
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".new")
        torch.save(state, temporary)
        temporary.replace(path)

    def load(self, path: Path) -> None:
        """Goes on from a checkpoint; raises `ValueError` if it is of another seed or other options."""
        state = torch.load(path, map_location=self.device, weights_only=True)
        if state["seed"] != self.seed:
            raise ValueError(f"{path} was trained with seed {state['seed']}, not {self.seed}: remove it to begin anew")
        progress = Progress(**state["progress"])
        if (progress.attention, progress.end) != (self.progress.attention, self.progress.end):
            options = f"--attention {','.join(progress.attention)} --end {progress.end}"
            raise ValueError(f"{path} was trained with {options}: remove it to begin anew")
        self.progress = progress
        self.model.load_state_dict(state["model"])
        for optimizer, optimizer_state in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(optimizer_state)


def _shortened(stage: Stage, share: float) -> Stage:
    """With so many of its steps, and a last look at the gate at the end of them."""
    return replace(stage, most_steps=max(1, round(share * stage.most_steps / GATE_EVERY)) * GATE_EVERY)


def _commit() -> str:
    git = shutil.which("git")
    if git is None:
        return "unknown"
    command = [git, "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    described = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return described.stdout.strip() or "unknown"


def _optimizers(model: Any) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for embedding and norms."""
    matrices: list[torch.nn.Parameter] = []
    others: list[torch.nn.Parameter] = []
    for name, parameter in model.named_parameters():
        (matrices if parameter.ndim == 2 and "embed" not in name else others).append(parameter)
    return [
        torch.optim.Muon(matrices, lr=LEARNING_RATE, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=EMBEDDING_RATE, weight_decay=0.0, betas=(0.9, 0.95)),
    ]


def _right_answers(model: Any, batch: Batch) -> torch.Tensor:
    """For each branch of the batch, whether all of its answer is right; [branches], bool."""
    _, right = forward(model, batch)
    chosen = batch.targets >= 0
    rows = torch.arange(len(batch.ids), device=batch.ids.device)[:, None].expand_as(batch.ids)
    branches = rows[chosen] * batch.ids.shape[1] + batch.branch[chosen]
    numbers, index = torch.unique(branches, return_inverse=True)
    wrong = torch.zeros(len(numbers), device=batch.ids.device).index_add_(0, index, (~right).float())
    return wrong == 0


def train(trainer: Trainer, steps: int | None, checkpoint: Path, save_every: int) -> bool:
    """Trains up to step `steps` (None: to the end of the curriculum); returns False when it was interrupted."""
    interrupted = False

    def interrupt(*_: Any) -> None:
        nonlocal interrupted
        interrupted = True

    previous = signal.signal(signal.SIGINT, interrupt)
    try:
        while not (trainer.progress.finished or interrupted or trainer.progress.step == steps):
            stage = trainer.stage
            loss = trainer.train_step()
            _log(checkpoint.with_name("log.jsonl"), stage, trainer.progress, loss)
            if trainer.progress.step % save_every == 0:
                trainer.save(checkpoint)
        trainer.save(checkpoint)
    finally:
        signal.signal(signal.SIGINT, previous)
    return not interrupted


def _log(path: Path, stage: Stage, progress: Progress, loss: float) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"stage_name": stage.name, **asdict(progress), "loss": loss}) + "\n")
    if progress.step % 10 == 0 or progress.step == 1:
        pace = progress.tokens / progress.seconds
        say(
            f"step {progress.step} ({stage.name}, {progress.stage_step} of at most {stage.most_steps}): "
            f"loss {loss:.3f}, held-out accuracy {progress.accuracy:.3f}, "
            f"{progress.tokens / 1e6:.2f} M tokens, {pace:.0f} a second"
        )


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m training.train", description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, help="stop after this step (default: when the curriculum is through)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, tokenizer and data (default: 0)")
    parser.add_argument(
        "--attention",
        type=_attention,
        default=STRATEGIES,
        help="kinds of attention to train for, in equal shares (default: full,shared,offset)",
    )
    end = "share of the last stages' steps, in which the learning rate falls to zero (default: %(default)s)"
    parser.add_argument("--end", type=float, default=1.0, metavar="SHARE", help=end)
    parser.add_argument(
        "--work-dir", type=Path, default=Path("build/demo"), help="checkpoint and log (default: %(default)s)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("models/demo"), help="where the finished model goes (default: %(default)s)"
    )
    parser.add_argument("--save-every", type=int, default=100, help="steps between checkpoints (default: %(default)s)")
    args = parser.parse_args(argv)
    try:
        check_replaceable(args.out, FACTS_FILE)
    except FileExistsError as error:
        say(str(error))
        return 2
    trainer = Trainer(args.seed, "cuda" if torch.cuda.is_available() else "cpu", args.attention, args.end)
    checkpoint = args.work_dir / "checkpoint.pt"
    if checkpoint.exists():
        try:
            trainer.load(checkpoint)
        except ValueError as error:
            say(str(error))
            return 2
        say(f"going on from step {trainer.progress.step} ({checkpoint})")
    if not train(trainer, args.steps, checkpoint, args.save_every):
        say(f"interrupted at step {trainer.progress.step}; the same command goes on from there")
        return 130
    if not trainer.progress.finished:
        say(f"stopped at step {trainer.progress.step} as told; without --steps the same command goes on")
        return 0
    finish(trainer, args.out)
    return 0


def _attention(text: str) -> tuple[str, ...]:
    kinds = tuple(text.split(","))
    if unknown := [kind for kind in kinds if kind not in STRATEGIES]:
        raise argparse.ArgumentTypeError(f"unknown kind {unknown[0]!r}; there are {', '.join(STRATEGIES)}")
    return kinds


def finish(trainer: Trainer, out: Path) -> None:
    """Judges the trained model on held-out questions and writes it into the folder `out`."""
    say("the curriculum is through; judging the model on held-out questions")
    right = trainer.heldout(CURRICULUM[-1], batches=40)
    facts = {**asdict(trainer.progress), "seed": trainer.seed, "accuracy": float(right.mean()), "questions": len(right)}
    export(trainer.model, trainer.tokenizer, facts, out)
    say(f"held-out accuracy {facts['accuracy']:.3f} over {len(right)} questions; the model is in {out}")


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.exit(main())
