# SPDX-License-Identifier: Apache-2.0
"""The chunk cache on ``GET /metrics``, beside vLLM's own metrics."""

import asyncio
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cache.config import ChunkCacheConfig
from cache.eviction.removal import Removal
from cache.lease import ChunkStatus
from cache.metrics import TIER_EVENTS, ChunkCacheMetrics
from engine_ext.chunks.cache_off import CacheOff
from engine_ext.chunks.chunk_cache import ChunkCache

if TYPE_CHECKING:
    from engine_ext.client.engine import ChunkEngine

_TIMEOUT_S = 10.0

Read = Callable[[], Iterable[Metric]]


class _Exported(Collector):
    """Calls ``read`` on each scrape; in the event loop, since vLLM answers in another thread."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self._home, self._loop = threading.get_ident(), asyncio.get_running_loop()

    def describe(self) -> Iterable[Metric]:
        """Returns nothing; without this method, registering would collect."""
        return []

    def collect(self) -> Iterable[Metric]:
        """All metrics."""
        if threading.get_ident() == self._home:
            return self._read()
        return asyncio.run_coroutine_threadsafe(self._in_loop(), self._loop).result(_TIMEOUT_S)

    async def _in_loop(self) -> list[Metric]:
        return list(self._read())


@contextmanager
def exported(read: Read) -> Iterator[None]:
    """Exports what ``read`` returns on ``GET /metrics`` within the context; called in its event loop."""
    collector = _Exported(read)
    REGISTRY.register(collector)
    try:
        yield
    finally:
        REGISTRY.unregister(collector)


def chunk_cache_metrics(engine: "ChunkEngine", *, wanted: bool) -> Iterator[Metric]:
    """The engine's state now; with the cache off, only that it is.

    ``wanted`` distinguishes a cache that is unavailable from a cache that was switched off.
    """
    cache = engine.cache
    now = "on" if cache.reason is None else "unavailable" if wanted else "switched_off"
    states = {name: int(name == now) for name in ("on", "switched_off", "unavailable")}
    yield _gauge_by("cache_state", "State of the chunk cache: 1 for the one it is in", "state", states)
    passed = int(not isinstance(cache, CacheOff))
    yield _gauge("self_check_passed", "Whether reuse reproduced the engine's own KV at the start", passed)
    yield _gauge("event_loop_tasks", "Running asyncio tasks of the server", len(asyncio.all_tasks()))
    if not isinstance(cache, CacheOff):
        yield from _counters(cache.metrics)
        yield from _gauges(cache)
        yield from _histograms(cache.metrics)
        yield from _of_tiers(cache.metrics, cache.tier_writer.tiers)


def _counters(counted: ChunkCacheMetrics) -> Iterator[Metric]:
    lookups = CounterMetricFamily("tessera_lookups", "Chunk look-ups, by result and tier", labels=["result", "tier"])
    for status in (ChunkStatus.HIT, ChunkStatus.FILLED, ChunkStatus.WAITED):
        lookups.add_metric([status, "pool"], counted.lookups[status])
    yield lookups
    yield _counter_by(
        "requests", "Finished requests over chunks, by mode", "mode", _with_zeros(counted.requests, "chunked", "full")
    )
    yield _counter_by(
        "full_attention", "Requests over chunks in full attention, by reason", "reason", counted.full_reasons
    )
    yield _counter_by(
        "tokens",
        "Prompt tokens of finished requests over chunks: reused, computed, left_out; fill_computed: in fill requests",
        "kind",
        _with_zeros(counted.tokens, "reused", "computed", "left_out", "fill_computed"),
    )
    outcomes = _with_zeros(counted.fills, "succeeded", "fetched", "loaded", "recomputed", "failed", "aborted")
    yield _counter_by("fills", "Fills ended, by outcome", "outcome", outcomes)
    handovers = _with_zeros(counted.handovers, "taken", "refused", "failed", "lost")
    yield _counter_by("handovers", "Prompts that another replica had computed, by outcome", "outcome", handovers)
    fetches = _with_zeros(counted.fetches, "fetched", "absent", "failed", "refused", "late")
    yield _counter_by("fetches", "Attempts to get chunks from other replicas, by outcome", "outcome", fetches)
    fetched = CounterMetricFamily("tessera_fetched_bytes", "Bytes of KV fetched from other replicas")
    fetched.add_metric([], counted.fetched_bytes)
    yield fetched
    yield _counter_by(
        "removals", "Segments removed from the index, by reason", "reason", _with_zeros(counted.removals, *Removal)
    )
    refused = CounterMetricFamily("tessera_refused_loads", "Requests whose load a worker refused")
    refused.add_metric([], counted.refused_loads)
    yield refused


def _of_tiers(counted: ChunkCacheMetrics, tiers: Mapping[str, int]) -> Iterator[Metric]:
    """``tiers`` are their sizes by name."""
    events = CounterMetricFamily("tessera_tier_events", "Events of tiers", labels=["tier", "event"])
    for tier, event in itertools.product(tiers, TIER_EVENTS):
        events.add_metric([tier, event], counted.tier_events[tier, event])
    yield events
    loaded = _with_zeros(counted.loaded_bytes, *tiers)
    yield _counter_by("loaded_bytes", "Bytes of KV loaded from tiers", "tier", loaded)
    held = _with_zeros(counted.tier_bytes, *tiers)
    yield _gauge_by("tier_bytes", "Bytes in tiers, as of the last transfer", "tier", held)
    yield _gauge_by("tier_size_bytes", "Bytes that tiers may hold", "tier", tiers)
    for tier in tiers:
        counted.tier_load_seconds.labels(tier)  # the zeros that rates need
    yield from counted.tier_load_seconds.collect()


def _gauges(cache: ChunkCache) -> Iterator[Metric]:
    manager, fills = cache.manager, cache.fills
    held = manager.occupancy()
    yield _gauge("pool_bytes", "Memory of the pool, on all workers together", _pool_bytes(manager.config))
    yield _gauge("pool_pages", "Pages of the pool", held["pages_total"])
    yield _gauge("pool_pages_free", "Free pages", held["pages_free"])
    yield _gauge("pool_pages_leased", "Pages of segments in use by running requests", held["pages_leased"])
    yield _gauge("pool_pages_pinned", "Pages of pinned segments", held["pages_pinned"])
    yield _gauge(
        "pool_pages_held",
        "Pages that eviction can't free now: leased, pinned or being filled",
        manager.num_pages_held(),
    )
    yield _gauge("segments", "Segments that requests can find", held["segments"])
    yield _gauge("segments_filling", "Segments being computed", held["segments_filling"])
    yield _gauge("segments_detached", "Segments that are no longer found but still in use", held["segments_detached"])
    yield _gauge("leases", "Requests that hold segments", held["leases"])
    yield _gauge("oldest_lease_seconds", "Age of the oldest lease; 0 without any", manager.oldest_lease_seconds())
    yield _gauge("fills_running", "Fill requests in the engine", fills.num_running)
    yield _gauge("fills_queued", "Fill requests waiting for their turn", fills.num_queued)
    yield _gauge("archive_waiting", "Segments and blocks waiting to be stored in tiers", cache.num_waiting)
    yield _gauge("registered_ids", "Registered chunk ids", len(manager.ids))


def _histograms(counted: ChunkCacheMetrics) -> Iterator[Metric]:
    for histogram in (counted.plan_seconds, counted.fill_seconds, counted.lease_seconds):
        yield from histogram.collect()


def _pool_bytes(config: ChunkCacheConfig) -> int:
    return config.num_pages * config.page_bytes


def _with_zeros(counts: Mapping[str, int], *names: str) -> dict[str, int]:
    """``counts`` with 0 for each uncounted name: rates need the value before the first count."""
    return {**dict.fromkeys(map(str, names), 0), **counts}


def _counter_by(name: str, text: str, label: str, counts: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(f"tessera_{name}", text, labels=[label])
    for value, count in counts.items():
        family.add_metric([value], count)
    return family


def _gauge_by(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(f"tessera_{name}", text, labels=[label])
    for value, number in values.items():
        family.add_metric([value], number)
    return family


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"tessera_{name}", text, value=value)
