# SPDX-License-Identifier: Apache-2.0
"""Hashes of the blocks of requests over chunks, by which vLLM's prefix cache finds them.

vLLM finds computed blocks by hashes, each chained to the one before it. Later blocks of such a request are chained to a
digest of its whole context, which is unique to it. For the blocks of the context itself there are two ways.

*In place*, the blocks of a chunk get the hashes that they have directly behind the system segment, wherever they stand.
So vLLM finds them for every request and shares them by reference count; fill requests, plain ``system + chunk``, put
them there.

A request that *attends* to the pool needs no blocks for its context, except the last, which is its own. All others get
one hash, under which the prefix cache is told to find vLLM's null block: a context costs no memory of the engine's.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final

from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    generate_block_hash_extra_keys,
    hash_block_tokens,
    make_block_hash_with_group_id,
)

from engine_ext.wire.plan import Composition

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.request import Request

HashFunction = Callable[[Any], bytes]

_ABSENT: Final = BlockHash(sha256(b"tessera: a block of context in the chunk pool").digest())


class BlockComposer:
    """Gives requests the block hashes of their context. ``algorithm``: the engine's prefix cache's."""

    def __init__(self, algorithm: str, block_tokens: int) -> None:
        self._hash: HashFunction = get_hash_fn_by_name(algorithm)
        self._block_tokens = block_tokens
        self._numbers = itertools.count()

    def compose(self, request: "Request", composition: Composition) -> None:
        """Replaces the hashes of ``request`` before it is scheduled; its context is shared in place."""
        layout_salt, request.cache_salt = request.cache_salt, composition.salt
        system, *chunks = _bounds(composition.lengths)
        shared = self._chained(request, None, *system)
        last_of_system = shared[-1] if shared else None
        for start, end in chunks:
            shared += self._chained(request, last_of_system, start, end)
        self._replace(request, shared, (tuple(shared), composition.lengths, layout_salt))

    def leave_out(self, request: "Request", num_context_tokens: int, pool: "BlockPool") -> None:
        """Replaces the hashes of ``request`` before it is scheduled; its context is in the chunk pool."""
        absent, cached = make_block_hash_with_group_id(_ABSENT, 0), pool.cached_block_hash_to_block
        if cached.get_one_block(absent) is None:  # at first, and after a reset
            cached.insert(absent, pool.null_block)
        count = (num_context_tokens - 1) // self._block_tokens
        context = request.all_token_ids[: count * self._block_tokens]
        self._replace(request, [_ABSENT] * count, ("attend", tuple(context), request.cache_salt))

    def as_plain(self, request: "Request", salt: str | None) -> None:
        """Gives ``request`` the hashes of an ordinary prompt with this salt."""
        request.cache_salt = salt
        self._replace(request, [], None)

    def alone(self, request: "Request") -> None:
        """Gives ``request`` hashes of its own before it is scheduled: it finds no blocks, and nobody finds its."""
        self._replace(request, [], ("alone", next(self._numbers)))

    def _replace(self, request: "Request", context: list[BlockHash], identity: Any) -> None:
        """Sets the hashes of the context; later blocks are chained to ``identity``, unless that is ``None``."""
        digest = BlockHash(self._hash(identity)) if identity is not None else None

        def extended(request: "Request") -> list[BlockHash]:
            """Hashes of the full blocks that have none yet, as vLLM's own method."""
            known = len(request.block_hashes)
            previous = digest if known == len(context) else request.block_hashes[-1]
            start, size = known * self._block_tokens, self._block_tokens
            return self._chained(request, previous, start, request.num_tokens // size * size)

        request.block_hashes = list(context)
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
