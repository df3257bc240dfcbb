# SPDX-License-Identifier: Apache-2.0
"""Measures a workload in rounds, until claims are decided or time is up."""

import itertools
import time
from collections.abc import Callable

from measuring.speed.monitor import Monitor
from measuring.speed.samples import Sample
from measuring.speed.servers import Servers
from measuring.speed.verdicts import evaluate
from measuring.speed.workloads.base import Workload

Record = Callable[[Sample], None]


async def measure(workload: Workload, servers: Servers, record: Record, limit_s: float, monitor: Monitor) -> None:
    """Records rounds until the claims are decided, within ``limit_s`` seconds.

    The first round is always made. Raises :class:`measuring.kit.client.ServerError`.
    """
    samples: list[Sample] = []
    await workload.prepare(servers)
    started = time.monotonic()
    for number in itertools.count(1):
        for sample in await workload.round(servers, number):
            record(sample)
            samples.append(sample)
        open_claims = _open_claims(workload, samples)
        elapsed_s = time.monotonic() - started
        monitor.after_round(number, open_claims, limit_s - elapsed_s)
        if not open_claims or elapsed_s * (number + 1) / number > limit_s:
            break
    await workload.finish(servers)


def _open_claims(workload: Workload, samples: list[Sample]) -> int:
    """Number of claims that are not decided yet."""
    verdicts = [evaluate(claim, samples) for claim in workload.claims()]
    return sum(verdict is not None and not verdict.is_decided for verdict in verdicts)
