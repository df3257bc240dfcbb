# SPDX-License-Identifier: Apache-2.0
"""Everything that checks are made with."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kernels.dispatch import copier_for
from kernels.npu_copier import ReshapeAndCache
from kernels.paged import KVCopier, LayerKV
from measuring.device.devices import Device
from measuring.device.engine import Engine

LoadWriter = Callable[[], ReshapeAndCache]
"""Imports the engine's writer of K and V; raises ``ImportError``."""


@dataclass(frozen=True, slots=True)
class Context:
    """The device, dtypes of K and V, the engine, and, on NPUs, the engine's writer."""

    device: Device
    dtypes: tuple[torch.dtype, ...]
    engine: Engine
    load_writer: LoadWriter | None = None

    def writer(self) -> ReshapeAndCache | None:
        """The engine's writer of K and V, if the device needs it; raises ``ImportError``."""
        return None if self.load_writer is None else self.load_writer()

    def copier(self, layers: Sequence[LayerKV]) -> KVCopier:
        """The copier that the engine would use; Triton's needs no writer."""
        try:
            writer = self.writer()
        except ImportError:
            writer = None
        return copier_for(layers, writer)
