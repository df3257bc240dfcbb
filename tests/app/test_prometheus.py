# SPDX-License-Identifier: Apache-2.0
"""The chunk cache's metrics, of a manager without an engine."""

import asyncio
import threading
from functools import partial
from types import SimpleNamespace

import pytest
from prometheus_client import REGISTRY, generate_latest

from app.prometheus import chunk_cache_metrics, exported
from cache.eviction.removal import Removal
from engine_ext.chunks.cache_off import CacheOff
from tests.app.helpers import cache_with
from tests.cache.helpers import Clock, acquire, fill, make_manager
from tests.serving import in_a_loop

A, B = (100, 101, 102, 103), (200, 201)


def make_engine(manager=None, reason=None):
    cache = CacheOff(reason) if manager is None else cache_with(manager, running=2, queued=3)
    cache.reason = reason
    return SimpleNamespace(cache=cache)


def scrape(engine, *, wanted=True):
    """Values of samples by name and labels, in Prometheus' format."""
    metrics = in_a_loop(lambda: list(chunk_cache_metrics(engine, wanted=wanted)))
    lines = generate_latest(SimpleNamespace(collect=lambda: metrics)).decode().splitlines()
    return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines if not line.startswith("#")}


def test_a_new_cache_shows_zeros_where_there_will_be_counts():
    shown = scrape(make_engine(make_manager()))
    names = [
        *('lookups_total{result="hit",tier="pool"}', 'requests_total{mode="chunked"}', 'tokens_total{kind="reused"}'),
        *('fills_total{outcome="failed"}', "refused_loads_total", "leases"),
        *("oldest_lease_seconds", "plan_seconds_count"),
        *(f'removals_total{{reason="{reason}"}}' for reason in Removal),
    ]
    assert {name: shown[f"tessera_{name}"] for name in names} == dict.fromkeys(names, 0)
    assert shown["tessera_event_loop_tasks"] == 1


def test_counts_are_the_managers():
    manager = make_manager()
    fill(manager, A)
    fill(manager, A, B)
    manager.metrics.requests["full"] += 1
    manager.metrics.full_reasons["capacity"] += 1
    manager.metrics.tokens["reused"] += 70
    manager.metrics.refused_loads += 1
    manager.clear()
    shown = scrape(make_engine(manager))
    expected = {
        'lookups_total{result="hit",tier="pool"}': 1,
        'lookups_total{result="filled",tier="pool"}': 2,
        'requests_total{mode="full"}': 1,
        'full_attention_total{reason="capacity"}': 1,
        'tokens_total{kind="reused"}': 70,
        'fills_total{outcome="succeeded"}': 2,
        'removals_total{reason="cleared"}': 3,
        "refused_loads_total": 1,
        "lease_seconds_count": 2,
    }
    assert {name: shown[f"tessera_{name}"] for name in expected} == expected


def test_sizes_are_the_managers():
    clock = Clock()
    manager = make_manager(num_pages=12, clock=clock)
    fill(manager, A)
    (entry,) = [e for e in manager.index if e.identity.token_ids == A]
    manager.retain(entry, pinned=True, expires_at=None)
    acquire(manager, A, B)
    clock.now += 60
    shown = scrape(make_engine(manager))
    pages = {"": 12, "_free": 9, "_leased": 3, "_pinned": 1, "_held": 3}
    assert {name: shown[f"tessera_pool_pages{name}"] for name in pages} == pages
    expected = {"segments": 3, "segments_filling": 1, "segments_detached": 0, "leases": 1, "oldest_lease_seconds": 60}
    expected |= {"fills_running": 2, "fills_queued": 3, "registered_ids": 0}
    assert {name: shown[f"tessera_{name}"] for name in expected} == expected


def test_pages_are_held_while_they_are_pinned_leased_or_filled():
    manager = make_manager()
    fill(manager, A)
    assert manager.num_pages_held() == 0
    (entry,) = [e for e in manager.index if e.identity.token_ids == A]
    manager.retain(entry, pinned=True, expires_at=None)
    assert manager.num_pages_held() == 1
    lease = acquire(manager, B)
    assert manager.num_pages_held() == 3
    for job in lease.fills:
        manager.fill_failed(job)
    assert manager.num_pages_held() == 3  # the page of B is detached, but leased; the system segment's too
    manager.release(lease)
    assert manager.num_pages_held() == 1


@pytest.mark.parametrize(
    ("manager", "reason", "wanted", "state", "passed"),
    [
        (make_manager(), None, True, "on", 1),
        (make_manager(), "integrity check failed: …", True, "unavailable", 1),
        (None, "self-check failed: …", True, "unavailable", 0),
        (None, "switched off by --chunk-cache off", False, "switched_off", 0),
    ],
)
def test_the_state_is_always_shown(manager, reason, wanted, state, passed):
    shown = scrape(make_engine(manager, reason), wanted=wanted)
    states = {name: shown[f'tessera_cache_state{{state="{name}"}}'] for name in ("on", "switched_off", "unavailable")}
    assert states == {name: int(name == state) for name in states}
    assert shown["tessera_self_check_passed"] == passed
    assert ("tessera_segments" in shown) == (manager is not None)


def test_a_scrape_does_not_look_at_each_segment(monkeypatch):
    manager = make_manager()
    fill(manager, A)
    monkeypatch.setattr(type(manager.index), "__iter__", lambda _: pytest.fail("the index was gone through"))
    assert scrape(make_engine(manager))["tessera_segments"] == 2


async def test_engines_of_one_process_are_shown_one_after_the_other():
    for number in (1, 2):
        manager = make_manager()
        for _ in range(number):
            fill(manager, A)
        with exported(partial(chunk_cache_metrics, make_engine(manager), wanted=True)):
            assert REGISTRY.get_sample_value("tessera_fills_total", {"outcome": "succeeded"}) == 1
            assert REGISTRY.get_sample_value("tessera_lookups_total", {"result": "hit", "tier": "pool"}) == number - 1
        assert REGISTRY.get_sample_value("tessera_segments") is None


async def test_the_manager_is_read_in_its_event_loop():
    """vLLM answers GET /metrics in a thread while the event loop changes the manager."""
    engine, threads = make_engine(make_manager()), []
    engine.cache.manager.oldest_lease_seconds = lambda: float(threads.append(threading.get_ident()) or 0)
    with exported(partial(chunk_cache_metrics, engine, wanted=True)):
        text = await asyncio.to_thread(generate_latest, REGISTRY)
    assert b"tessera_segments 0.0" in text
    assert threads == [threading.get_ident()]
