# SPDX-License-Identifier: Apache-2.0
"""The connector's worker half: the pool's memory, and copies to and from KV blocks."""

import logging
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from engine_ext.core import ascend
from engine_ext.core.attention.readers import Readers
from engine_ext.core.attention.requests import AttendingRequests
from engine_ext.core.layers import AttentionLayer, BlockTable, KVCaches
from engine_ext.core.moves import MovedTokens, Moves, moved_tokens
from engine_ext.core.pages import PageTags, check_tensors, copy_tokens, fill_pages, largest_difference, partly
from engine_ext.core.stats import TransferStats
from engine_ext.wire.chunk_file import Forms
from engine_ext.wire.plan import BlockTransfer, LoadRefused, Span
from kernels.dispatch import attention_for, copier_for
from kernels.layout import BlockLayout, probe_layout
from kernels.npu_copier import ReshapeAndCache
from kernels.paged import KVCopier, LayerKV, PoolMemory, pools_of

logger = logging.getLogger(__name__)


class PoolSizeError(ValueError):
    """The configured memory is smaller than one page, or larger than what is free."""


@dataclass(frozen=True, slots=True)
class PoolDescription:
    """Sizes of one worker's pool; ``block_order`` names the memory order of the engine's blocks, in all layers."""

    num_pages: int
    page_tokens: int
    page_bytes: int
    block_order: str


