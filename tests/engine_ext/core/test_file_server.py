# SPDX-License-Identifier: Apache-2.0
"""Threads that move KV."""

import os
import threading

import pytest

from engine_ext.core.file_server import on_all_cores

ALL = os.sched_getaffinity(0)


@pytest.mark.skipif(len(ALL) < 2, reason="one core")
def test_threads_of_a_worker_that_vllm_binds_run_on_every_core():
    found = []
    bound = {min(ALL)}
    os.sched_setaffinity(0, bound)
    try:
        with on_all_cores():
            thread = threading.Thread(target=lambda: found.append(os.sched_getaffinity(0)))
            thread.start()
        thread.join()
        assert os.sched_getaffinity(0) == bound
    finally:
        os.sched_setaffinity(0, ALL)
    assert found == [ALL]
