# SPDX-License-Identifier: Apache-2.0
"""Blocks of the engine that requests share: hashes of a composition's blocks, and their shifts.

vLLM finds computed blocks by hashes, each chained to the one before it. The blocks of a chunk in a composition get the
hashes that they have directly behind the system segment, wherever they stand. So vLLM's own prefix cache finds them for
every request and shares them by reference count; fill requests, plain ``system + chunk``, put them there. Later blocks
are chained to a digest of the whole composition, which is unique to it.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import BlockHash, generate_block_hash_extra_keys, hash_block_tokens

from engine_ext.wire.plan import Composition

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

HashFunction = Callable[[Any], bytes]


class BlockComposer:
    """Gives requests the block hashes of their composition. ``algorithm``: the engine's prefix cache's."""

    def __init__(self, algorithm: str, block_tokens: int) -> None:
        self._hash: HashFunction = get_hash_fn_by_name(algorithm)
        self._block_tokens = block_tokens

    def compose(self, request: "Request", composition: Composition) -> None:
        """Replaces the hashes of ``request`` before it is scheduled; later blocks are chained to them."""
        layout_salt, request.cache_salt = request.cache_salt, composition.salt
        system, *chunks = _bounds(composition.lengths)
        shared = self._chained(request, None, *system)
        last_of_system = shared[-1] if shared else None
        for start, end in chunks:
            shared += self._chained(request, last_of_system, start, end)
        digest = BlockHash(self._hash((tuple(shared), composition.lengths, composition.shift, layout_salt)))

        def extended(request: "Request") -> list[BlockHash]:
            """Hashes of the full blocks that have none yet, as vLLM's own method."""
            known = len(request.block_hashes)
            previous = digest if known == len(shared) else request.block_hashes[-1]
            start, size = known * self._block_tokens, self._block_tokens
            return self._chained(request, previous, start, request.num_tokens // size * size)

        request.block_hashes = list(shared)
        request._block_hasher = extended
        request.update_block_hashes()

    def _chained(self, request: "Request", previous: BlockHash | None, start: int, end: int) -> list[BlockHash]:
        """Hashes of the blocks of tokens ``[start, end)``, the first of them chained to ``previous``.

        Without ``previous`` the sequence begins here, and the salt is part of the first hash, as in vLLM.
        """
        hashes: list[BlockHash] = []
        for first in range(start, end, self._block_tokens):
            last = first + self._block_tokens
            at = first if previous is not None else 0
            extra_keys, _ = generate_block_hash_extra_keys(request, at, at + self._block_tokens, 0)
            previous = hash_block_tokens(self._hash, previous, request.all_token_ids[first:last], extra_keys)
            hashes.append(previous)
        return hashes


def _bounds(lengths: Sequence[int]) -> Iterable[tuple[int, int]]:
    end = 0
    for length in lengths:
        start, end = end, end + length
        yield start, end


class ShiftLedger:
    """Shift of each block in positions, updated as blocks pass to other requests."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._shifted: dict[int, int] = {}
        self._compositions: dict[str, Composition] = {}
        self._num_blocks: dict[str, int] = {}

    def add(self, request_id: str, composition: Composition) -> None:
        """Adds a request with a composition."""
        self._compositions[request_id] = composition

    def forget(self, request_id: str) -> None:
        """Removes an ended request."""
        self._compositions.pop(request_id, None)
        self._num_blocks.pop(request_id, None)

    def changes(self, scheduler_output: "SchedulerOutput") -> dict[int, int]:
        """Changed shifts of the blocks that this step gives to requests."""
        changed: dict[int, int] = {}
        for new in scheduler_output.scheduled_new_reqs:
            self._assign(new.req_id, new.block_ids[0], 0, changed)
        cached = scheduler_output.scheduled_cached_reqs
        for request_id, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if blocks:
                known = 0 if request_id in cached.resumed_req_ids else self._num_blocks.get(request_id, 0)
                self._assign(request_id, blocks[0], known, changed)
        return changed

    def _assign(self, request_id: str, block_ids: Sequence[int], known: int, changed: dict[int, int]) -> None:
        composition = self._compositions.get(request_id)
        shift, num_shared = 0, 0
        if composition is not None:
            shift, num_shared = composition.shift, sum(composition.lengths) // self._block_tokens
            self._num_blocks[request_id] = known + len(block_ids)
        for index, block_id in enumerate(block_ids, start=known):
            wanted = shift if index >= num_shared else 0
            if self._shifted.get(block_id, 0) != wanted:
                self._shifted[block_id] = changed[block_id] = wanted
