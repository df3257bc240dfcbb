# SPDX-License-Identifier: Apache-2.0
"""Statistics of workers: aggregation, transfer and display."""

import json
import pickle
from types import SimpleNamespace

import pytest
from prometheus_client import REGISTRY, Counter, Gauge, Histogram

pytest.importorskip("vllm")
from engine_ext.core.stats import COUNTERS, HISTOGRAMS, TransferMetrics, TransferStats


def make_stats(tokens: int = 10) -> TransferStats:
    stats = TransferStats()
    stats.moved("load", 0.25, tokens, tokens * 8)
    stats.moved("save", 0.5, 2, 16)
    stats.refused()
    return stats


def make_metrics(num_workers: int = 1) -> TransferMetrics:
    config = SimpleNamespace(kv_transfer_config=None, parallel_config=SimpleNamespace(world_size=num_workers))
    types = {Gauge: Gauge, Counter: Counter, Histogram: Histogram}
    return TransferMetrics(config, types, ["engine"], {0: ["0"]})


def sample(name: str) -> float | None:
    return REGISTRY.get_sample_value(f"tessera_{name}", {"engine": "0"})


def test_new_statistics_are_empty_and_reset_ones_too():
    stats = TransferStats()
    assert stats.is_empty()
    stats.refused()
    assert not stats.is_empty()
    stats.reset()
    assert stats.is_empty()


def test_statistics_add_up_and_travel_between_processes():
    both = make_stats(10).aggregate(make_stats(20))
    seconds = {"load_seconds": [0.25, 0.25], "save_seconds": [0.5, 0.5]}
    moved = {"load_tokens": 30, "save_tokens": 4, "load_bytes": 240, "save_bytes": 32}
    assert both.data == {**seconds, **moved, "worker_refused_loads": 2}
    assert both.reduce() == both.data | {"load_seconds": 0.5, "save_seconds": 1.0}
    assert pickle.loads(pickle.dumps(make_stats())).data == make_stats().data
    assert TransferStats(json.loads(json.dumps(make_stats().to_dict()))).data == make_stats().data


def test_metrics_show_what_was_observed():
    """Those of a second engine in the process start at zero."""
    for _ in range(2):
        metrics = make_metrics()
        assert {name: sample(f"{name}_total") for name in COUNTERS} == dict.fromkeys(COUNTERS, 0)
        assert {name: sample(f"{name}_count") for name in HISTOGRAMS} == dict.fromkeys(HISTOGRAMS, 0)
        for _ in range(2):
            metrics.observe(make_stats().to_dict())
        assert (sample("load_seconds_count"), sample("load_seconds_sum")) == (2, 0.5)
        assert (sample("load_tokens_total"), sample("load_bytes_total")) == (20, 160)
        assert (sample("save_tokens_total"), sample("worker_refused_loads_total")) == (4, 2)
    two_workers = make_metrics(num_workers=2)
    two_workers.observe(make_stats().aggregate(make_stats()).to_dict())
    assert (sample("load_tokens_total"), sample("load_bytes_total")) == (10, 160)  # a token counts once
