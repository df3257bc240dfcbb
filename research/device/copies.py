# SPDX-License-Identifier: Apache-2.0
"""Checks of copies: every element of memory compared with the reference copier's."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kernels.paged import KVCopier, LayerKV
from kernels.reference import ReferenceCopier, rotation_error
from research.device.cases import Case, cases, deltas
from research.device.context import Context
from research.device.devices import Device
from research.device.findings import CheckError, Finding, SkippedError, one_line
from research.device.memory import VIEWS, Memory

MakeCopier = Callable[[Sequence[LayerKV]], KVCopier]

_NAMES = dict(zip(VIEWS, ("K in the blocks", "V in the blocks", "K in the pool", "V in the pool"), strict=True))
_SAME_SIZE = {4: torch.int32, 2: torch.int16}
_MOST_LISTED = 20


async def kernels(context: Context) -> Finding:
    """Saves and loads by the context's copier."""
    return await compare(cases(context.device, context.dtypes), context.device, context.copier)


async def compare(each_of: Sequence[Case], device: Device, make_copier: MakeCopier) -> Finding:
    """Compares saves and loads with the reference's. Raises :class:`CheckError` at the end, about all that failed."""
    names: set[str] = set()
    failed: list[tuple[Case, Exception]] = []
    worst = 0.0

    def make(layers: Sequence[LayerKV]) -> KVCopier:
        copier = make_copier(layers)
        names.add(copier.name)
        return copier

    for case in each_of:
        await asyncio.sleep(0)  # a signal may end the run here
        try:
            check_save(case, device, make)
            worst = max(worst, check_load(case, device, make))
        except SkippedError:
            raise
        except Exception as error:
            failed.append((case, error))
    values: dict[str, Any] = {"copiers": sorted(names), "cases": len(each_of), "worst_error_of_allowed": worst}
    if failed:
        listed = [f"{case}: {one_line(error)}" for case, error in failed[:_MOST_LISTED]]
        message = f"{len(failed)} of {len(each_of)} cases are wrong, the first: {listed[0]}"
        raise CheckError(message, {**values, "failed": len(failed), "failures": listed}) from failed[0][1]
    return Finding(
        f"{len(each_of)} cases by {' and '.join(sorted(names))} are right; turned keys are off by at most {worst:.0%} "
        "of what rounding explains",
        values,
    )


def check_save(case: Case, device: Device, make_copier: MakeCopier) -> None:
    """Raises :class:`CheckError` unless a save moves what it must, bit for bit, and nothing else."""
    memory = case.memory(device, "key_blocks", "value_blocks")
    expected, copier = ReferenceCopier(memory.on_cpu()), make_copier(memory.layers)
    copier.save(case.slots(), case.rows())
    expected.save(case.slots(), case.rows())
    for number, (layer, right) in enumerate(zip(copier.layers, expected.layers, strict=True)):
        for name in VIEWS:
            _check_bits(getattr(layer, name)[:].cpu(), getattr(right, name)[:], f"save: layer {number}: {_NAMES[name]}")
    _check_margins(memory, "save")


def check_load(case: Case, device: Device, make_copier: MakeCopier) -> float:
    """Raises :class:`CheckError` unless a load moves exactly the tokens of the case.

    Bit for bit, but turned keys may be off by 2 ulp of float32, at the length of their pair, and one rounding of their
    dtype. Returns the largest error as a share of that.
    """
    memory = case.memory(device, "key_pool", "value_pool")
    expected, copier = ReferenceCopier(memory.on_cpu()), make_copier(memory.layers)
    copier.load(case.slots(), case.rows(), deltas())
    expected.load(case.slots(), case.rows(), deltas())
    turned = torch.zeros(case.shape.blocks * case.block_size, dtype=torch.bool)
    turned[case.slots()[deltas() != 0]] = True
    worst = 0.0
    for number, (layer, right) in enumerate(zip(copier.layers, expected.layers, strict=True)):
        worst = max(worst, _check_keys(layer, right, turned.view(-1, case.block_size), f"load: layer {number}"))
        for name in VIEWS[1:]:
            _check_bits(getattr(layer, name)[:].cpu(), getattr(right, name)[:], f"load: layer {number}: {_NAMES[name]}")
    _check_margins(memory, "load")
    return worst


def _check_keys(layer: LayerKV, right: LayerKV, turned: Tensor, where: str) -> float:
    """``turned`` is bool `[blocks, block size]`."""
    seen, wanted, width = layer.key_blocks[:].cpu(), right.key_blocks[:], layer.frequencies.rotary_dim
    error = rotation_error(seen[turned][..., :width], wanted[turned][..., :width], layer.frequencies.is_neox)
    if not error <= 1:
        raise CheckError(f"{where}: turned keys are off by up to {error:.3g} times what rounding explains")
    both = seen[turned]
    both[..., :width] = wanted[turned][..., :width]
    same = seen.clone()
    same[turned] = both
    _check_bits(same, wanted, f"{where}: {_NAMES['key_blocks']}")
    return error


def _check_bits(seen: Tensor, right: Tensor, where: str) -> None:
    bits = _SAME_SIZE[seen.element_size()]
    places = (seen.contiguous().view(bits) != right.contiguous().view(bits)).nonzero()
    if len(places):
        first = tuple(places[0].tolist())
        at = ", ".join(f"{name} {index}" for name, index in zip(("block", "token", "head", "dim"), first, strict=True))
        raise CheckError(
            f"{where}: {len(places)} of {seen.numel()} elements are wrong, the first at {at}: "
            f"{float(seen[first]):.6g} instead of {float(right[first]):.6g}"
        )


def _check_margins(memory: Memory, verb: str) -> None:
    if touched := memory.touched_margins():
        raise CheckError(f"{verb}: {touched} elements around K and V were written to")
