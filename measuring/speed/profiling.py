# SPDX-License-Identifier: Apache-2.0
"""Where a warm request's time goes: the processes of a server, sampled by py-spy while warm requests run one by one.

A sample counts for the stage of its innermost frame that a stage knows: work of a library counts for whoever asked for
it. Processes run beside each other, so the sum over stages may exceed the time that passes.
"""

import asyncio
import os
import shutil
import signal
import statistics
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import TypeAdapter
from rich.console import Console
from rich.table import Table

from measuring.kit.texts import Texts
from measuring.speed.answers import check_report
from measuring.speed.rag import Answer, BenchmarkError, Query
from measuring.speed.systems import Server

SAMPLES_PER_S = 50
"""Many more, and py-spy itself takes a core."""
REQUESTS = 200
CHUNKS, CHUNK_TOKENS, SYSTEM_TOKENS, QUESTION_TOKENS = 8, 512, 64, 32
RAW, RESULT = "profile.txt", "profile.json"
_NAMESPACE = "profile"
_START_S = 3


@dataclass(frozen=True, slots=True)
class Stage:
    """What time is spent on, known by parts of ``function (file)``. ``is_ours``: in Tessera's own Python."""

    name: str
    frames: tuple[str, ...]
    is_ours: bool = False


STAGES = (
    Stage("waiting for another process, spinning", ("sched_yield (vllm/", "shm_broadcast.py")),
    Stage("load: gather, rotate, scatter", ("(kernels/",)),
    Stage("load: which rows and slots", ("(engine_ext/core/worker.py",), is_ours=True),
    Stage("tokenizing", ("(app/prompt/tokenization.py",), is_ours=True),
    Stage("marks and segments", ("(app/prompt/segments.py", "(app/prompt/marks.py"), is_ours=True),
    Stage("planning", ("(cache/", "(engine_ext/wire/plan.py"), is_ours=True),
    Stage(
        "connector, scheduler side", ("(engine_ext/core/scheduler.py", "(engine_ext/core/connector.py"), is_ours=True
    ),
    Stage("event loop", ("(asyncio/", "(uvloop/")),
    Stage("request and report", ("(engine_ext/", "(app/"), is_ours=True),
    Stage("sampling", ("(vllm/v1/sample/", "sample_tokens (vllm/")),
    Stage("forward", ("_model_forward (vllm/", "(vllm/model_executor/", "(vllm/v1/attention/")),
    Stage("worker around the forward", ("(vllm/v1/worker/", "(vllm/v1/executor/multiproc_executor.py")),
    Stage("engine core", ("(vllm/v1/",)),
    Stage("rendering (chat template)", ("(vllm/renderers/", "(jinja2/")),
    Stage("HTTP", ("(vllm/entrypoints/", "(fastapi/", "(starlette/", "(uvicorn/")),
)
_OTHER = "other"


@dataclass(frozen=True, slots=True)
class Profile:
    """Milliseconds per request: ``stages`` are sampled, ``reported`` are medians of the requests' own reports."""

    requests: int
    ttft_ms: float
    stages: dict[str, float]
    reported: dict[str, float]
    own_python_ms: float
    """What Tessera's own Python takes, over all processes."""


async def profile(server: Server, texts: Texts, folder: Path) -> Profile:
    """Samples warm requests for one token; leaves py-spy's stacks and the result in ``folder``.

    Raises :class:`BenchmarkError` if py-spy is not installed or may not look at the server.
    """
    chunks = texts.chunks(CHUNKS, CHUNK_TOKENS)
    query = Query(texts.text(SYSTEM_TOKENS), tuple(chunks), "", max_tokens=1)
    await server.ingest(query, _NAMESPACE)
    sampler = await _start_sampler(server.process.process.pid, folder / RAW)
    try:
        answers = [await _ask(server, query, texts) for _ in range(REQUESTS)]
    finally:
        await _stop(sampler)
    await server.clear(_NAMESPACE)
    lines = (folder / RAW).read_text(encoding="utf-8").splitlines()
    result = _summarize(answers, count(lines))
    (folder / RESULT).write_bytes(TypeAdapter(Profile).dump_json(result, indent=1) + b"\n")
    return result


def count(lines: Iterable[str]) -> Counter[str]:
    """Samples by stage, of py-spy's raw lines ``frame;frame;… samples``, outermost frame first."""
    counts: Counter[str] = Counter()
    for line in lines:
        stack, _, samples = line.rpartition(" ")
        counts[_stage(stack.split(";"))] += int(samples)
    return counts


def table(console: Console, result: Profile) -> None:
    """Prints the stages, the longest first."""
    shown = Table("stage", "ms per request", title=f"a warm request: {result.ttft_ms:.1f} ms to the first token")
    shown.columns[1].justify = "right"
    for name, milliseconds in sorted(result.stages.items(), key=lambda item: -item[1]):
        shown.add_row(name, f"{milliseconds:.2f}")
    shown.add_section()
    for name, milliseconds in result.reported.items():
        shown.add_row(f"reported: {name.replace('_', ' ')}", f"{milliseconds:.2f}")
    shown.add_section()
    shown.add_row("Tessera's own Python", f"{result.own_python_ms:.2f}")
    console.print(shown)


async def _ask(server: Server, query: Query, texts: Texts) -> Answer:
    chunks = tuple(texts.shuffled(query.chunks))
    answer = await server.ask(replace(query, chunks=chunks, question=texts.text(QUESTION_TOKENS)), _NAMESPACE)
    check_report(answer, "hit")
    return answer


def _summarize(answers: Sequence[Answer], counts: Counter[str]) -> Profile:
    stages = {name: samples / SAMPLES_PER_S / len(answers) * 1e3 for name, samples in counts.items()}
    timings = [answer.report["timings_ms"] for answer in answers]
    return Profile(
        len(answers),
        statistics.median(answer.ttft_s for answer in answers) * 1e3,
        stages,
        {name: statistics.median(each[name] for each in timings) for name in timings[0]},
        sum(stages.get(stage.name, 0.0) for stage in STAGES if stage.is_ours),
    )


def _stage(stack: list[str]) -> str:
    for frame in reversed(stack):
        for stage in STAGES:
            if any(part in frame for part in stage.frames):
                return stage.name
    return _OTHER


async def _start_sampler(pid: int, raw: Path) -> asyncio.subprocess.Process:
    beside_python = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    if (program := shutil.which("py-spy", path=beside_python)) is None:
        raise BenchmarkError("a profile needs py-spy: pip install py-spy")
    options = ("--subprocesses", "--nonblocking", "--format", "raw", "--rate", str(SAMPLES_PER_S), "--output", str(raw))
    log = raw.with_suffix(".log")
    with log.open("wb") as said:
        command = (program, "record", "--pid", str(pid), *options)
        sampler = await asyncio.create_subprocess_exec(*command, stdout=said, stderr=said, start_new_session=True)
    try:
        await asyncio.wait_for(sampler.wait(), _START_S)
    except TimeoutError:
        return sampler
    raise BenchmarkError(f"py-spy could not look at the server: {log.read_text(errors='replace').strip()[-300:]}")


async def _stop(sampler: asyncio.subprocess.Process) -> None:
    sampler.send_signal(signal.SIGINT)  # it writes its file
    await sampler.wait()
