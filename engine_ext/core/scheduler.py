# SPDX-License-Identifier: Apache-2.0
"""The connector's scheduler half: turns the plans of requests into the transfers of a step.

It holds no cache state, only the pending work of each running request.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from engine_ext.core.block_hashes import BlockComposer
from engine_ext.core.layers import BlockTable
from engine_ext.wire.plan import (
    LOST_KEY,
    SAVED_KEY,
    BlockTransfer,
    StepTransfers,
    TransferPlan,
    of_others,
)

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


_NULL_BLOCK: Final = 0
"""Stands in vLLM's tables for blocks that were dropped behind a window."""


@dataclass(slots=True)
class _Tracked:
    """A running request with a plan. ``block_ids``, by table, follow the scheduler's until it has saved.

    ``num_saved`` counts prompt tokens whose KV was saved, where the plan asks for it. ``is_unsaved``: some can't be.
    ``is_lost``: KV from elsewhere had to be computed again.
    """

    plan: TransferPlan
    num_prompt_tokens: int
    block_ids: tuple[list[int], ...] = ()
    num_saved: int = 0
    saved: bool = False
    is_unsaved: bool = False
    is_lost: bool = False

    @property
    def reads_pool(self) -> bool:
        """Whether attention layers read more than the request's blocks."""
        return self.plan.attends or self.plan.probe is not None


