# SPDX-License-Identifier: Apache-2.0
"""`tessera adapt`: from a model and documents to an adapter that runs where chunks are computed."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, TextIO

import psutil

from machine.folders import check_replaceable, replaced_folder
from machine.progress import progress, say
from measuring.kit.arguments import Parser, UsageError, positive

_CHECKPOINT: Final = "checkpoint.pt"
_SAVE_EVERY: Final = 25
_BYTES_OF_WORK: Final = 4 << 30
"""Memory for activations and gradients, beside the weights."""

_DESCRIPTION = """\
Teach a model to write chunks that can be read in isolation. Its own full attention over the same prompts is the
teacher, and the material is any text: the files of a folder are cut into passages, with tasks about their sentences."""

_EPILOG = """\
Low-rank updates of the layers (LoRA) are trained, which run only where a chunk's keys and values are computed:
questions, answers and everything without chunks stay the model's. OUTPUT gets the adapter for tessera serve, and
adapted.json, which says for which model and positions it is. WORK gets checkpoint.pt and log.jsonl (losses as they
come). An interrupted run is resumed by the same command, and a finished one goes on with more --steps.

examples:
  tessera adapt $(tessera model smollm2) --documents manuals --output adapter
  tessera adapt Qwen/Qwen3-0.6B --documents manuals --output adapter --positions all
  tessera serve Qwen/Qwen3-0.6B --chunk-adapter adapter

