# SPDX-License-Identifier: Apache-2.0
"""The connector among others of vLLM's MultiConnector."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.outputs import KVConnectorOutput

from engine_ext.core.connector import ChunkCacheConnector
from engine_ext.core.scheduler import SchedulerHalf
from engine_ext.wire.plan import LoadRefused, TransferPlan


@pytest.mark.parametrize(("meta", "evicted"), [(LoadRefused(frozenset("r")), {0, 1}), (None, set()), (object(), set())])
def test_only_its_own_refusal_empties_the_prefix_cache(meta: Any, evicted: set[int]) -> None:
    """Invalid blocks of another connector are not in the prefix cache yet."""
    found: set[int] = set()
    connector = ChunkCacheConnector.__new__(ChunkCacheConnector)
    connector._num_blocks, connector.scheduler = 2, SchedulerHalf("sha256", 16)
    connector.bind_gpu_block_pool(SimpleNamespace(evict_blocks=found.update))
    connector.update_connector_output(KVConnectorOutput(invalid_block_ids={1}, kv_connector_worker_meta=meta))
    assert found == evicted


@pytest.mark.parametrize("others", [None, {"do_remote_decode": True}])
def test_other_connectors_see_no_plan(others: dict[str, Any] | None) -> None:
    half = SchedulerHalf("sha256", 16)
    params = {**(others or {}), **TransferPlan().to_params()}
    request: Any = SimpleNamespace(request_id="r", kv_transfer_params=params, num_prompt_tokens=3)
    half.add_request(request)
    assert request.kv_transfer_params == others
