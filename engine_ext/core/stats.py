# SPDX-License-Identifier: Apache-2.0
"""Statistics of workers' loads and saves, from vLLM's workers to ``GET /metrics``."""

from contextlib import suppress
from typing import Any, Literal

from prometheus_client import REGISTRY, Counter, Histogram
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

_BUCKETS = (1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 0.5, 1.0)
HISTOGRAMS = {
    "load_seconds": "Copying a step's chunks from the pool, in one worker",
    "save_seconds": "Copying what a step's fills computed to the pool, in one worker",
}
COUNTERS = {
    "load_tokens": "Tokens copied from the pool",
    "save_tokens": "Tokens copied to the pool",
    "load_bytes": "Bytes copied from the pool, by all workers together",
    "save_bytes": "Bytes copied to the pool, by all workers together",
    "worker_refused_loads": "Loads refused because a page carried another tag, by all workers together",
}
_SHARED = ("load_tokens", "save_tokens")
"""Each worker moves its share of the same tokens: in sums, every token counts once per worker."""


class TransferStats(KVConnectorStats):
    """Loads and saves of one or several workers since the last collection.

    Times are wall time. On a GPU, where copies are asynchronous, they are the time to start the copies: waiting for
    their end would be too slow.
    """

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        super().__init__(data or _nothing())

    def reset(self) -> None:
        """Clears the counts. vLLM calls this and the methods below, except the last two."""
        self.data = _nothing()

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Adds the counts of another worker or a later step."""
        for name, value in other.data.items():
            self.data[name] = self.data[name] + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """Totals for vLLM's log."""
        return {name: sum(value) if isinstance(value, list) else value for name, value in self.data.items()}

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not any(self.data.values())

    def moved(self, verb: Literal["load", "save"], seconds: float, num_tokens: int, num_bytes: int) -> None:
        """Counts one step's loads or saves."""
        self.data[f"{verb}_seconds"].append(seconds)
        self.data[f"{verb}_tokens"] += num_tokens
        self.data[f"{verb}_bytes"] += num_bytes

    def refused(self) -> None:
        """Counts one refused load."""
        self.data["worker_refused_loads"] += 1


class TransferMetrics(KVConnectorPromMetrics):
    """The statistics as Prometheus metrics, in the app's process."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        _unregister_earlier()
        self._num_workers = vllm_config.parallel_config.world_size
        self._histograms = {
            name: self._per_engine(metric_types[Histogram], name, text, buckets=_BUCKETS)
            for name, text in HISTOGRAMS.items()
        }
        self._counters = {name: self._per_engine(metric_types[Counter], name, text) for name, text in COUNTERS.items()}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Adds counts of :class:`TransferStats`; called by vLLM."""
        for name, histogram in self._histograms.items():
            for value in transfer_stats_data[name]:
                histogram[engine_idx].observe(value)
        for name, counter in self._counters.items():
            share = self._num_workers if name in _SHARED else 1
            counter[engine_idx].inc(transfer_stats_data[name] / share)

    def _per_engine(self, metric_type: Any, name: str, text: str, **kwargs: Any) -> dict[int, Any]:
        metric = metric_type(name=f"tessera_{name}", documentation=text, labelnames=self._labelnames, **kwargs)
        _registered.append(metric)
        return {index: metric.labels(*values) for index, values in self.per_engine_labelvalues.items()}


class TransferStatistics:
    """The connector's part in the app's process, where vLLM calls class methods only."""

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> TransferStats:
        return TransferStats(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> TransferMetrics:
        return TransferMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


_registered: list[Any] = []


def _unregister_earlier() -> None:
    """Unregisters earlier metrics, for a second engine in this process; vLLM does so for its own only."""
    while _registered:
        with suppress(KeyError):  # Ray's are not in the registry
            REGISTRY.unregister(_registered.pop())


def _nothing() -> dict[str, Any]:
    return {**{name: [] for name in HISTOGRAMS}, **dict.fromkeys(COUNTERS, 0)}
