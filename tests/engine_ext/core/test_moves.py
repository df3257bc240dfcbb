# SPDX-License-Identifier: Apache-2.0
"""Indices of moved tokens, against one token after the other; their order: ``test_streams.py``."""

import pytest
import torch

from engine_ext.core.moves import moved_tokens
from engine_ext.wire.plan import BlockTransfer, Span

PAGE, BLOCK = 4, 16


def one_by_one(transfers: list[BlockTransfer]) -> list[tuple[int, int, int]]:
    return [
        (
            transfer.block_ids[token // BLOCK] * BLOCK + token % BLOCK,
            span.pages[(at := token - span.start + span.skipped) // PAGE] * PAGE + at % PAGE,
            span.delta,
        )
        for transfer in transfers
        for span in transfer.spans
        for token in range(max(span.start, transfer.first_token), span.end)
    ]


@pytest.mark.parametrize("first_token", [0, 3, 7, 12, 20, 30])
def test_tokens_of_several_requests(first_token: int) -> None:
    spans = (Span(0, 7, 0, 1, (9, 2)), Span(7, 5, 3, 2, (0, 5, 7), skipped=6), Span(20, 10, -4, 3, (1, 3, 8)))
    transfers = [
        BlockTransfer("a", (5, 0), first_token, spans),
        BlockTransfer("b", (3,), 2, (Span(0, 8, 1, 4, (4, 6)),)),
    ]
    moved = moved_tokens(transfers, PAGE, BLOCK)
    assert {tensor.dtype for tensor in moved} == {torch.int64}
    assert list(zip(*(tensor.tolist() for tensor in moved), strict=True)) == one_by_one(transfers)


@pytest.mark.parametrize(
    "span", [Span(0, 9, 0, 1, (1, 2)), Span(0, 8, 0, 1, (1, 2), skipped=1), Span(14, 4, 0, 1, (1, 2))]
)
def test_a_span_never_takes_the_pages_of_the_next(span: Span) -> None:
    with pytest.raises(IndexError, match="does not fit"):
        moved_tokens([BlockTransfer("a", (0,), 0, (span, Span(20, 1, 0, 2, (3,))))], PAGE, BLOCK)