class SchedulerHalf:
    """Lives in the engine core process, called by vLLM's scheduler.

    ``hash_algorithm`` and ``block_tokens`` are those of vLLM's prefix cache, ``block_pool`` its blocks. ``tables`` are
    the tables of blocks, if there are several, or layers with windows drop blocks.
    """

    block_pool: "BlockPool"

    def __init__(self, hash_algorithm: str, block_tokens: int, tables: Sequence[BlockTable] = ()) -> None:
        self._tables = tables
        self._tracked: dict[str, _Tracked] = {}
        self._loads: list[BlockTransfer] = []
        self._ended: list[str] = []
        self._composer = BlockComposer(hash_algorithm, block_tokens)

    def add_request(self, request: "Request") -> None:
        """Starts tracking ``request`` if it carries a plan, and removes the plan: other connectors know no such key."""
        plan = TransferPlan.from_params(request.kv_transfer_params)
        if plan is not None:
            request.kv_transfer_params = of_others(request.kv_transfer_params)
            self._tracked[request.request_id] = _Tracked(plan, request.num_prompt_tokens)
            if plan.saves and any(table.window and table.window < request.num_prompt_tokens for table in self._tables):
                self._composer.alone(request)  # tokens found in the prefix cache may have no block behind a window
            if plan.composition is not None:
                self._composer.compose(request, plan.composition)
            if plan.attends:
                self._composer.leave_out(request, plan.num_loaded_tokens, self.block_pool)

    def num_matched_tokens(self, request: "Request", num_computed_tokens: int) -> int | None:
        """Tokens that the pool adds beyond the ``num_computed_tokens`` found in the engine's own prefix cache.

        Asked again after a failed admission and after a preemption. ``None``: ask again in the next step, since the
        request is another one now.
        """
        tracked = self._tracked.get(request.request_id)
        if tracked is None or request.skip_reading_prefix_cache:
            return 0
        if (elsewhere := tracked.plan.elsewhere) is not None and request.num_preemptions and not tracked.is_lost:
            self._composer.as_plain(request, elsewhere.salt)
            tracked.is_lost = True
            return None
        return max(0, tracked.plan.num_loaded_tokens - num_computed_tokens)

    def blocks_allocated(self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        """Queues the load of ``num_external_tokens`` tokens into the request's blocks."""
        tracked = self._tracked.get(request.request_id)
        if num_external_tokens == 0 or tracked is None or tracked.plan.attends:
            return
        first_token = tracked.plan.num_loaded_tokens - num_external_tokens
        for table, block_ids in enumerate(blocks.get_block_ids()):
            first_kept = max(first_token, self._first_kept(table, block_ids))
            self._loads.append(
                BlockTransfer(request.request_id, tuple(block_ids), first_kept, tracked.plan.loads, table)
            )

    def build_step(self, scheduler_output: "SchedulerOutput") -> StepTransfers:
        """This step's new pool readers, queued loads, and saves of computed prompt tokens."""
        new = [each.req_id for each in scheduler_output.scheduled_new_reqs if each.req_id in self._tracked]
        attending = {name: self._tracked[name].plan for name in new if self._tracked[name].reads_pool}
        step = StepTransfers(attending, self._ended, self._loads)
        self._ended, self._loads = [], []
        for request_id, num_computed in self._follow_blocks(scheduler_output):
            end = num_computed + scheduler_output.num_scheduled_tokens.get(request_id, 0)
            step.saves += self._saves(request_id, self._tracked[request_id], end)
        return step

    def loads_refused(self) -> None:
        """Notes that what running requests have saved may be wrong, since blocks of a refused load may be shared.

        vLLM fails those that share them, but not while they are preempted. They may save again, right KV this time.
        """
        for tracked in self._tracked.values():
            tracked.num_saved, tracked.saved, tracked.is_unsaved = 0, False, tracked.plan.attends

    def finish_request(self, request: "Request") -> dict[str, bool] | None:
        """Stops tracking; tells the app whether the request's saves were carried out, or its KV was lost."""
        if (tracked := self._tracked.pop(request.request_id, None)) is None:
            return None
        if tracked.reads_pool:
            self._ended.append(request.request_id)
        return {LOST_KEY: True} if tracked.is_lost else {SAVED_KEY: True} if tracked.saved else None

    def _saves(self, request_id: str, tracked: _Tracked, end: int) -> list[BlockTransfer]:
        """Saves up to token ``end`` of a request; later steps may drop blocks behind windows."""
        first, tables = tracked.num_saved, tracked.block_ids
        spans = tuple(span for span in tracked.plan.saves if max(first, span.start) < min(end, span.end))
        if spans and any(self._first_kept(*each) > max(first, spans[0].start) for each in enumerate(tables)):
            tracked.is_unsaved = True
            return []
        tracked.num_saved, tracked.saved = max(first, end), end >= tracked.num_prompt_tokens
        return [
            BlockTransfer(request_id, tuple(block_ids), first, spans, table, end)
            for table, block_ids in enumerate(tables)
            if spans
        ]

    def _first_kept(self, table: int, block_ids: Sequence[int]) -> int:
        """The first token that has a block."""
        if not self._tables:
            return 0
        dropped = itertools.takewhile(lambda block_id: block_id == _NULL_BLOCK, block_ids)
        return sum(1 for _ in dropped) * self._tables[table].block_tokens

    def _follow_blocks(self, scheduler_output: "SchedulerOutput") -> Iterable[tuple[str, int]]:
        """Updates the block tables of requests still to be saved; yields each with its computed tokens."""
        for new in scheduler_output.scheduled_new_reqs:
            if tracked := self._unsaved(new.req_id):
                tracked.block_ids = tuple(map(list, new.block_ids))
                yield new.req_id, new.num_computed_tokens
        cached = scheduler_output.scheduled_cached_reqs
        for i, request_id in enumerate(cached.req_ids):
            if tracked := self._unsaved(request_id):
                new_blocks = cached.new_block_ids[i]
                if request_id in cached.resumed_req_ids:
                    tracked.block_ids = tuple(map(list, new_blocks or ()))
                elif new_blocks:
                    for block_ids, new_ids in zip(tracked.block_ids, new_blocks, strict=True):
                        block_ids.extend(new_ids)
                yield request_id, cached.num_computed_tokens[i]

    def _unsaved(self, request_id: str) -> _Tracked | None:
        tracked = self._tracked.get(request_id)
        return tracked if tracked and tracked.plan.saves and not (tracked.saved or tracked.is_unsaved) else None
