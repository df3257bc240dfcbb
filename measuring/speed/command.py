# SPDX-License-Identifier: Apache-2.0
"""`tessera bench`: from the command line to the report."""

import argparse
import asyncio
import os
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from app.models.packaged_models import PackagedModelError, local_model
from app.models.random_model import build_preset
from machine.live_progress import shown
from machine.process_watch import end_by_signals
from machine.processor import cpu_model
from machine.progress import say
from machine.version import tessera_version
from measuring.kit.arguments import UsageError
from measuring.kit.client import ServerError
from measuring.kit.folder import FolderError
from measuring.kit.texts import characters_per_token
from measuring.speed.answers import DifferentAnswerError
from measuring.speed.arguments import parse
from measuring.speed.folder import Run, RunFolder, WorkloadRun
from measuring.speed.monitor import Monitor
from measuring.speed.report import report
from measuring.speed.rounds import measure
from measuring.speed.servers import STOCK, Servers
from measuring.speed.traces import TraceFileError, read_trace
from measuring.speed.workloads import WORKLOADS
from measuring.speed.workloads.base import Options, Workload

_MODEL = "bench-100m"


def main(argv: Sequence[str]) -> int:
    """Runs `tessera bench`; returns its exit code, as its help says."""
    try:
        args = parse(argv)
        options = _options(args)
        workloads = [WORKLOADS[name](options) for name in args.workloads]
        with RunFolder(args.output, _describe(argv, options, workloads), args.overwrite) as folder:
            return _run(workloads, folder, 60 * args.minutes)
    except (UsageError, TraceFileError, FolderError) as error:
        say(str(error))
        return 2
    except KeyboardInterrupt:
        say("interrupted")
        return 130


def _options(args: argparse.Namespace) -> Options:
    trace = read_trace(args.trace) if args.trace else None
    try:
        model = Path(local_model(args.model)) if args.model else build_preset(_MODEL)
        if not model.is_dir():
            raise UsageError(f"--model: no folder {model}")
        size = characters_per_token(model)
    except (OSError, PackagedModelError) as error:
        raise UsageError(str(error)) from error
    return Options(model, args.flags, args.output, args.long, args.seed, trace, size, args.tokens)


def _describe(argv: Sequence[str], options: Options, workloads: Sequence[Workload]) -> Run:
    return Run(
        command=("tessera", "bench", *argv),
        model=str(options.model),
        flags=options.flags,
        seed=options.seed,
        is_long=options.is_long,
        workloads={each.name: WorkloadRun(title=each.title, axis=each.axis, sizes=each.sizes()) for each in workloads},
        tessera=tessera_version(),
        cpu=cpu_model(),
        cores=os.cpu_count() or 1,
        started_at=datetime.now(UTC),
    )


def _run(workloads: Sequence[Workload], folder: RunFolder, limit_s: float) -> int:
    """Measures and reports, also after an error or a signal, unless an answer was wrong."""
    claims = [claim for workload in workloads for claim in workload.claims()]
    status, is_reported = 0, True
    try:
        asyncio.run(_measure(workloads, folder, limit_s))
        folder.mark(complete=True)
    except ServerError as error:
        status, is_reported = 1, not isinstance(error, DifferentAnswerError)
        folder.mark(stopped_by=str(error))
    except (KeyboardInterrupt, asyncio.CancelledError):
        status = 130
        folder.mark(stopped_by="an interruption")
    if folder.num_samples and is_reported:
        report(Console(), folder.path, claims)
    say(_last_words(folder))
    return status


async def _measure(workloads: Sequence[Workload], folder: RunFolder, limit_s: float) -> None:
    end_by_signals()
    monitor = Monitor(len(workloads))
    async with Servers(folder.run.model, folder.run.flags, folder.path) as servers, shown(monitor):
        folder.mark(vllm=await (await servers.get(STOCK)).vllm_version())
        for workload in workloads:
            monitor.begin(workload.name)
            await measure(workload, servers, folder.record, limit_s, monitor)
            monitor.end()


def _last_words(folder: RunFolder) -> str:
    if folder.run.complete:
        return f"results are in {folder.path}"
    kept = f"{folder.num_samples} samples are in {folder.path}, marked as partial"
    return f"stopped by {folder.run.stopped_by}; {kept}"
