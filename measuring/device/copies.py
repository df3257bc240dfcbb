# SPDX-License-Identifier: Apache-2.0
"""The checks of the copies themselves: are they right, whatever the layout?"""

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

from kernels.npu_copier import NpuCopier
from kernels.paged import KVCopier, LayerKV
from measuring.device.cases import Case, cases
from measuring.device.comparison import MakeCopier, check_load, check_save
from measuring.device.context import Context
from measuring.device.devices import Device
from measuring.device.findings import CheckError, Finding, SkippedError, one_line

_MOST_LISTED = 20


async def kernels(context: Context) -> Finding:
    """The copier that the engine would use."""
    return await compare(_cases(context), context.device, context.copier)


async def operators(context: Context) -> Finding:
    """torch_npu's operators, which are used where Triton-Ascend is not installed."""
    try:
        write = context.writer()
    except ImportError as error:
        raise SkippedError(f"the operators write through vLLM-Ascend, which can't be imported: {error}") from error
    if write is None:
        raise SkippedError(f"there are none on {context.device.kind}")
    return await compare(_cases(context), context.device, partial(NpuCopier, reshape_and_cache=write))


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


def _cases(context: Context) -> list[Case]:
    return cases(context.device, context.options.dtypes, context.options.thorough)
