# SPDX-License-Identifier: Apache-2.0
"""The rows of a step: which of its tokens and blocks belong to which request."""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

LEAST_BLOCK_TOKENS: Final = 16
"""No backend that is extended has smaller blocks."""


class BatchRow(NamedTuple):
    """One request in a step: its tokens ``[first, first + num_tokens)`` of all, its length and blocks."""

    request_id: str
    first: int
    num_tokens: int
    length: int
    blocks: Sequence[int]


def rows_of(request_ids: Sequence[str], starts: Sequence[int], lengths: Sequence[int], table: Any) -> list[BatchRow]:
    """The rows of a step from vLLM's metadata, which may be padded; ``table`` ``[rows, blocks]`` is the block table."""
    # It has room for the longest requests: as lists, all of it may take 0.1 s.
    used = table[: len(request_ids), : -(-max(lengths, default=0) // LEAST_BLOCK_TOKENS)]
    rows = zip(request_ids, starts, starts[1:], lengths, used.tolist(), strict=False)
    return [BatchRow(name, start, end - start, length, blocks) for name, start, end, length, blocks in rows]
