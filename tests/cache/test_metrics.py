# SPDX-License-Identifier: Apache-2.0
"""The counters' JSON form."""

import json

from cache.lease import ChunkStatus
from cache.metrics import ChunkCacheMetrics


def test_a_snapshot_is_json_and_a_copy():
    metrics = ChunkCacheMetrics()
    metrics.lookups[ChunkStatus.HIT] += 2
    metrics.removals["evicted"] = 1
    metrics.tier_events["file", "loaded"] += 1
    snapshot = metrics.snapshot()
    metrics.lookups[ChunkStatus.HIT] += 1
    assert json.loads(json.dumps(snapshot)) == {
        "lookups": {"hit": 2},
        "requests": {},
        "full_reasons": {},
        "tokens": {},
        "fills": {},
        "handovers": {},
        "fetches": {},
        "fetched_bytes": 0,
        "tiers": {"file": {"loaded": 1}},
        "loaded_bytes": {},
        "removals": {"evicted": 1},
        "refused_loads": 0,
    }
