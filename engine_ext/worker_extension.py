# SPDX-License-Identifier: Apache-2.0
"""Methods that vLLM adds to each of its workers, called from the app by ``collective_rpc``."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer import get_kv_transfer_group

from engine_ext.connector import ChunkCacheConnector
from engine_ext.layers import UnsupportedModelError, attention_layers
from engine_ext.worker import PoolTooSmallError, WorkerHalf
from kernels.layout import LayoutProbeError

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class ChunkCacheWorkerExtension:
    """Mixed into vLLM's worker class (``worker_extension_cls``)."""

    if TYPE_CHECKING:
        model_runner: Any
        vllm_config: VllmConfig

    def chunk_cache_prepare(self) -> dict[str, Any]:
        """Probes the layout and allocates the pool.

        Returns the pool's description as a dict, or ``{"reason": why not}``.
        """
        half = _worker_half()
        modules = self.vllm_config.compilation_config.static_forward_context
        try:
            layers = attention_layers(self.model_runner.get_model(), modules, half.kv_caches)
            return asdict(half.prepare(layers))
        except (UnsupportedModelError, LayoutProbeError, PoolTooSmallError) as error:
            return {"reason": str(error)}

    def chunk_cache_compare(self, pages_a: Sequence[int], pages_b: Sequence[int], num_tokens: int) -> float:
        """See :meth:`engine_ext.worker.WorkerHalf.compare`."""
        return _worker_half().compare(pages_a, pages_b, num_tokens)


def _worker_half() -> WorkerHalf:
    connector = get_kv_transfer_group()
    assert isinstance(connector, ChunkCacheConnector)
    assert connector.worker is not None
    return connector.worker
