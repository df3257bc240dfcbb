# SPDX-License-Identifier: Apache-2.0
"""Assignment of cores to test processes and their engines."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

from app.commands.cluster import shares

_ALL = os.sched_getaffinity(0)
_MOST_WORKERS = 4
_WORKER_BYTES = 8 << 30
"""Memory of a worker with its running engines, of 1.8 GB each."""


def num_workers() -> int:
    """Number of workers for the available cores and memory."""
    memory = round(psutil.virtual_memory().total / _WORKER_BYTES)
    return max(1, min(len(_ALL), memory, _MOST_WORKERS))


def keep_to_own_cores(worker: int, num_workers: int) -> None:
    """Pins a worker to its own cores: engines on shared cores would wait for each other at every step.

    `worker` may exceed `num_workers`, since a replacement worker has a new number.
    """
    os.sched_setaffinity(0, shares(sorted(_ALL), num_workers)[worker % num_workers])


@contextmanager
def all_cores() -> Iterator[None]:
    """Uses all cores during the block, for starting an engine of several processes."""
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, _ALL)
    try:
        yield
    finally:
        os.sched_setaffinity(0, own)
