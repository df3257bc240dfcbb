# SPDX-License-Identifier: Apache-2.0
"""Which cores a process of tests, and the engines that it starts, run on."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

from app.commands.cluster import shares

_ALL = os.sched_getaffinity(0)
_MOST_WORKERS = 4
_WORKER_BYTES = 8 << 30
"""Of a worker and the engines that it keeps running, of 1.8 GB each."""


def num_workers() -> int:
    """As many as there are cores and memory for."""
    memory = round(psutil.virtual_memory().total / _WORKER_BYTES)
    return max(1, min(len(_ALL), memory, _MOST_WORKERS))


def keep_to_own_cores(worker: int, num_workers: int) -> None:
    """The threads of two engines on the same cores would wait for one another at every step.

    `worker` may be beyond `num_workers`: one that replaces another has a number of its own.
    """
    os.sched_setaffinity(0, shares(sorted(_ALL), num_workers)[worker % num_workers])


@contextmanager
def all_cores() -> Iterator[None]:
    """For an engine of several processes, which is started meanwhile: on one core they would wait for one another."""
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, _ALL)
    try:
        yield
    finally:
        os.sched_setaffinity(0, own)
