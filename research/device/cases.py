# SPDX-License-Identifier: Apache-2.0
"""Which copies are tried: layouts, dtypes, page sizes and rotations, with awkward numbers of tokens."""

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.reference import frequencies
from research.device.devices import Device
from research.device.memory import Memory, Shape, is_latent

SPANS = ((5, 0), (17, 131_072), (1, -1), (16, 4096), (15, 0), (2, 7), (15, -131_072))
"""Tokens of each span, and the delta of its keys."""
_HEADS = 2
_LATENT_SIZE, _LATENT_ROTARY_SIZE = 512, 64


@dataclass(frozen=True, slots=True)
class Case:
    """Layers of one form, and which tokens of theirs are copied."""

    layout: str
    dtype: torch.dtype
    is_neox: bool
    is_partial: bool
    block_size: int
    page_tokens: int
    head_size: int
    padding: int

    def __str__(self) -> str:
        pairs = f"{'NeoX' if self.is_neox else 'GPT-J'} pairs in {'half of' if self.is_partial else 'all of'}"
        return (
            f"{self.layout}, {dtype_name(self.dtype)}, blocks of {self.block_size} and pages of {self.page_tokens} "
            f"tokens, {pairs} {self.shape.key_size} dims, behind {self.padding} elements"
        )

    @property
    def shape(self) -> Shape:
        """With some blocks that nothing is copied to."""
        blocks = num_tokens() // self.block_size + 3
        if is_latent(self.layout):
            return Shape(blocks, self.block_size, 1, _LATENT_ROTARY_SIZE, _LATENT_SIZE)
        return Shape(blocks, self.block_size, _HEADS, self.head_size, self.head_size)

    @property
    def pages(self) -> int:
        """With some that nothing is copied to."""
        return num_tokens() // self.page_tokens + 3

    def memory(self, device: Device, *random_views: str) -> Memory:
        """Two layers that turn alike but for their frequencies, and one that turns otherwise."""
        size = self.shape.key_size
        width = size // 2 if self.is_partial else size
        rotations = (
            frequencies(width, 1e4, self.is_neox),
            frequencies(width, 5e5, self.is_neox),
            frequencies(32, 1e6, not self.is_neox),
        )
        memory = Memory(
            self.layout, self.shape, self.dtype, device.kind, self.padding, self.pages, self.page_tokens, rotations
        )
        memory.randomize(*random_views)
        return memory

    def slots(self) -> Tensor:
        """Slot of every token; the first token is second in its block where possible."""
        return _scattered(self.shape.blocks, self.block_size, first=1, seed=1)

    def rows(self) -> Tensor:
        """Pool row of every token."""
        return _scattered(self.pages, self.page_tokens, first=3, seed=2)


def cases(device: Device, dtypes: Sequence[torch.dtype]) -> list[Case]:
    """Each layout, dtype, style of pairs and width of rotation, with sizes in turn."""
    rng = random.Random(0)
    chosen: list[Case] = []
    forms = list(itertools.product(dtypes, (True, False), (False, True)))
    sizes = list(itertools.product(device.sizes, device.sizes))
    for layout in device.layouts:
        rng.shuffle(sizes)
        for form, size in zip(forms, itertools.cycle(sizes), strict=False):
            chosen.append(Case(layout, *form, *size, rng.choice(device.head_sizes), rng.choice(device.paddings)))
    return chosen


def num_tokens() -> int:
    """Tokens of all spans."""
    return sum(length for length, _ in SPANS)


def deltas() -> Tensor:
    """Delta of each token's keys."""
    return torch.tensor([delta for length, delta in SPANS for _ in range(length)])


def dtype_name(dtype: torch.dtype) -> str:
    """Name of the dtype without torch's prefix."""
    return str(dtype).removeprefix("torch.")


def _scattered(blocks: int, size: int, first: int, seed: int) -> Tensor:
    """Indices of tokens that follow each other, in blocks that don't."""
    order = torch.randperm(blocks, generator=torch.Generator().manual_seed(seed))
    at = torch.arange(first, first + num_tokens())
    return order[at // size] * size + at % size
