# SPDX-License-Identifier: Apache-2.0
"""The system clock jumps an hour forward or back while chunks are cached."""

import ast
import time
from pathlib import Path

import pytest

from cache.segments.index import now
from tests.cache.helpers import acquire, fill, is_cached, make_manager

ROOT = Path(__file__).parents[2]
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
        self._since, self._elapsed, self._set_by = time.monotonic(), 0.0, 0.0
        started = time.time()
        patch.setattr(time, "time", lambda: started + self._elapsed + self._set_by)
        patch.setattr(time, "monotonic", lambda: self._since + self._elapsed)

    def set_by(self, seconds: float) -> None:
        self._set_by += seconds

    def pass_by(self, seconds: float) -> None:
        self._elapsed += seconds


@pytest.fixture
def clocks(monkeypatch):
    return SystemClocks(monkeypatch)


def test_it_shows_the_time_of_day(clocks):
    assert now() == pytest.approx(time.time(), abs=1)


@pytest.mark.parametrize("jump", [HOUR, -HOUR])
def test_chunks_expire_when_their_time_has_passed_and_not_when_the_clock_is_set(clocks, jump):
    manager, chunk = make_manager(), (5, 6)
    fill(manager, chunk)
    (entry,) = (entry for entry in manager.index if not entry.is_system)
    manager.retain(entry, pinned=True, expires_at=manager.clock() + 60)
    clocks.pass_by(59)
    clocks.set_by(jump)
    manager.expire()
    assert is_cached(manager, chunk)
    clocks.pass_by(2)
    manager.expire()
    assert not is_cached(manager, chunk)


@pytest.mark.parametrize("jump", [HOUR, -HOUR])
def test_ages_are_right_though_the_clock_is_set(clocks, jump):
    manager = make_manager()
    lease = acquire(manager, (5, 6))
    clocks.pass_by(2)
    clocks.set_by(jump)
    assert manager.oldest_lease_seconds() == pytest.approx(2)
    for job in lease.fills:
        manager.fill_succeeded(job)
    manager.release(lease)
    assert lease_seconds(manager) == pytest.approx(2)


def test_the_systems_clock_is_looked_at_where_that_is_right():
    packages = (
        "app",
        "cache",
        "engine_ext",
        "measuring",
        "kernels",
        "machine",
        "replicas",
        "training",
        "web",
    )
    paths = [path for name in packages for path in (ROOT / name).rglob("*.py")]
    assert {path.relative_to(ROOT).as_posix() for path in paths if looks_at_wall_clock(path)} == set(WALL_CLOCK)


def lease_seconds(manager):
    (metric,) = manager.metrics.lease_seconds.collect()
    return next(sample.value for sample in metric.samples if sample.name.endswith("_sum"))


def looks_at_wall_clock(path):
    calls = [node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    names = {ast.unparse(call) for call in calls}
    return bool(names & {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow"})
