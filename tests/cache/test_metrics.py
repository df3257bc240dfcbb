# SPDX-License-Identifier: Apache-2.0
"""The counters' JSON form."""

import json

from cache.manager import ChunkStatus
from cache.metrics import ChunkCacheMetrics


def test_a_snapshot_is_json_and_a_copy():
    metrics = ChunkCacheMetrics()
    metrics.lookups[ChunkStatus.HIT] += 2
    metrics.evicted_chunks = 1
    snapshot = metrics.snapshot()
    metrics.lookups[ChunkStatus.HIT] += 1
    assert json.loads(json.dumps(snapshot)) == {
        "lookups": {"hit": 2},
        "requests": {},
        "full_reasons": {},
        "tokens": {},
        "fills": {},
        "evicted_chunks": 1,
        "refused_loads": 0,
    }
