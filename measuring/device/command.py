# SPDX-License-Identifier: Apache-2.0
"""Makes the checks one after another, whatever comes of each, and tells what did."""

import argparse
import asyncio
import json
import logging
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from measuring.device.arguments import Defaults, parse
from measuring.device.checklist import Check, checks_for
from measuring.device.context import Context, LoadWriter, Options, SpeedSizes
from measuring.device.devices import Device, MissingDeviceError, find_device
from measuring.device.engine import Engine, EngineOptions
from measuring.device.findings import CheckError, SkippedError, one_line
from measuring.kit.signals import end_by_signals
from tools.progress import progress, say
from tools.version import tessera_version

Status = Literal["PASS", "FAIL", "SKIPPED"]


@dataclass(frozen=True, slots=True)
class Result:
    """What came of a check; ``trace`` is the traceback of one that failed."""

    name: str
    status: Status
    message: str
    seconds: float
    values: dict[str, Any] = field(default_factory=dict)
    trace: str | None = None


def main(argv: Sequence[str], defaults: Defaults, load_writer: LoadWriter | None = None) -> int:
    """Makes the checks that ``argv`` asks for; returns the exit status: 0, 1, 2 or 130, as the help says."""
    args = parse(argv, defaults)
    try:
        device = find_device(defaults.kind)
    except MissingDeviceError as error:
        say(str(error))
        return 2
    context = Context(device, _options(args), Engine(_engine_options(args)), load_writer)
    checks = [check for check in checks_for(defaults.kind) if check.name in args.only]
    report = _Report(device, argv, args.json, args.verbose)
    say(f"{len(checks)} checks on {device.name}")
    try:
        with _warnings(shown=args.verbose):
            asyncio.run(_make_all(checks, context, report.add))
    except (KeyboardInterrupt, asyncio.CancelledError):
        say("interrupted")
        return 130
    return report.summarize()


def _options(args: argparse.Namespace) -> Options:
    speed = SpeedSizes(args.tokens, args.layers, args.kv_heads, args.head_size, args.iterations)
    return Options(tuple(getattr(torch, name) for name in args.dtypes), args.thorough, speed)


def _engine_options(args: argparse.Namespace) -> EngineOptions:
    return EngineOptions(args.model, args.dtype, args.output, args.tolerance, args.flags)


async def _make_all(checks: Sequence[Check], context: Context, add: Callable[[Result], None]) -> None:
    end_by_signals()
    async with context.engine:
        for check in checks:
            add(await _make(check, context))


async def _make(check: Check, context: Context) -> Result:
    """Whatever goes wrong is the check's result, not the end of the others."""
    started = time.perf_counter()

    def result(status: Status, message: str, **more: Any) -> Result:
        return Result(check.name, status, message, round(time.perf_counter() - started, 3), **more)

    try:
        with progress(check.name):
            finding = await check.make(context)
        return result("PASS", finding.message, values=finding.values)
    except SkippedError as error:
        return result("SKIPPED", one_line(error))
    except Exception as error:
        trace = "".join(traceback.format_exception(error))
        values = error.values if isinstance(error, CheckError) else {}
        return result("FAIL", one_line(error), values=values, trace=trace)
    finally:
        _release(context.device)


def _release(device: Device) -> None:
    try:
        device.release()
    except RuntimeError as error:  # of a device that an earlier error has left unusable
        say(f"{device.name} gives no memory back: {one_line(error)}")


@contextmanager
def _warnings(*, shown: bool) -> Iterator[None]:
    """The kernels warn of slow ways each time that one is taken: here hundreds of times, and on purpose."""
    logger = logging.getLogger("kernels")
    before = logger.level
    if not shown:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


class _Report:
    """The results on standard output, a line each, and in a file if there is to be one, after each check."""

    def __init__(self, device: Device, argv: Sequence[str], file: Path | None, is_verbose: bool) -> None:
        self._device = device
        self._file = file
        self._is_verbose = is_verbose
        self._results: list[Result] = []
        self._about = {
            "device": {"kind": device.kind, "name": device.name},
            "arguments": list(argv),
            "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "versions": {"tessera": tessera_version(), "torch": version("torch")},
        }

    def add(self, result: Result) -> None:
        self._results.append(result)
        print(f"{result.name:20} {result.status:8} {result.message}", flush=True)
        if self._is_verbose and result.trace:
            print(result.trace, file=sys.stderr, flush=True)
        if self._file is not None:
            results = [asdict(each) for each in self._results]
            self._file.write_text(json.dumps({**self._about, "results": results}, indent=1) + "\n", encoding="utf-8")

    def summarize(self) -> int:
        """The last line, and the exit status."""
        statuses = [result.status for result in self._results]
        passed, failed, skipped = (statuses.count(status) for status in get_args(Status))
        print(f"{passed} passed, {failed} failed, {skipped} skipped on {self._device.name}", flush=True)
        return 1 if failed else 0
