# SPDX-License-Identifier: Apache-2.0
"""Layers between which spans of tokens move, and checks of the result."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st
from torch import Tensor

from kernels.layout import PagedTensor
from kernels.paged import KVCopier, LayerKV, make_pool
from kernels.reference import ReferenceCopier, elements, frequencies, rotation_error
from kernels.rope import RotaryFrequencies
from tests.kernels.fakes import AMX, MLA, PAIR, FakeCache, Shape, make_cache

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn)
POOL_ROWS = 128


@dataclass(frozen=True)
class Memory:
    """Layers with the storage of their blocks."""

    caches: tuple[FakeCache, ...]
    layers: tuple[LayerKV, ...]

    @classmethod
    def poisoned(
        cls, layout: str, shape: Shape, dtype: torch.dtype, rotations: Sequence[RotaryFrequencies], page_tokens: int = 8
    ) -> "Memory":
        """A layer for each of ``rotations``, filled with NaN."""
        caches = tuple(make_cache(layout, shape, dtype) for _ in rotations)
        pages = -(-POOL_ROWS // page_tokens)
        layers = []
        for cache, rotation in zip(caches, rotations, strict=True):
            pools = [make_pool(blocks, pages, page_tokens).fill_(math.nan) for blocks in cache.blocks]
            layers.append(LayerKV(*cache.blocks, *pools, rotation))
        return cls(caches, tuple(layers))

    def randomize(self, *names: str) -> None:
        for number, layer in enumerate(self.layers):
            for name in names:
                view = elements(getattr(layer, name))
                view.copy_(torch.randn(view.shape, generator=torch.Generator().manual_seed(number)))

    def clones(self) -> tuple[LayerKV, ...]:
        return tuple(replace(layer, **{name: _clone(getattr(layer, name)) for name in VIEWS}) for layer in self.layers)

    def assert_unharmed(self) -> None:
        """Asserts that all memory outside the views is still NaN."""
        for cache in self.caches:
            storage = cache.storage.clone()
            for view in (blocks.tiles for blocks in cache.blocks):
                storage.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(math.nan)
            assert bool(storage.isnan().all())


VIEWS = ("key_blocks", "value_blocks", "key_pool", "value_pool")


@dataclass(frozen=True)
class Case:
    """A load: sources, targets and each token's rotation."""

    layout: str
    shape: Shape
    dtype: torch.dtype
    page_tokens: int
    rotations: tuple[RotaryFrequencies, ...]
    slots: Tensor
    rows: Tensor
    deltas: Tensor

    def memory(self, *random: str) -> Memory:
        memory = Memory.poisoned(self.layout, self.shape, self.dtype, self.rotations, self.page_tokens)
        memory.randomize(*random)
        return memory


@st.composite
def cases(draw: st.DrawFn, layouts: Sequence[str]) -> Case:
    """Spans of awkward lengths, each with a delta, in scattered or consecutive blocks and pages."""
    layout = draw(st.sampled_from(layouts))
    is_amx = layout == AMX
    dim = draw(st.sampled_from([32, 64, 96, 128, 256] if is_amx else [32, 48, 64, 80, 128, 256]))
    rotary = draw(st.sampled_from([dim, dim // 2, 2]))
    value_dim = draw(st.sampled_from([dim, 64, 512])) if layout in (MLA, PAIR) else dim
    block_size = draw(st.sampled_from([32, 64, 128] if is_amx else [1, 16, 64]))
    lengths = draw(st.lists(st.sampled_from([0, 1, 2, 5, 15, 16, 17]), max_size=4))
    deltas = draw(st.lists(st.integers(-131072, 131072) | st.just(0), min_size=len(lengths), max_size=len(lengths)))
    tokens = sum(lengths)
    shape = Shape(tokens // block_size + 3, block_size, 1 if layout == MLA else draw(st.integers(1, 3)), dim, value_dim)
    seed = draw(st.integers(0, 1000))
    is_neox = draw(st.booleans())
    rotations = (frequencies(rotary, is_neox=is_neox), frequencies(rotary, 5e5, not is_neox), frequencies(2))
    return Case(
        layout,
        shape,
        torch.bfloat16 if is_amx else draw(st.sampled_from(DTYPES)),
        page_tokens=draw(st.sampled_from([1, 16, 64])),
        rotations=draw(st.sampled_from([rotations[:1], rotations[:1] * 2 + rotations[1:], rotations[::-1]])),
        slots=slots_of(shape, tokens, seed),
        rows=torch.randperm(POOL_ROWS, generator=_generator(seed))[:tokens]
        if draw(st.booleans())
        else torch.arange(5, 5 + tokens),
        deltas=torch.tensor(deltas, dtype=torch.int64).repeat_interleave(torch.tensor(lengths, dtype=torch.int64)),
    )


def slots_of(shape: Shape, tokens: int, seed: int = 0, start: int = 1) -> Tensor:
    """Slots of positions from ``start`` in randomly ordered blocks; some blocks stay untouched."""
    order = torch.randperm(shape.blocks, generator=_generator(seed))
    positions = torch.arange(start, start + tokens)
    return order[positions // shape.block_size] * shape.block_size + positions % shape.block_size


def assert_saved(copier: KVCopier, memory: Memory, slots: Tensor, rows: Tensor) -> None:
    """Asserts that ``copier`` saves bit for bit like the reference and touches nothing else."""
    expected = ReferenceCopier(memory.clones())
    copier.save(slots, rows)
    expected.save(slots, rows)
    for layer, wanted in zip(copier.layers, expected.layers, strict=True):
        for name in VIEWS:
            assert same_bits(getattr(layer, name)[:], getattr(wanted, name)[:]), name
    memory.assert_unharmed()


def assert_loaded(copier: KVCopier, memory: Memory, case: Case) -> None:
    """Asserts that ``copier`` loads bit for bit like the reference; rotated keys within 2 ulp and a rounding."""
    expected = ReferenceCopier(memory.clones())
    copier.load(case.slots, case.rows, case.deltas)
    expected.load(case.slots, case.rows, case.deltas)
    turned = torch.zeros(case.shape.blocks * case.shape.block_size, dtype=torch.bool)
    turned[case.slots[case.deltas != 0]] = True
    for layer, wanted in zip(copier.layers, expected.layers, strict=True):
        for name in VIEWS[1:]:
            assert same_bits(getattr(layer, name)[:], getattr(wanted, name)[:]), name
        keys, right = (each.key_blocks[:].flatten(0, 1) for each in (layer, wanted))
        assert same_bits(keys[~turned], right[~turned])
        width = layer.frequencies.rotary_dim
        assert same_bits(keys[..., width:], right[..., width:])
        if turned.any():
            seen, right = keys[turned][..., :width], right[turned][..., :width]
            assert rotation_error(seen, right, layer.frequencies.is_neox) <= 1
    memory.assert_unharmed()


def _clone(view: Tensor | PagedTensor) -> Tensor | PagedTensor:
    return PagedTensor(view.tiles.clone()) if isinstance(view, PagedTensor) else view.clone()


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether all bits agree, including NaN and signed zeros."""
    number = {4: torch.int32, 2: torch.int16, 1: torch.uint8}[a.element_size()]
    return torch.equal(a.contiguous().view(number), b.contiguous().view(number))


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
