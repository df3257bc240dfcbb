# SPDX-License-Identifier: Apache-2.0
"""Workers of pytest-xdist have their own cores, unless there are too few."""

import os

from tests import cores


def test_each_worker_has_cores_of_its_own_and_lends_all_of_them(monkeypatch):
    before = os.sched_getaffinity(0)
    monkeypatch.setattr(cores, "_ALL", before)
    try:
        for worker in range(len(before) + 1):
            cores.keep_to_own_cores(worker, len(before))
            assert os.sched_getaffinity(0) == {sorted(before)[worker % len(before)]}
        with cores.all_cores():
            assert os.sched_getaffinity(0) == before
        assert len(os.sched_getaffinity(0)) == 1
        cores.keep_to_own_cores(0, len(before) + 1)
        assert os.sched_getaffinity(0) == before
    finally:
        os.sched_setaffinity(0, before)


def test_there_is_at_least_one_worker():
    assert 1 <= cores.num_workers() <= 4
