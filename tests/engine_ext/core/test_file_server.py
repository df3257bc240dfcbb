# SPDX-License-Identifier: Apache-2.0
"""Threads that move KV."""

import os
import threading

import pytest

from engine_ext.core.file_server import on_all_cores


@pytest.fixture
def every_core():
    """The cores that this process may use; parallel tests are bound to some of them."""
    bound = os.sched_getaffinity(0)
    os.sched_setaffinity(0, range(os.cpu_count()))
    yield os.sched_getaffinity(0)
    os.sched_setaffinity(0, bound)


def test_threads_of_a_worker_that_vllm_binds_run_on_every_core(every_core):
    found = []
    bound = {min(every_core)}
    os.sched_setaffinity(0, bound)
    with on_all_cores():
        thread = threading.Thread(target=lambda: found.append(os.sched_getaffinity(0)))
        thread.start()
    thread.join()
    assert os.sched_getaffinity(0) == bound
    assert found == [every_core]
