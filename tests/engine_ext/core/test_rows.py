# SPDX-License-Identifier: Apache-2.0
"""Rows of a step, from vLLM's padded metadata."""

import torch

from engine_ext.core.attention.rows import BatchRow, rows_of


def test_rows_without_padding_have_the_blocks_of_the_longest():
    table = torch.arange(4000).view(4, 1000)
    assert rows_of(["a", "b"], [0, 3, 5, 5, 5], [40, 17, 0, 0], table) == [
        BatchRow("a", 0, 3, 40, [0, 1, 2]),
        BatchRow("b", 3, 2, 17, [1000, 1001, 1002]),
    ]
