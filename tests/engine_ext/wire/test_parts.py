# SPDX-License-Identifier: Apache-2.0
"""A segment's KV in the parts of different tensor parallel sizes."""

from itertools import product

import pytest
import torch

from engine_ext.wire.parts import Division, division, joined, sources


def test_workers_with_the_same_heads_have_one_part():
    assert division(2, 1, 8, [4]) == Division((0, 1), 2, (1, 4, 8))
    assert division(4, 1, 2, [1]) == Division((0, 0, 1, 1), 2, (1,))
    assert division(2, 1, 1, [1]) == Division((0, 0), 1)  # latent attention
    assert division(4, 2, 2, [1]) == Division((0, 0, 1, 1, 2, 2, 3, 3), 4, (2,))
    assert division(4, 2, 2, [1]).owners == [0, 2, 4, 6]
    assert division(3, 1, 6, [2]) == Division((0, 1, 2), 3, (1, 6))


def test_layers_with_different_heads_are_stored_by_worker():
    assert division(2, 1, 2, [1, 2]) == Division((0, 1), 2)
    assert division(2, 2, 4, [1]) == Division((0, 1, 2, 3), 4)


SIZES = {2: (1, 2, 4, 8), 8: (1, 2, 4, 8, 16), 6: (1, 2, 3, 6), 1: (1, 2, 4)}


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("num_heads", SIZES)
def test_each_size_reads_what_another_wrote(num_heads, stages):
    whole = [torch.randn(5, num_heads, 3) for _ in range(stages)]

    def has(rank, size):
        """The KV that vLLM keeps in a worker: a share of the heads of its stage, or one of several workers'."""
        stage, rank = divmod(rank, size)
        first, count = rank * num_heads // size, max(1, num_heads // size)
        return {"0.key": whole[stage][:, first : first + count]}

    def parts_of(size):
        return division(size, stages, num_heads, [max(1, num_heads // size)])

    for wrote, reads in product(SIZES[num_heads], repeat=2):
        source, target = parts_of(wrote), parts_of(reads)
        if source.num_parts != target.num_parts and source.num_parts not in target.others:
            assert num_heads == 6, "2 and 3 don't divide one another"
            continue
        files = [has(rank, wrote) for rank in source.owners]
        for rank, part in enumerate(target.of_workers):
            wanted = sources(part, target.num_parts, source.num_parts)
            found = joined([files[each.part] for each in wanted], wanted)
            assert torch.equal(found["0.key"], has(rank, reads)["0.key"])
