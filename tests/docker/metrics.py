# SPDX-License-Identifier: Apache-2.0
"""Series and labels in GET /metrics of replicas and router, without an engine."""

import inspect
import re
from functools import cache
from types import SimpleNamespace
from typing import NamedTuple

import promql_parser
from prometheus_client import Metric
from vllm.v1.metrics import loggers

from app.cluster.registration import publisher_metrics
from app.cluster.router.metrics import RouterMetrics
from app.prometheus import chunk_cache_metrics
from engine_ext.core.stats import COUNTERS, HISTOGRAMS
from tests.app.helpers import cache_with
from tests.cache.helpers import make_manager
from tests.serving import in_a_loop

SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}
VLLM_LABELS = frozenset({"model_name", "engine"})
ADDED = frozenset({"instance", "job"})
"""Labels that Prometheus adds to every series."""


class Series(NamedTuple):
    """A time series: whether it is a counter, and its labels without Prometheus' own."""

    grows: bool
    labels: frozenset[str]


def nodes(expression: promql_parser.Expr) -> list[promql_parser.Expr]:
    """The parts of a PromQL expression, itself included."""
    found: list[promql_parser.Expr] = []
    promql_parser.walk(expression, found.append)
    return found


def selectors(expression: promql_parser.Expr) -> dict[str, set[str]]:
    """Series that a PromQL expression asks for, and the labels that it asks for with them.

    They exist, also the labels by which series are added up. What grows is looked at over time, and nothing else is.
    """
    series = {**replica_series(), **router_series(), "up": Series(grows=False, labels=frozenset())}
    found, asked = nodes(expression), dict[str, set[str]]()
    ranged = {node.vector_selector.name for node in found if isinstance(node, promql_parser.MatrixSelector)}
    for node in found:
        if isinstance(node, promql_parser.VectorSelector):
            asked[node.name] = {matcher.name for matcher in node.matchers.matchers}
            assert asked[node.name] <= series[node.name].labels | ADDED
            assert (node.name in ranged) == series[node.name].grows, node.name
        if isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None:
            summed = {name for each in nodes(node.expr) for name in [getattr(each, "name", None)] if name in series}
            assert all(set(node.modifier.labels) <= series[name].labels | ADDED for name in summed)
    return asked


@cache
def replica_series() -> dict[str, Series]:
    """Series by name, of a replica with its cache on, and a tier."""
    manager = make_manager()
    manager.metrics.full_reasons["capacity"] += 1
    cache = cache_with(manager)
    cache.tier_writer = SimpleNamespace(tiers={"file": 2})
    engine = SimpleNamespace(cache=cache)
    publisher = SimpleNamespace(is_up=True, num_published=0, num_errors=0)
    collected = in_a_loop(lambda: [*chunk_cache_metrics(engine, wanted=True), *publisher_metrics(publisher)])
    kinds = dict.fromkeys((f"tessera_{name}" for name in COUNTERS), "counter")
    kinds |= dict.fromkeys((f"tessera_{name}" for name in HISTOGRAMS), "histogram")
    source = inspect.getsource(loggers)
    kinds |= {name: kind for kind, name in re.findall(r'self\._(\w+)_cls\(\s*name="(vllm:\w+)"', source)}
    return _series(collected) | {
        name + suffix: _one(kind, VLLM_LABELS, suffix) for name, kind in kinds.items() for suffix in SUFFIXES[kind]
    }


@cache
def router_series() -> dict[str, Series]:
    """Series by name, of a router after routing."""
    metrics = RouterMetrics()
    metrics.requests.labels("replica-1", "200").inc()
    metrics.retries.labels("unreachable").inc()
    with metrics.load.labels("replica-1").track_inprogress():
        pass
    return _series(metrics.collected.collect())


def _series(collected: list[Metric]) -> dict[str, Series]:
    return {
        sample.name: _one(metric.type, frozenset(sample.labels), "")
        for metric in collected
        for sample in metric.samples
        if not sample.name.endswith("_created")
    }


def _one(kind: str, labels: frozenset[str], suffix: str) -> Series:
    return Series(kind != "gauge", labels | {"le"} if suffix == "_bucket" else labels)
