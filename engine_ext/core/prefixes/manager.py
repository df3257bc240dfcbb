# SPDX-License-Identifier: Apache-2.0
"""The scheduler's side of prefixes in tiers: looks blocks up, and chooses those to store."""

import itertools
from collections import OrderedDict
from collections.abc import Collection, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Final

from vllm.v1.kv_offload.base import (
    LoadStoreSpec,
    LookupResult,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)

from engine_ext.core.prefixes.worker_links import WorkerLinks
from engine_ext.wire.prefix import PrefixTag
from engine_ext.wire.worker_messages import ReleaseBlocks, StageBlocks

_MOST_KNOWN: Final = 100_000
"""Blocks of which the manager remembers that tiers have them."""


@dataclass(frozen=True, slots=True)
class BlocksInTiers(LoadStoreSpec):
    """Blocks by vLLM's keys in hexadecimal, in the order of a request's tokens; ``name`` is their staging's."""

    name: str
    namespace: str
    keys: tuple[str, ...]


@dataclass(slots=True)
class _Prefix:
    """A request's prefix, and its look-up: first keys come, one by one, then workers stage the files.

    ``name`` of the staging is unique: what is released late must not be a later look-up's.
    """

    tag: PrefixTag
    name: str
    keys: dict[OffloadKey, None] = field(default_factory=dict)
    staging: "Future[int] | None" = None
    found: frozenset[OffloadKey] | None = None
    is_loading: bool = False

    def stage(self, workers: WorkerLinks) -> None:
        """Has the workers read the files of all keys."""
        keys = list(map(bytes.hex, self.keys))
        self.staging = workers.ask(StageBlocks(self.name, self.tag.namespace, keys))

    def release(self, workers: WorkerLinks) -> None:
        """Has the workers forget the files, once they have read them."""
        if self.staging is not None:
            self.staging.add_done_callback(lambda _: workers.ask(ReleaseBlocks(self.name)))

    def num_staged(self) -> int | None:
        """The keys, from the first on, whose files are staged; ``None`` while they are read."""
        return self.staging.result() if self.staging is not None and self.staging.done() else None

    def in_tiers(self, keys: Iterable[OffloadKey]) -> BlocksInTiers:
        """Blocks of this prefix."""
        return BlocksInTiers(self.name, self.tag.namespace, tuple(map(bytes.hex, keys)))


class TierOffloadingManager(OffloadingManager):
    """Finds blocks that all workers have read from their tiers and checked.

    So no load fails. Requests without a :class:`PrefixTag` find and store nothing.
    """

    def __init__(self, workers: WorkerLinks) -> None:
        self._workers = workers
        self._asking: dict[str, _Prefix] = {}
        self._numbers = itertools.count()
        self._known: OrderedDict[OffloadKey, None] = OrderedDict()

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        if (tag := PrefixTag.from_params(req_context.kv_transfer_params)) is not None:
            self._begin(tag, req_context)
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        if (prefix := req_context.get_state(_Prefix)) is None:
            return LookupResult.MISS
        if prefix.staging is None:
            prefix.keys[key] = None
            self._asking[req_context.req_id] = prefix
        if (count := prefix.num_staged()) is None:
            return LookupResult.RETRY
        if prefix.found is None:
            prefix.found = self._found(prefix, count, req_context)
        return LookupResult.HIT if key in prefix.found else LookupResult.MISS

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Asks the workers for all keys of this step's look-ups."""
        for prefix in self._asking.values():
            prefix.stage(self._workers)
        self._asking = {}

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        prefix = req_context.get_state(_Prefix)
        assert prefix is not None, "nothing was found for this request"
        prefix.is_loading = True
        return prefix.in_tiers(keys)

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        if (prefix := req_context.get_state(_Prefix)) is not None:
            prefix.release(self._workers)
            self._begin(prefix.tag, req_context)  # after a preemption the request looks up again

    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        prefix = req_context.get_state(_Prefix)
        if prefix is None:
            return PrepareStoreOutput([], BlocksInTiers("", "", ()), [])
        new = [key for key in keys if key not in self._known]
        return PrepareStoreOutput(new, prefix.in_tiers(new), [])

    def complete_store(self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True) -> None:
        if success:
            self._remember(keys)

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._asking.pop(req_context.req_id, None)
        prefix = req_context.get_state(_Prefix)
        if prefix is not None and not prefix.is_loading:  # an aborted request's load goes on
            prefix.release(self._workers)

    def reset_cache(self) -> None:
        self._known.clear()

    def _begin(self, tag: PrefixTag, req_context: ReqContext) -> None:
        req_context.set_state(_Prefix(tag, str(next(self._numbers))))

    def _found(self, prefix: _Prefix, count: int, req_context: ReqContext) -> frozenset[OffloadKey]:
        keys = list(prefix.keys)
        found, missing = keys[:count], keys[count:]
        self._remember(found)
        for key in missing:
            self._known.pop(key, None)
        num_tokens = req_context.get_offload_key_position(found[-1]) if found else None
        if num_tokens is None or num_tokens < prefix.tag.at_least:
            prefix.release(self._workers)
            return frozenset()
        return frozenset(found)

    def _remember(self, keys: Iterable[OffloadKey]) -> None:
        for key in keys:
            self._known[key] = None
            self._known.move_to_end(key)
        while len(self._known) > _MOST_KNOWN:
            self._known.popitem(last=False)
