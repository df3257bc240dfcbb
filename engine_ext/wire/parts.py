# SPDX-License-Identifier: Apache-2.0
"""The parts that a segment's KV is stored in: one for each pipeline stage and share of the KV heads.

Tensor parallelism gives each worker a share of the heads, or, where there are fewer heads than workers, one head to
several: latent attention (MLA) has one. What several workers have is stored once. Parts of other tensor parallel sizes
are cut, or put together, by head.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Source(NamedTuple):
    """A part to read, and which of so many equal shares of its heads."""

    part: int
    share: int
    shares: int


@dataclass(frozen=True, slots=True)
class Division:
    """An engine's parts: ``of_workers`` has each worker's, in the order of ranks, of ``num_parts``.

    ``others`` are the numbers of parts of engines of the same model whose parts could be read, too.
    """

    of_workers: tuple[int, ...]
    num_parts: int
    others: tuple[int, ...] = ()

    @property
    def owners(self) -> list[int]:
        """The first worker that has each part."""
        return [self.of_workers.index(part) for part in range(self.num_parts)]


def division(tensor_parallel: int, stages: int, num_heads: int, heads_of_layers: Iterable[int]) -> Division:
    """Divide a model with ``num_heads`` KV heads; ``heads_of_layers`` are the numbers that workers' layers have.

    Where layers differ in their number of heads, each worker has a part of its own, which no other size can read.
    """
    if set(heads_of_layers) != {max(1, num_heads // tensor_parallel)}:
        num_workers = tensor_parallel * stages
        return Division(tuple(range(num_workers)), num_workers)
    shares = min(tensor_parallel, num_heads)
    of_workers = [
        stage * shares + rank * shares // tensor_parallel for stage in range(stages) for rank in range(tensor_parallel)
    ]
    others = [
        stages * other
        for other in range(1, num_heads + 1)
        if other != shares and num_heads % other == 0 and (other % shares == 0 or shares % other == 0)
    ]
    return Division(tuple(of_workers), stages * shares, tuple(others))


def sources(part: int, num_parts: int, others: int) -> list[Source]:
    """Return the sources of ``part``, in the order of heads, where there are ``others`` parts instead of ``num_parts``.

    One of the two numbers divides the other.
    """
    if others < num_parts:
        shares = num_parts // others
        return [Source(part // shares, part % shares, shares)]
    each = others // num_parts
    return [Source(part * each + number, 0, 1) for number in range(each)]


def joined(files: Sequence[dict[str, Tensor]], wanted: Sequence[Source]) -> dict[str, Tensor]:
    """Join the tensors ``[tokens, heads, size]`` of a part from files of these sources."""
    cut = [
        {name: tensor.chunk(source.shares, 1)[source.share] for name, tensor in file.items()}
        for file, source in zip(files, wanted, strict=True)
    ]
    return cut[0] if len(cut) == 1 else {name: torch.cat([each[name] for each in cut], 1) for name in cut[0]}
