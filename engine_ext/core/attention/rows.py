# SPDX-License-Identifier: Apache-2.0
"""The rows of a step: which of its tokens and blocks belong to which request."""

from collections.abc import Sequence
from typing import Any, NamedTuple


class BatchRow(NamedTuple):
    """One request in a step: its tokens ``[first, first + num_tokens)`` of all, its length and blocks."""

    request_id: str
    first: int
    num_tokens: int
    length: int
    blocks: Sequence[int]


def rows_of(request_ids: Sequence[str], starts: Sequence[int], lengths: Sequence[int], table: Any) -> list[BatchRow]:
    """The rows of a step from vLLM's metadata, which may be padded; ``table`` ``[rows, blocks]`` is the block table."""
    rows = zip(request_ids, starts, starts[1:], lengths, table.tolist(), strict=False)
    return [BatchRow(name, start, end - start, length, blocks) for name, start, end, length, blocks in rows]
