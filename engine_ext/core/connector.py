# SPDX-License-Identifier: Apache-2.0
"""The KV connector that vLLM loads; forwards calls to the scheduler half or the worker half."""

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.platforms import current_platform

from engine_ext.core import ascend
from engine_ext.core.layers import block_tables
from engine_ext.core.scheduler import SchedulerHalf
from engine_ext.core.stats import TransferStatistics, TransferStats
from engine_ext.core.worker import WorkerHalf
from engine_ext.wire.plan import LoadRefused, StepTransfers

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from engine_ext.core.layers import KVCaches


class ChunkCacheConnector(TransferStatistics, KVConnectorBase_V1, SupportsHMA):
    """Loads and saves chunk KV by the plans that travel with requests.

    Loads are synchronous: they end before the forward pass of the step that schedules the request. A load whose
    pages carry another tag than planned writes nothing and fails the request (``kv_load_failure_policy="fail"``);
    :class:`~engine_ext.client.engine.ChunkEngine` then recomputes it in full attention.

    Where layers with windows have tables of blocks of their own, loads take a step before the request's first: vLLM can
    fail a request by its id then, which block ids of several tables don't tell.
    """

    def __init__(self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig") -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra = self._kv_transfer_config.kv_connector_extra_config
        self.kv_cache_groups = kv_cache_config.kv_cache_groups
        self._tables = block_tables(self.kv_cache_groups)
        self._num_blocks = kv_cache_config.num_blocks
        cache = vllm_config.cache_config
        self.scheduler = self.worker = None
        if role is KVConnectorRole.SCHEDULER:
            self.scheduler = SchedulerHalf(cache.prefix_caching_hash_algo, cache.block_size, self._tables)
        if role is KVConnectorRole.WORKER:
            self.worker = WorkerHalf(
                pool_bytes=extra["pool_bytes"],
                page_tokens=extra["page_tokens"],
                engine_block_size=cache.block_size,
                tables=self._tables,
            )

    @property
    def requires_kv_delivery(self) -> bool:
        """Whether what a preempted request has computed last is dropped: it may rest on a load that was refused.

        vLLM runs a step before it reads the refusal of the one before, and looks for the request among running ones.
        """
        return True

    # Scheduler side

    def on_new_request(self, request: "Request") -> None:
        self._scheduler.add_request(request)

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int | None, bool]:
        matched = self._scheduler.num_matched_tokens(request, num_computed_tokens)
        return matched, bool(matched and self._tables)

    def update_state_after_alloc(self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        self._scheduler.blocks_allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> KVConnectorMetadata:
        return self._scheduler.build_step(scheduler_output)

    def request_finished(self, request: "Request", block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return False, self._scheduler.finish_request(request)

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, [])

    def bind_gpu_block_pool(self, gpu_block_pool: "BlockPool") -> None:
        self._scheduler.block_pool = gpu_block_pool

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        """Empties vLLM's prefix cache after a refused load, whose blocks others may have used.

        Invalid blocks may also be another connector's (vLLM's ``MultiConnector``), which nobody uses before they are
        loaded.
        """
        if isinstance(connector_output.kv_connector_worker_meta, LoadRefused):
            self._scheduler.loads_refused()
            self._scheduler.block_pool.evict_blocks(set(range(self._num_blocks)))

    # Worker side

    def register_kv_caches(self, kv_caches: "dict[str, KVCaches]") -> None:
        """Called once vLLM has allocated its KV cache, and before it captures graphs."""
        self._worker.register_kv_caches(kv_caches)
        if not ascend.is_ascend():
            with _kv_cache_memory(self._vllm_config):
                self._worker.reserve()

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Receives this step's work; attention needs its own part at once.

        Without loads, vLLM calls :meth:`start_load_kv` after the forward pass.
        """
        super().bind_connector_metadata(connector_metadata)
        self._worker.readers.update(self._step.attending, self._step.ended)

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        self._worker.load(self._step.loads)

    def wait_for_save(self) -> None:
        self._worker.check_attended()
        self._worker.save(self._step.saves)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.take_refused_blocks()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[None, None]:
        """Called with requests that have ended: by vLLM-Ascend's vLLM, and by vLLM's :meth:`get_transfer_results`."""
        self._worker.end(finished_req_ids)
        return None, None

    def get_transfer_results(self, finished_req_ids: set[str]) -> "KVConnectorTransferResults":
        results = super().get_transfer_results(finished_req_ids)
        results.finished_recving, results.failed_recving = self._worker.take_received()
        return results

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return self._worker.take_refusal()

    def get_kv_connector_stats(self) -> TransferStats | None:
        return self.worker.take_stats() if self.worker is not None else None

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Does nothing: loads end before the forward pass."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: "torch.Tensor", attn_metadata: "AttentionMetadata", **kwargs: Any
    ) -> None:
        """Does nothing per layer: all layers are saved after the forward pass."""

    @property
    def _step(self) -> StepTransfers:
        step = self._get_connector_metadata()
        assert isinstance(step, StepTransfers)
        return step

    @property
    def _scheduler(self) -> SchedulerHalf:
        assert self.scheduler is not None, "called on the worker's connector"
        return self.scheduler

    @property
    def _worker(self) -> WorkerHalf:
        assert self.worker is not None, "called on the scheduler's connector"
        return self.worker


def _kv_cache_memory(config: "VllmConfig") -> AbstractContextManager[Any]:
    """Memory of the KV cache's kind, which sleep discards (``--enable-sleep-mode``)."""
    if not (current_platform.is_cuda_alike() and config.model_config.enable_cumem_allocator):
        return nullcontext()
    from vllm.device_allocator.cumem import CuMemAllocator

    memory: AbstractContextManager[Any] = CuMemAllocator.get_instance().use_memory_pool(tag=ascend.POOL_TAG)
    return memory


def chunk_connector() -> ChunkCacheConnector:
    """The chunk cache's connector in this process, alone or in vLLM's ``MultiConnector``."""
    group: Any = get_kv_transfer_group()
    connectors = [group] if isinstance(group, ChunkCacheConnector) else group.sub_connectors
    return next(each for each in connectors if isinstance(each, ChunkCacheConnector))
