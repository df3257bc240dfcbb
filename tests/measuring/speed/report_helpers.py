# SPDX-License-Identifier: Apache-2.0
"""Folders of runs that never ran."""

from datetime import UTC, datetime
from pathlib import Path

from measuring.speed.folder import Run, RunFolder, WorkloadRun
from measuring.speed.samples import Claim, Growth, Ratio, Sample

ROUNDS = 6
MODEL = "models/<b>bold</b> & co"
WORKLOADS = {
    "context": WorkloadRun(title="questions <i>over</i> chunks", axis="tokens of context", sizes={"rounds": ROUNDS}),
    "load": WorkloadRun(title="many users", axis="arrivals", sizes={"chunk_tokens": 256, "share": "[red]"}),
    "chat": WorkloadRun(title="no documents", axis="prompt tokens", sizes={}),
}
CLAIMS: list[Claim] = [
    Ratio("context", "4096", "ttft_s", "stock", "warm", at_least=40),
    Growth("context", "1024", "4096", "ttft_s", "warm", at_most=1.5),
    Ratio("load", "concurrency 8", "requests_per_s", "warm", "stock"),
    Ratio("chat", "128", "ttft_s", "tessera", "stock", at_most=1.03),
]


def context_samples() -> list[Sample]:
    """Stock takes 1 ms per token, cached chunks 20 µs; later rounds take longer."""
    return [
        Sample(workload="context", point=str(tokens), system=system, round=number, values={"ttft_s": seconds})
        for number in range(ROUNDS)
        for tokens in (4096, 1024)
        for system, seconds in (("warm", tokens / 50_000 * (1 + number)), ("stock", tokens / 1000 * (1 + number)))
    ]


def load_samples() -> list[Sample]:
    """Throughput in a closed loop; in an open one, only times to first token."""
    closed = [
        Sample(workload="load", point=point, system=system, round=number, values={"requests_per_s": rate})
        for number in range(ROUNDS)
        for point in ("concurrency 8", "concurrency 1")
        for system, rate in (("stock", 0.5), ("warm", 4.0), ("quarter", 2.0))
    ]
    return [*closed, Sample(workload="load", point="open loop", system="warm", round=0, values={"ttft_s": 0.25})]


def make_folder(path: Path, *, complete: bool = True, stopped_by: str | None = None) -> Path:
    """A run of which ``chat`` has no samples."""
    run = Run(
        command=("tessera", "bench", "--model", MODEL),
        model=MODEL,
        flags=("--dtype", "float32"),
        seed=7,
        is_long=False,
        workloads=WORKLOADS,
        tessera="0.1.0",
        vllm="0.32.0",
        cpu="A <fast> CPU",
        cores=2,
        started_at=datetime(2026, 1, 2, 3, 4, tzinfo=UTC),
    )
    with RunFolder(path, run) as folder:
        for sample in context_samples() + load_samples():
            folder.record(sample)
        folder.mark(complete=complete, stopped_by=stopped_by)
    return path
