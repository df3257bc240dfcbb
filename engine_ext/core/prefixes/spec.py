# SPDX-License-Identifier: Apache-2.0
"""vLLM's plan of offloading: what looks blocks up, and what moves them."""

from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingManager, OffloadingSpec, OffloadingWorker
from vllm.v1.kv_offload.config import OffloadingConfig

from engine_ext.core.prefixes.manager import TierOffloadingManager
from engine_ext.core.prefixes.worker import TierOffloadingWorker
from engine_ext.core.prefixes.worker_links import WorkerLinks
from engine_ext.wire.prefix import blocks_per_file


class TierOffloadingSpec(OffloadingSpec):
    """Keeps blocks in the tiers of the chunk cache, if it is on.

    ``folder`` of the connector's extra configuration has the workers' sockets.
    """

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        self.blocks_per_chunk = blocks_per_file(self.tokens_per_block[0])

    def get_manager(self) -> OffloadingManager:
        return TierOffloadingManager(WorkerLinks(self.extra_config["folder"], self.config.parallel.world_size))

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        return TierOffloadingWorker()
