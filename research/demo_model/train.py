# SPDX-License-Identifier: Apache-2.0
"""Trains the demo model: `make train-demo`.

Writes a checkpoint every `--save-every` steps, on Ctrl-C and at the end; the next run resumes from it. A resumed run
computes the same numbers, bit for bit on the same machine, as one without a stop.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from machine.folders import check_replaceable
from machine.progress import say
from research.demo_model.batches import STRATEGIES
from research.demo_model.curriculum import Stage
from research.demo_model.export import FACTS_FILE, export
from research.demo_model.model import MAX_LENGTH
from research.demo_model.trainer import Progress, Trainer
from training.runs import interruption


def train(trainer: Trainer, steps: int | None, checkpoint: Path, save_every: int) -> bool:
    """Trains up to step `steps` (None: the curriculum's end); returns False if interrupted."""
    with interruption() as is_interrupted:
        while not (trainer.is_finished or is_interrupted() or trainer.step == steps):
            stage = trainer.stage
            loss = trainer.train_step()
            _log(checkpoint.with_name("log.jsonl"), stage, trainer.progress, loss)
            if trainer.step % save_every == 0:
                trainer.save(checkpoint)
        trainer.save(checkpoint)
        return not is_interrupted()


def _log(path: Path, stage: Stage, progress: Progress, loss: float) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"stage_name": stage.name, **asdict(progress), "loss": loss}) + "\n")
    if progress.step % 10 == 0 or progress.step == 1:
        pace = progress.tokens / progress.seconds
        say(
            f"step {progress.step} ({stage.name}, {progress.stage_step} of at most {stage.most_steps}): "
            f"loss {loss:.3f}, held-out accuracy {progress.accuracy:.3f}, "
            f"{progress.tokens / 1e6:.2f} M tokens, {pace:.0f} tokens/s"
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line."""
    args = _parser().parse_args(argv)
    checkpoint = args.work_dir / "checkpoint.pt"
    try:
        check_replaceable(args.out, FACTS_FILE)
    except FileExistsError as error:
        say(str(error))
        return 2
    trainer = Trainer(
        args.seed, "cuda" if torch.cuda.is_available() else "cpu", args.attention, args.end, args.positions
    )
    if checkpoint.exists():
        try:
            trainer.load(checkpoint)
        except ValueError as error:
            say(str(error))
            return 2
        say(f"resuming from step {trainer.step} ({checkpoint})")
    if not train(trainer, args.steps, checkpoint, args.save_every):
        say(f"interrupted at step {trainer.step}; the same command resumes")
        return 130
    if not trainer.is_finished:
        say(f"stopped at step {trainer.step}; the same command without --steps resumes")
        return 0
    finish(trainer, args.out)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m research.demo_model.train", description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, help="stop after this step (default: at the end of the curriculum)")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights, tokenizer and data (default: 0)")
    parser.add_argument(
        "--attention",
        type=_attention,
        default=STRATEGIES,
        help="attention strategies to train for, in equal shares (default: full,shared,offset)",
    )
    end = "fraction of the last stages' steps, over which the learning rate falls to zero (default: %(default)s)"
    parser.add_argument("--end", type=float, default=1.0, metavar="SHARE", help=end)
    positions = "positions of the longest prompts; fewer chunks where they don't fit (default: %(default)s)"
    parser.add_argument("--positions", type=int, default=MAX_LENGTH, metavar="N", help=positions)
    parser.add_argument(
        "--work-dir", type=Path, default=Path("build/demo"), help="folder of checkpoint and log (default: %(default)s)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("models/demo"), help="folder for the finished model (default: %(default)s)"
    )
    parser.add_argument("--save-every", type=int, default=100, help="steps between checkpoints (default: %(default)s)")
    return parser


def _attention(text: str) -> tuple[str, ...]:
    kinds = tuple(text.split(","))
    if unknown := [kind for kind in kinds if kind not in STRATEGIES]:
        raise argparse.ArgumentTypeError(f"unknown strategy {unknown[0]!r}; choose from {', '.join(STRATEGIES)}")
    return kinds


def finish(trainer: Trainer, out: Path) -> None:
    """Evaluates the trained model on held-out questions and writes it to the folder `out`."""
    say("curriculum finished; evaluating the model on held-out questions")
    right = trainer.heldout(trainer.curriculum[-1], batches=40)
    facts = {**asdict(trainer.progress), "seed": trainer.seed, "accuracy": float(right.mean()), "questions": len(right)}
    export(trainer.model, trainer.tokenizer, facts, out)
    say(f"held-out accuracy {facts['accuracy']:.3f} over {len(right)} questions; the model is in {out}")


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.exit(main())