class WorkerHalf:
    """Lives in each worker process, called by vLLM's model runner. Does nothing until :meth:`prepare`.

    ``tables`` are the tables of blocks, if there are several, or layers with windows drop blocks.
    """

    def __init__(
        self, pool_bytes: int, page_tokens: int, engine_block_size: int, tables: Sequence[BlockTable] = ()
    ) -> None:
        self.pool_bytes = pool_bytes
        self.page_tokens = page_tokens
        self.engine_block_size = engine_block_size
        self.tables = tables
        self.kv_caches: Mapping[str, KVCaches] = {}
        self._memory: PoolMemory | None = None
        self.copier: KVCopier  # from prepare() on
        self._copiers: Mapping[int, KVCopier] = {}  # likewise, by the number of a table
        self.reshape_and_cache: ReshapeAndCache | None = None
        self.tags = PageTags()
        # Pages may pass to another entry while an aborted request still saves to them or loads from them. Each load and
        # save, with its tags, comes before another thread's write, is refused, or makes that write fail.
        self._moving = threading.Lock()
        self._moves = Moves(torch.device("cpu"))
        self._refused_blocks: set[int] = set()
        self._received: set[str] = set()
        self._failed: set[str] = set()
        self._refused_requests: set[str] = set()
        """Running requests whose last load was refused: what they compute is wrong."""
        self._has_refused = False
        self.refused_tags: set[int] = set()
        self.token_bytes = 0
        """Bytes of one token's KV in all of this worker's layers."""
        self._has_sinks = False
        self._compared: list[LayerKV] = []
        self.readers = Readers()
        self._stats = TransferStats()

    def register_kv_caches(self, kv_caches: Mapping[str, KVCaches]) -> None:
        """Remembers the engine's KV cache tensors by layer name."""
        self.kv_caches = kv_caches

    def reserve(self) -> None:
        """Takes a device's memory for the pool while vLLM allocates its KV cache, before graphs and collectives do.

        Where that fails, :meth:`prepare` does too, and says why. CPUs give memory when it is written to.
        """
        caches = next(iter(self.kv_caches.values()), None)
        if not isinstance(caches, Tensor) or caches.device.type == "cpu":
            return
        try:
            self.check_room(ascend.free_bytes())
            self._memory = PoolMemory(self.pool_bytes, 2 * len(self.kv_caches), caches.device)
        except (PoolSizeError, torch.OutOfMemoryError) as error:
            logger.warning("no memory for the chunk pool yet: %s", error)

    def check_room(self, free_bytes: int) -> None:
        """Raises :class:`PoolSizeError` if the pool has no memory yet, and needs more than is free."""
        if self._memory is None and self.pool_bytes > free_bytes:
            raise PoolSizeError(
                f"the chunk pool's {self.pool_bytes >> 20} MiB are more than the {free_bytes >> 20} MiB that are free: "
                "lower --chunk-cache-memory, --kv-cache-memory-bytes or --gpu-memory-utilization"
            )

    def release(self) -> None:
        """Gives up the memory of a pool that will not be used."""
        self._memory = None

    def check_attended(self) -> None:
        """Refuses the step's requests whose pages have another tag now.

        They may have attended to other KV: imports write to pages while the model runs.
        """
        attending = self.readers.get(AttendingRequests)
        ran = attending.take_ran() if attending is not None else []
        if not ran:
            return
        missing = self.tags.missing_now(span for _, _, spans in ran for span in spans)
        for request_id, block, spans in ran:
            if refused := missing & {span.tag for span in spans}:
                self._refuse(request_id, spans, refused, {block})

    def prepare(
        self, attention_layers: Sequence[AttentionLayer], reshape_and_cache: ReshapeAndCache | None = None
    ) -> PoolDescription:
        """Probes each layer's layout and allocates the pool, in the memory that :meth:`reserve` has taken, if any.

        ``reshape_and_cache`` is the engine's writer, on Ascend.

        Raises :class:`PoolSizeError`, ``kernels.layout.LayoutProbeError`` or ``kernels.paged.UnsupportedKVError``.
        """
        layouts = [self.probe(layer) for layer in attention_layers]
        token_bytes = sum(layer.cache.token_bytes for layer in attention_layers)
        num_pages = self.pool_bytes // (token_bytes * self.page_tokens)
        if num_pages < 1:
            raise PoolSizeError(
                f"{self.pool_bytes} bytes hold no page of {self.page_tokens} tokens x {token_bytes} bytes"
            )
        if self._memory is not None:
            self._memory.restart()
        layers = [
            layer.with_pool(layout, num_pages, self.page_tokens, self._memory)
            for layer, layout in zip(attention_layers, layouts, strict=True)
        ]
        self.attach(layers, reshape_and_cache)
        named = dict(zip((layer.cache.name for layer in attention_layers), layers, strict=True))
        by_table = [[kv for name, kv in named.items() if name in table.layers] for table in self.tables]
        self._copiers = {i: copier_for(kvs, reshape_and_cache) for i, kvs in enumerate(by_table) if kvs}
        self.token_bytes = token_bytes
        self._has_sinks = any(layer.has_sinks for layer in attention_layers)
        self._compared = [kv for layer, kv in zip(attention_layers, layers, strict=True) if not layer.is_draft]
        block_order = ", ".join(sorted({layout.order for layout in layouts}))
        return PoolDescription(num_pages, self.page_tokens, token_bytes * self.page_tokens, block_order)

    def attach(self, layers: Sequence[LayerKV], reshape_and_cache: ReshapeAndCache | None = None) -> None:
        """Uses the layers' pools, which are empty."""
        self.copier, self.reshape_and_cache = copier_for(layers, reshape_and_cache), reshape_and_cache
        self.tags = PageTags(len(layers[0].key_pool))
        self._moves = Moves(self.device)

    def prepare_attention(self, layers: Sequence[str]) -> None:
        """Lets requests attend to the pool; ``layers`` names the layers in the order of :meth:`prepare`.

        Raises ``UnsupportedKVError``.
        """
        numbers = {name: number for number, name in enumerate(layers)}
        block_tokens = self.copier.layers[0].key_blocks.shape[1]
        attention = attention_for(self.copier.layers)
        self.readers.register(AttendingRequests(attention, numbers, self.page_tokens, block_tokens))

    def probe(self, layer: AttentionLayer) -> BlockLayout:
        """Finds the layout of K and V in a layer's cache through the engine's writer."""
        cache = layer.cache
        sizes = (table.block_tokens for table in self.tables if cache.name in table.layers)
        num_blocks, block_size = cache.kernel_blocks(next(sizes, self.engine_block_size))
        return probe_layout(
            cache.key_cache,
            cache.value_cache,
            num_blocks,
            block_size,
            cache.num_kv_heads,
            cache.key_size,
            cache.value_size,
            cache.write,
        )

    def load(self, transfers: Sequence[BlockTransfer]) -> None:
        """Copies the transfers' spans from the pool to their blocks, keys rotated; refuses wrongly tagged pages."""
        if not transfers:
            return
        started, loads, num_tokens = time.perf_counter(), [], 0
        self.end(transfer.request_id for transfer in transfers)  # refused before a preemption, perhaps
        with self._moving:
            for transfer in transfers:
                request_id = transfer.request_id
                if not (refused := self.tags.missing(transfer.spans)):
                    loads.append(transfer)
                elif self.tables:  # block ids alone don't tell the request
                    if request_id not in self._failed:  # of all its tables, counted once
                        self._refuse(request_id, transfer.spans, refused, ())
                    self._failed.add(request_id)
                else:
                    # Blocks before the first token to load are shared with other requests, and valid.
                    first = transfer.first_token // self.engine_block_size
                    self._refuse(request_id, transfer.spans, refused, transfer.block_ids[first:])
            for copier, moved in self._moved(loads):
                copier.load(*moved)
                num_tokens = max(num_tokens, len(moved.slots))
            self._moves.queued()
        if self.tables:
            self._received.update(transfer.request_id for transfer in transfers)
        if loads:
            self._count("load", started, num_tokens)

    def save(self, transfers: Sequence[BlockTransfer]) -> None:
        """Copies the transfers' spans from their blocks to the pool and tags the pages.

        Nothing that was computed behind a refused load is saved: vLLM may run such a request for a further step.
        """
        wrong = [transfer for transfer in transfers if transfer.request_id in self._refused_requests]
        if wrong:
            with self._moving:
                self.tags.remove([page for transfer in wrong for span in transfer.spans for page in span.pages])
            transfers = [transfer for transfer in transfers if transfer not in wrong]
        if not transfers:
            return
        saved = {span.tag: (transfer, span) for transfer in transfers for span in transfer.spans}.values()
        pages = [page for _, span in saved for page in span.pages]
        firsts = [transfer for transfer in transfers if not transfer.table]
        if len(firsts) > 1 and len(set(pages)) < len(pages):
            # An aborted fill's late save, and that of its pages' next owner, which must come last.
            for first in firsts:
                self.save([transfer for transfer in transfers if transfer.spans == first.spans])
            return
        started, num_tokens = time.perf_counter(), 0
        with self._moving:
            begun = [
                replace(span, tag=partly(span.tag)) for transfer, span in saved if transfer.first_token > span.start
            ]
            overwritten = self.tags.missing(begun)  # in between, so that they will have no tag
            self.tags.remove(pages)
            for copier, moved in self._moved(transfers):
                copier.save(moved.slots, moved.rows)
                num_tokens = max(num_tokens, len(moved.slots))
            self._moves.queued()
            for transfer, span in saved:
                if partly(span.tag) not in overwritten:
                    is_whole = transfer.end_of(span) == span.end
                    self.tags.put(span.pages, span.tag if is_whole else partly(span.tag))
        self._count("save", started, num_tokens)

    def forms(self, num_tokens: int) -> Forms:
        """Tensors of a segment by layer, ``[num_tokens, heads, size]``."""
        pools = pools_of(self.copier.layers)
        return {name: ((num_tokens, *pool.shape[2:]), pool.dtype) for name, pool in pools.items()}

    def read(self, pages: Sequence[int], tag: int, tensors: Mapping[str, Tensor]) -> None:
        """Copies KV of the segment in ``pages`` to ``tensors`` of its :meth:`forms`, on the CPU.

        Raises :class:`WrongPagesError`.
        """
        self.tags.check(pages, tag)
        self._moves.wait()  # tagged pages may still have to be saved
        with self._moves.apart():
            copy_tokens(pools_of(self.copier.layers), pages, tensors)
        self.tags.check(pages, tag)  # a writer removes them first

    def write(self, pages: Sequence[int], tag: int, num_tokens: int, tensors: Mapping[str, Tensor]) -> None:
        """Writes tensors that :meth:`read` filled in another worker to ``pages``, and tags them.

        Raises :class:`WrongPagesError` if shapes or dtypes are not this pool's, having written nothing, and if the
        engine, whose loads and saves go on, has saved to the pages, which then have no tag.
        """
        pools = pools_of(self.copier.layers)
        check_tensors(pools, tensors, num_tokens)
        with self._moving:
            self.tags.remove(pages)
        self._moves.wait()
        with self._moves.apart():
            fill_pages(pools, pages, tensors)
        with self._moving:
            self.tags.put_first(pages, tag)

    def use_device(self) -> None:
        """Lets the calling thread copy from and to the pool."""
        self._moves.use_device()

    def take_refused_blocks(self) -> set[int]:
        """Engine blocks whose load was refused since the last call."""
        refused, self._refused_blocks = self._refused_blocks, set()
        return refused

    def take_received(self) -> tuple[set[str], set[str]]:
        """With ``tables``: requests whose loads ended since the last call, and refused ones."""
        received, self._received = self._received, set()
        failed, self._failed = self._failed, set()
        return received, failed

    def take_refusal(self) -> LoadRefused | None:
        """Tells once that loads were refused, if any were since the last call."""
        has_refused, self._has_refused = self._has_refused, False
        return LoadRefused() if has_refused else None

    def end(self, request_ids: Iterable[str]) -> None:
        """Forgets requests that have ended."""
        self._refused_requests.difference_update(request_ids)

    def take_stats(self) -> TransferStats | None:
        """Statistics since the last call; ``None`` if nothing was moved."""
        if self._stats.is_empty():
            return None
        stats, self._stats = self._stats, TransferStats()
        return stats

    def compare(self, pages_a: Sequence[int], pages_b: Sequence[int], num_tokens: int, *, one_token: bool) -> float:
        """Largest :func:`engine_ext.core.pages.relative_difference` of a layer's KV in two runs of pages.

        ``one_token``: both hold one token repeated. With attention sinks, hidden states then depend on the number of
        tokens, except the first layer's input: only that layer is compared. Drafting layers are left out: their KV
        depends on later tokens, and drafts are verified.
        """
        layers = self._compared[:1] if one_token and self._has_sinks else self._compared
        return largest_difference(pools_of(layers).values(), pages_a, pages_b, num_tokens)

    @property
    def device(self) -> torch.device:
        """The pool's device."""
        return self.copier.layers[0].key_pool.device

    def _moved(self, transfers: Sequence[BlockTransfer]) -> Iterator[tuple[KVCopier, MovedTokens]]:
        """The tokens that ``transfers`` move, and the copier for them, table by table."""
        if not self.tables:
            yield self.copier, moved_tokens(transfers, self.page_tokens, self.engine_block_size)
        for number, copier in self._copiers.items():
            of_table = [transfer for transfer in transfers if transfer.table == number]
            yield copier, moved_tokens(of_table, self.page_tokens, self.tables[number].block_tokens)

    def _refuse(self, request_id: str, spans: Iterable[Span], tags: set[int], blocks: Iterable[int]) -> None:
        """Fail a request, in whose ``blocks`` KV is wrong: pages of ``spans`` don't have their ``tags``."""
        logger.warning("a load is refused: %s", self.tags.difference(spans, tags))
        self._stats.refused()
        self._refused_requests.add(request_id)
        self._has_refused = True
        self.refused_tags.update(tags)
        self._refused_blocks.update(blocks)

    def _count(self, verb: Literal["load", "save"], started: float, num_tokens: int) -> None:
        self._stats.moved(verb, time.perf_counter() - started, num_tokens, num_tokens * self.token_bytes)