Exit status: 0; 2 for errors in usage, files or set-up; 130 when interrupted."""


def main(argv: Sequence[str]) -> int:
    """Runs `tessera adapt`; returns its exit code, as its help says."""
    try:
        args = _parser().parse_args(argv)
        _check(args)
        trainer = _prepared(args)
        if not _train(trainer, args.work):
            say(f"interrupted at step {trainer.progress.step}; the same command resumes")
            return 130
        _finish(trainer, args)
    except (FileExistsError, ValueError) as error:
        say(str(error))
        return 2
    except OSError as error:
        say(f"{error.filename or args.output}: {error.strerror or error}")
        return 2
    except KeyboardInterrupt:
        say("interrupted")
        return 130
    return 0


def _check(args: argparse.Namespace) -> None:
    """Raises an error for what can be known before the model is loaded."""
    from engine_ext.start.chunk_adapter import NOTE

    check_replaceable(args.output, NOTE)
    args.work.mkdir(parents=True, exist_ok=True)


def _prepared(args: argparse.Namespace) -> Any:
    """The trainer, where its checkpoint was if there is one."""
    import torch
    from transformers import AutoTokenizer

    from engine_ext.start.weights import UnknownWeightsError, files_digest, model_folder
    from measuring.quality.questions.datasets import load_questions
    from training.adapt.material import Material, MaterialError, Template, read_passages
    from training.adapt.model import load
    from training.adapt.student import Student
    from training.adapt.trainer import Plan, Trainer, read_checkpoint, ways_of

    try:
        folder = model_folder(args.model, None)
    except UnknownWeightsError as error:
        raise MaterialError(str(error)) from error
    plan = Plan(
        model=str(folder),
        weights=files_digest(folder),
        documents=str(args.documents),
        positions=ways_of(args.positions),
        steps=args.steps,
        seed=args.seed,
        passage_tokens=args.passage_tokens,
        chunks=tuple(args.chunks),
        tasks=args.tasks,
        questions=args.questions and str(args.questions),
        rank=args.rank,
    )
    checkpoint = args.work / _CHECKPOINT
    state = read_checkpoint(checkpoint, plan) if checkpoint.exists() else None
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = _dtype(folder, device)
    if device == "cpu":
        _check_memory(folder)
    template = Template(AutoTokenizer.from_pretrained(folder, local_files_only=True))
    with progress(f"reading {args.documents}"):
        passages = read_passages(args.documents, template.segments, args.passage_tokens)
    questions = load_questions(args.questions) if args.questions else ()
    material = Material(passages, template, args.chunks, args.tasks, questions)
    say(f"{len(passages)} passages")
    with progress("loading the model"):
        model = load(folder, device, dtype)
    student = Student(model, template.segments, args.seed, args.rank)
    with progress("reading held-out prompts"):
        trainer = Trainer(student, material, plan)
    if state:
        trainer.restore(state)
        say(f"resuming from step {trainer.progress.step} ({checkpoint})")
    return trainer


def _dtype(folder: Path, device: str) -> Any:
    """bfloat16 for models of this dtype, on CPUs only with instructions for it; else float32."""
    import torch
    from transformers import AutoConfig

    from app.models.default_model import cpu_dtype
    from machine.processor import cpu_flags

    own = AutoConfig.from_pretrained(folder, local_files_only=True).dtype
    if device == "cpu" and cpu_dtype(cpu_flags()) == "float32":
        return torch.float32
    return torch.bfloat16 if own == torch.bfloat16 else torch.float32


def _check_memory(folder: Path) -> None:
    weights = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    wanted, free = 2 * weights + _BYTES_OF_WORK, psutil.virtual_memory().available
    if wanted > free:
        gib = 1 << 30
        raise UsageError(
            f"training takes some {wanted / gib:.0f} GiB of memory, and {free / gib:.0f} GiB are free: "
            "stop other programs, or use a machine with more"
        )


def _train(trainer: Any, work: Path) -> bool:
    """Trains to the end; returns False if interrupted. A checkpoint is written in any case."""
    from training.adapt.trainer import CHECK_EVERY
    from training.runs import interruption

    checkpoint = work / _CHECKPOINT
    progress = trainer.progress
    with interruption() as is_interrupted, (work / "log.jsonl").open("a", encoding="utf-8") as log:
        while not trainer.is_finished and not is_interrupted():
            if progress.step % CHECK_EVERY == 0:
                _check_held_out(trainer, log)
            loss = trainer.train_step()
            print(json.dumps({"step": progress.step, "loss": loss, "tokens": progress.tokens}), file=log, flush=True)
            if progress.step % _SAVE_EVERY == 0:
                trainer.save(checkpoint)
        if trainer.is_finished and not is_interrupted():
            _check_held_out(trainer, log)
        trainer.save(checkpoint)
    return bool(trainer.is_finished)


def _check_held_out(trainer: Any, log: TextIO) -> None:
    step = trainer.progress.step
    if any(checked == step for checked, _ in trainer.progress.checks):  # before it was interrupted
        return
    losses = trainer.check()
    told = ", ".join(f"{way} {loss:.4f}" for way, loss in losses.items())
    say(f"step {step} of at most {trainer.plan.steps}: held-out loss {told}")
    print(json.dumps({"step": step, "held_out": losses}), file=log, flush=True)


def _finish(trainer: Any, args: argparse.Namespace) -> None:
    from engine_ext.start.chunk_adapter import NOTE

    trainer.use_best()
    say(f"done; the least held-out loss was at step {trainer.progress.best_step}")
    with replaced_folder(args.output, NOTE) as staging:
        trainer.student.save(staging)
        facts = {**asdict(trainer.plan), **asdict(trainer.progress)}
        (staging / NOTE).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    say(f"tessera serve {args.model} --chunk-adapter {args.output}")
    say(f"measure it with tessera calibrate {args.model} -- --chunk-adapter {args.output}")


def _parser() -> Parser:
    usage = "tessera adapt MODEL --documents FOLDER --output DIR [options]"
    parser = Parser("tessera adapt", usage, _DESCRIPTION, _EPILOG)
    parser.add_argument("model", metavar="MODEL", help="folder or name of the model")
    parser.add_argument("--documents", type=Path, required=True, metavar="FOLDER", help="text, Markdown and PDF files")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder for the adapter")
    positions = "positions of chunks: some of offset, shared, parallel, or all (default: offset)"
    choices = ("offset", "shared", "parallel", "all")
    parser.add_argument("--positions", nargs="+", choices=choices, default=["offset"], help=positions)
    parser.add_argument("--rank", type=positive, default=16, metavar="N", help="of the updates (default: 16)")
    steps = "most steps, of four prompts each (default: 1000); it ends before when the held-out loss no longer falls"
    parser.add_argument("--steps", type=positive, default=1000, metavar="N", help=steps)
    tokens = "longest passage, in tokens (default: 128)"
    parser.add_argument("--passage-tokens", type=positive, default=128, metavar="N", help=tokens)
    chunks = "numbers of chunks in a prompt (default: 1 2 4 8)"
    parser.add_argument("--chunks", type=positive, nargs="+", default=(1, 2, 4, 8), metavar="N", help=chunks)
    tasks = "tasks for each prompt (default: 6)"
    parser.add_argument("--tasks", type=positive, default=6, metavar="N", help=tasks)
    questions = "questions with answers, in any format of tessera eval, as about every second prompt (default: none)"
    parser.add_argument("--questions", type=Path, metavar="FILE", help=questions)
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of samples and new weights (default: 0)")
    work = "folder for checkpoint and log (default: build/adapt)"
    parser.add_argument("--work", type=Path, default=Path("build/adapt"), metavar="DIR", help=work)
    return parser
