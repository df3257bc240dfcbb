# SPDX-License-Identifier: Apache-2.0
"""A worker's side of prefixes in tiers, called by vLLM's OffloadingConnector."""

import time
from collections.abc import Callable
from multiprocessing.connection import Connection

from vllm.v1.kv_offload.base import GPULoadStoreSpec, LoadStoreSpec, OffloadingWorker, TransferResult

from cache.tiers.chain import TierChain
from engine_ext.core.prefixes.block_files import BlockFiles, Engine
from engine_ext.core.prefixes.manager import BlocksInTiers
from engine_ext.core.prefixes.mover import BlockMover
from engine_ext.core.worker import WorkerHalf


class TierOffloadingWorker(OffloadingWorker):
    """Copies at once: what is loaded lies in host memory, and files are written later."""

    def __init__(self) -> None:
        self._finished: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        assert isinstance(dst_spec, BlocksInTiers)
        stored = dst_spec
        return self._do(job_id, lambda files: files.store(stored.namespace, stored.keys, src_spec.block_ids.tolist()))

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        assert isinstance(src_spec, BlocksInTiers)
        staged = src_spec
        return self._do(job_id, lambda files: files.load(staged.name, staged.keys, dst_spec.block_ids.tolist()))

    def get_finished(self) -> list[TransferResult]:
        if _files is not None:
            _files.note_step()
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Returns at once: jobs end when they are submitted."""

    def _do(self, job_id: int, move: Callable[[BlockFiles], int]) -> bool:
        started = time.perf_counter()
        assert _files is not None, "requests are marked before the workers have tiers"
        size = move(_files)
        self._finished.append(TransferResult(job_id, True, size, time.perf_counter() - started))
        return True


_files: BlockFiles | None = None


def serve_blocks(half: WorkerHalf, chain: TierChain, engine: tuple[str, int, int]) -> Callable[[Connection], None]:
    """Gives this process's :class:`TierOffloadingWorker`, which vLLM made before, its files; returns their answerer.

    ``engine`` has the fields of :class:`engine_ext.core.prefixes.block_files.Engine`.
    """
    global _files
    _files = BlockFiles(BlockMover(half), chain, Engine(*engine))
    return _files.answer
