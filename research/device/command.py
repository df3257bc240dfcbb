# SPDX-License-Identifier: Apache-2.0
"""Makes the checks one after another, whatever the outcome of each, and reports."""

import argparse
import asyncio
import json
import logging
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

from app.models.random_model import PRESETS
from machine.process_watch import end_by_signals
from machine.progress import progress, say
from machine.version import tessera_version
from research.device.checklist import Check, checks_for
from research.device.context import Context, LoadWriter
from research.device.devices import Device, Kind, MissingDeviceError, find_device
from research.device.engine import TOLERANCES, Engine, EngineOptions, absent_packages
from research.device.findings import CheckError, SkippedError, one_line

Status = Literal["PASS", "FAIL", "SKIPPED"]

_EPILOG = """\
checks:
{checks}

engine and exactness start Tessera's server with --model on the device and ask it over HTTP. Its log is in --output. It
takes 1 GiB of the device's memory for vLLM's blocks and as much for the pool, or 4 each with a model of yours. After --
there may be any flag of tessera serve: it counts instead of what is set here.

examples:
  {prog}
  {prog} --only kernels bandwidth --json results.json
  {prog} --only engine exactness --model ./Qwen3-8B -- --kv-cache-memory-bytes 8G
  {prog} --only engine exactness -- --chunk-cache-placement attend

How fast answers come: tessera bench.

Exit status: 0 when nothing failed, 1 when a check failed, 2 for errors in usage or when there is no such device, 130
when interrupted."""


@dataclass(frozen=True, slots=True)
class Defaults:
    """A script's kind of device, dtypes of K and V for its kernels, and model."""

    kind: Kind
    dtypes: tuple[torch.dtype, ...]
    model: str
    description: str


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of a check; ``trace`` is the traceback of one that failed."""

    name: str
    status: Status
    message: str
    seconds: float
    values: dict[str, Any] = field(default_factory=dict)
    trace: str | None = None


def main(argv: Sequence[str], defaults: Defaults, load_writer: LoadWriter | None = None) -> int:
    """Makes the checks in ``argv``; returns the exit status, as the help says."""
    args = parse(argv, defaults)
    try:
        device = find_device(defaults.kind)
    except MissingDeviceError as error:
        say(str(error))
        return 2
    engine = Engine(EngineOptions(args.model, args.dtype, args.output, TOLERANCES[args.dtype], args.flags))
    context = Context(device, defaults.dtypes, engine, load_writer)
    checks = [check for check in checks_for(defaults.kind) if check.name in args.only]
    report = _Report(device, argv, args.json)
    if absent := absent_packages():
        say(f"engine and exactness can't be checked without {', '.join(absent)}")
    say(f"{len(checks)} checks on {device.name}")
    try:
        with _quiet_kernels():
            asyncio.run(_make_all(checks, context, report.add))
    except (KeyboardInterrupt, asyncio.CancelledError):
        say("interrupted")
        return 130
    return report.summarize()


def parse(argv: Sequence[str], defaults: Defaults) -> argparse.Namespace:
    """The options, with the server's ``flags``. Ends the process with status 2 if they make no sense."""
    parser = _parser(defaults)
    at = list(argv).index("--") if "--" in argv else len(argv)
    args = parser.parse_args(argv[:at])
    args.flags = tuple(argv[at + 1 :])
    names = [check.name for check in checks_for(defaults.kind)]
    args.only = args.only or names
    if unknown := [name for name in args.only if name not in names]:
        parser.error(f"there is no check {unknown[0]!r}; there are {', '.join(names)}")
    if not Path(args.model).is_dir() and args.model not in PRESETS:
        parser.error(f"--model: neither a folder nor a random model: {args.model}; there are {', '.join(PRESETS)}")
    if args.json is not None and not args.json.parent.is_dir():
        parser.error(f"--json: no folder {args.json.parent}")
    return args


def _parser(defaults: Defaults) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=defaults.description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    checks = checks_for(defaults.kind)
    width = max(len(check.name) for check in checks)
    listed = "\n".join(f"  {check.name:{width}}  {check.title}" for check in checks)
    parser.epilog = _EPILOG.format(checks=listed, prog=parser.prog)
    parser.usage = f"{parser.prog} [options] [-- any tessera serve flag]"
    parser.add_argument("--only", nargs="+", metavar="NAME", help="make these checks (default: all; see below)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to FILE, after each check")
    model = f"folder of a model, or a random one of app.models.random_model (default: {defaults.model})"
    parser.add_argument("--model", default=defaults.model, metavar="MODEL", help=model)
    parser.add_argument("--dtype", choices=TOLERANCES, default="bfloat16", help="of the model (default: bfloat16)")
    output = "folder for the server's log (default: build/device-checks)"
    parser.add_argument("--output", type=Path, default=Path("build", "device-checks"), metavar="DIR", help=output)
    return parser


async def _make_all(checks: Sequence[Check], context: Context, add: Callable[[Result], None]) -> None:
    end_by_signals()
    async with context.engine:
        for check in checks:
            add(await _make(check, context))


async def _make(check: Check, context: Context) -> Result:
    """Makes one check. Any error is its result, not the end of the others."""
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
def _quiet_kernels() -> Iterator[None]:
    """Hides the kernels' warnings of slow ways, which the checks take on purpose."""
    logger = logging.getLogger("kernels")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


class _Report:
    """Reports each check at once: a line on standard output, and optionally a file."""

    def __init__(self, device: Device, argv: Sequence[str], file: Path | None) -> None:
        self._device = device
        self._file = file
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
        if self._file is not None:
            results = [asdict(each) for each in self._results]
            self._file.write_text(json.dumps({**self._about, "results": results}, indent=1) + "\n", encoding="utf-8")

    def summarize(self) -> int:
        """The last line, and the exit status."""
        statuses = [result.status for result in self._results]
        passed, failed, skipped = (statuses.count(status) for status in get_args(Status))
        print(f"{passed} passed, {failed} failed, {skipped} skipped on {self._device.name}", flush=True)
        return 1 if failed else 0
