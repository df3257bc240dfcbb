# SPDX-License-Identifier: Apache-2.0
"""The system clock jumps an hour forward or back while chunks are cached."""

import ast
import time

import pytest

from cache.segments.index import now
from tests.cache.helpers import acquire, fill, find, make_manager
from tests.support.sources import MODULES, parse

HOUR = 3600.0
# Modules that use the system clock, each with the reason.
WALL_CLOCK = {
    "app/commands/cache.py": "files' times, written by other processes",
    "machine/folders.py": "files' times, written by other processes",
    "engine_ext/start/vllm_log.py": "files' times, written by other processes",
    "app/collections/store.py": "a date to be read by people",
    "app/cluster/router/chooser.py": "a date to be read by people",
    "app/prompt/segments.py": "vLLM's own field, the start of its spans",
    "measuring/speed/command.py": "a date to be read by people",
    "cache/segments/index.py": "once, at the start",
    "cache/tiers/memory.py": "a date to be read by people; the order of use is a list's",
    "cache/tiers/mooncake.py": "a date to be read by people; the order of use is a list's",
    "cache/tiers/objects.py": "compared with what the store says",
}


class SystemClocks:
    """``time.time``, and ``time.monotonic``, which is independent of it."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.elapsed = self.set_by = 0.0
        since, started = time.monotonic(), time.time()
        patch.setattr(time, "time", lambda: started + self.elapsed + self.set_by)
        patch.setattr(time, "monotonic", lambda: since + self.elapsed)


@pytest.fixture
def clocks(monkeypatch):
    return SystemClocks(monkeypatch)


@pytest.mark.parametrize("jump", [HOUR, -HOUR])
def test_chunks_expire_when_their_time_has_passed_and_not_when_the_clock_is_set(clocks, jump):
    assert now() == pytest.approx(time.time(), abs=1)  # the time of day
    manager, chunk = make_manager(), (5, 6)
    fill(manager, chunk)
    manager.retain(find(manager, chunk), pinned=True, expires_at=manager.clock() + 60)
    clocks.elapsed += 59
    clocks.set_by += jump
    manager.expire()
    assert find(manager, chunk) is not None
    clocks.elapsed += 2
    manager.expire()
    assert find(manager, chunk) is None
    assert manager.occupancy()["pages_pinned"] == 0


@pytest.mark.parametrize("jump", [HOUR, -HOUR])
def test_ages_are_right_though_the_clock_is_set(clocks, jump):
    manager = make_manager()
    lease = acquire(manager, (5, 6))
    clocks.elapsed += 2
    clocks.set_by += jump
    assert manager.oldest_lease_seconds() == pytest.approx(2)
    for job in lease.fills:
        manager.fill_succeeded(job)
    manager.release(lease)
    (metric,) = manager.metrics.lease_seconds.collect()
    assert [each.value for each in metric.samples if each.name.endswith("_sum")] == [pytest.approx(2)]


def test_the_systems_clock_is_looked_at_where_that_is_right():
    def calls(name):
        return {ast.unparse(node.func) for node in ast.walk(parse(name)) if isinstance(node, ast.Call)}

    looks = {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow"}
    assert {name for name in MODULES if calls(name) & looks} == set(WALL_CLOCK)
