# SPDX-License-Identifier: Apache-2.0
"""Starts the engine and its self-check in a process of its own."""

import argparse
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from pydantic import ByteSize
from vllm.engine.arg_utils import AsyncEngineArgs

from app.advice import advice_for, remedy_for
from app.commands.doctor.finding import Finding
from app.modes import strategy_of
from app.settings import Settings
from engine_ext.start.positions import model_config
from engine_ext.start.refusals import ATTEND, DECODING, IN_PLACE, MEASURED
from engine_ext.start.startup import SWITCHED_OFF
from engine_ext.start.support import unsupported_reason
from engine_ext.start.vllm_log import telling_lines
from machine.process_watch import starter_environment
from machine.progress import progress
from machine.server_process import RUN_MODULE, group_members, last_words, python_path

_TERM_S: Final = 20
_KILL_S: Final = 20
_POLL_S: Final = 0.01
_COPIERS: Final = {
    "numba": "Numba, compiled for this CPU",
    "torch": "torch's indexing; faster ones are for float32 on CPUs with up to 4 threads",
    "Triton": "Triton's kernels",
    "torch_npu": "torch_npu's operators, layer by layer",
}
_INSTEAD: Final = {
    IN_PLACE: "leave out --chunk-cache-placement in-place: chunks are copied",
    ATTEND: "leave out --chunk-cache-placement attend: chunks are copied",
    MEASURED: "choose a --chunk-mode without %P, ~P% and +P%: such requests run in full attention",
    DECODING: "leave out --decode-sparse-budget: generated tokens attend to everything",
}
"""Advice where settings ask for what is refused."""


def refused_before_start(args: argparse.Namespace, settings: Settings) -> Iterator[Finding]:
    """Checks flags and model without an engine. Raises an error for flags or a model that the start refuses."""
    engine_args = AsyncEngineArgs.from_cli_args(args)
    model = model_config(engine_args, strategy_of(settings.chunk_mode) if settings.chunk_mode else None)
    if settings.chunk_cache == "off":
        yield Finding("FAIL", f"the chunk cache is {SWITCHED_OFF}", remedy_for(SWITCHED_OFF))
    elif reason := unsupported_reason(engine_args, model, in_place=settings.chunk_cache_placement == "in-place"):
        yield Finding("FAIL", f"{args.model}: {reason}", remedy_for(reason))
    else:
        dtype = str(model.dtype).removeprefix("torch.")
        yield Finding("ok", f"model {args.model}: {', '.join(model.architectures)}, dtype {dtype}")


def tried(arguments: Sequence[str], settings: Settings, log: Path) -> Iterator[Finding]:
    """Starts an engine with the ``arguments`` of ``tessera serve``; its output goes to ``log``."""
    started = time.monotonic()
    log.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="tessera-doctor-") as folder, progress(f"starting the engine (log: {log})"):
        result = Path(folder) / "result.json"
        with _running([*RUN_MODULE, "app.commands.doctor.trial_process", str(result), *arguments], log) as process:
            process.wait()
        found = json.loads(result.read_text()) if result.exists() else None
    if found is None:
        lines = telling_lines(log.read_text(encoding="utf-8", errors="replace")) or [last_words(log)]
        fix = advice_for(" ".join(lines)) or "read the log"
        yield Finding("FAIL", f"the engine did not start: {'; '.join(lines)} (log: {log})", fix)
    elif found["reason"] is not None:
        yield Finding("FAIL", found["reason"], remedy_for(found["reason"]))
    else:
        took = time.monotonic() - started
        yield Finding("ok", f"the engine starts, and its self-check passes: reuse is exact ({took:.0f} s)")
        yield from _described(found, settings)


def _described(found: dict[str, Any], settings: Settings) -> Iterator[Finding]:
    yield Finding("ok", f"keys and values are moved by {_COPIERS.get(found['copier'], found['copier'])}")
    if found["isa"] is not None:
        yield Finding("ok", f"attention by vLLM's kernels for {found['isa']}, which decide the layout")
    yield Finding("ok", f"layout: {found['layout']}")
    yield from _abilities(found, settings)
    pool = ByteSize(found["pool_bytes"]).human_readable()
    yield Finding("ok", f"pool: {found['tokens']} tokens in {pool} per worker")
    if settings.chunk_adapter is not None:
        yield Finding("ok", f"chunks are computed with the adapter {settings.chunk_adapter}")
    fix = None if found["is_known"] else "measure it: tessera calibrate MODEL"
    yield Finding("info" if fix else "ok", f"positions of requests that name no strategy: {found['strategy']}", fix)


def _abilities(found: dict[str, Any], settings: Settings) -> Iterator[Finding]:
    """Says what works with this engine, and what doesn't: a warning if the settings ask for it."""
    placement = settings.chunk_cache_placement
    asked = {f"placement {placement}": found["placement"] == placement}
    if settings.needs_attention:
        asked[MEASURED] = True
    if settings.decode_sparse_budget is not None:
        asked[DECODING] = found["decode_budget"] is not None
    by_reason: dict[str | None, list[str]] = {}
    for name, reason in found["refusals"].items():
        unknown = None if asked.get(name, True) else "the log says why"
        by_reason.setdefault(reason or unknown, []).append(name)
    for reason, names in by_reason.items():
        if reason is None:
            yield Finding("ok", f"works here: {', '.join(names)}")
        else:
            advice = "; ".join(_INSTEAD[name] for name in names if name in asked) or None
            yield Finding("warn" if advice else "info", f"does not work here: {', '.join(names)}: {reason}", advice)


@contextmanager
def _running(command: Sequence[str], log: Path) -> "Iterator[subprocess.Popen[bytes]]":
    """Runs a process in its own session; the whole session ends with the block."""
    environment = {**os.environ, **starter_environment(), "PYTHONPATH": python_path(), "VLLM_LOGGING_LEVEL": "INFO"}
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
    try:
        yield process
    finally:
        try:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_TERM_S)
        finally:
            _kill_group(process)


def _kill_group(leader: "subprocess.Popen[bytes]") -> None:
    with suppress(ProcessLookupError):
        os.killpg(leader.pid, signal.SIGKILL)
    leader.wait()
    deadline = time.monotonic() + _KILL_S  # orphans can't be waited for
    while group_members(leader.pid) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
