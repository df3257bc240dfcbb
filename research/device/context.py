# SPDX-License-Identifier: Apache-2.0
"""Everything that checks are made with."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kernels.dispatch import copier_for
from kernels.npu_copier import ReshapeAndCache
from kernels.paged import KVCopier, LayerKV
from research.device.devices import Device
from research.device.engine import Engine
from research.device.findings import SkippedError

LoadWriter = Callable[[], ReshapeAndCache]
"""Imports the engine's writer of K and V; raises ``ImportError``."""


@dataclass(frozen=True, slots=True)
class Context:
    """The device, dtypes of K and V, the engine, and, on NPUs, the engine's writer.

    ``by_triton``: checks move K and V by Triton, whatever the engine would use.
    """

    device: Device
    dtypes: tuple[torch.dtype, ...]
    engine: Engine
    load_writer: LoadWriter | None = None
    by_triton: bool = False

    def copier(self, layers: Sequence[LayerKV]) -> KVCopier:
        """The copier to check; raises :class:`SkippedError` without the packages for it."""
        try:
            if not self.by_triton:
                return copier_for(layers, None if self.load_writer is None else self.load_writer())
            from kernels.triton_copier import TritonCopier

            return TritonCopier(layers)
        except ImportError as error:
            raise SkippedError(f"{error}") from error
