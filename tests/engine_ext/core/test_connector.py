# SPDX-License-Identifier: Apache-2.0
"""The connector among others of vLLM's MultiConnector."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.outputs import KVConnectorOutput

from engine_ext.core import connector as module
from engine_ext.core.connector import ChunkCacheConnector
from engine_ext.core.scheduler import SchedulerHalf
from engine_ext.core.worker import PoolSizeError, WorkerHalf
from engine_ext.wire.plan import LoadRefused, TransferPlan


@pytest.mark.parametrize(("meta", "evicted"), [(LoadRefused(), {0, 1}), (None, set()), (object(), set())])
def test_only_its_own_refusal_empties_the_prefix_cache(meta, evicted):
    """Invalid blocks of another connector are not in the prefix cache yet."""
    found: set[int] = set()
    connector = ChunkCacheConnector.__new__(ChunkCacheConnector)
    connector._num_blocks, connector.scheduler = 2, SchedulerHalf("sha256", 16)
    connector.bind_gpu_block_pool(SimpleNamespace(evict_blocks=found.update))
    connector.update_connector_output(KVConnectorOutput(invalid_block_ids={1}, kv_connector_worker_meta=meta))
    assert found == evicted


@pytest.mark.parametrize("others", [None, {"do_remote_decode": True}])
def test_other_connectors_see_no_plan(others):
    half = SchedulerHalf("sha256", 16)
    params = {**(others or {}), **TransferPlan().to_params()}
    request: Any = SimpleNamespace(request_id="r", kv_transfer_params=params, num_prompt_tokens=3)
    half.add_request(request)
    assert request.kv_transfer_params == others


@pytest.mark.parametrize("hook", ["get_finished", "get_transfer_results"])
def test_requests_end_by_the_hook_of_either_version(hook):
    ended: set[str] = set()
    connector = ChunkCacheConnector.__new__(ChunkCacheConnector)
    connector.worker = SimpleNamespace(end=ended.update, take_received=lambda: (set(), set()))  # type: ignore[assignment]
    getattr(connector, hook)({"r"})
    assert ended == {"r"}


def registered(half: WorkerHalf, device: str, monkeypatch: pytest.MonkeyPatch, *, sleeps: bool = False) -> list[str]:
    """Tells the connector of a KV cache on a device with 4 MiB; returns the tags of memory that was allocated."""
    tags = [""]

    @contextmanager
    def use_memory_pool(tag: str) -> Iterator[None]:
        tags.append(tag)
        yield
        tags.append("")

    def empty(*args: Any, **kwargs: Any) -> torch.Tensor:
        taken.append(tags[-1])
        return allocate(*args, **kwargs)

    allocator = SimpleNamespace(get_instance=lambda: SimpleNamespace(use_memory_pool=use_memory_pool))
    platform = SimpleNamespace(is_cuda_alike=lambda: device != "cpu", device_type=device)
    monkeypatch.setattr("vllm.device_allocator.cumem.CuMemAllocator", allocator)
    monkeypatch.setattr(module, "current_platform", platform)
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda: (4 << 20, 8 << 20))
    caches = {"layer": torch.zeros(2, 16, 2, 64, device=device)}
    taken, allocate = list[str](), torch.empty
    monkeypatch.setattr(torch, "empty", empty)
    connector = ChunkCacheConnector.__new__(ChunkCacheConnector)
    connector.worker = half
    connector._vllm_config = SimpleNamespace(model_config=SimpleNamespace(enable_cumem_allocator=sleeps))  # type: ignore[assignment]
    connector.register_kv_caches(caches)
    return taken


@pytest.mark.parametrize(
    ("device", "sleeps", "taken"), [("meta", False, [""]), ("meta", True, ["kv_cache"]), ("cpu", False, [])]
)
def test_the_pool_gets_a_devices_memory_with_the_kv_cache(device, sleeps, taken, monkeypatch):
    """That is, before graphs are captured."""
    half = WorkerHalf(3 << 20, 16, 16)
    assert registered(half, device, monkeypatch, sleeps=sleeps) == taken
    if taken:
        half.check_room(1 << 20)  # it has its memory, so that less is free


def test_a_pool_larger_than_the_free_memory_takes_none(monkeypatch):
    half = WorkerHalf(5 << 20, 16, 16)
    assert registered(half, "meta", monkeypatch) == []
    with pytest.raises(PoolSizeError, match="5 MiB are more than the 4 MiB that are free"):
        half.check_room(4 << 20)
