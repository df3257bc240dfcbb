# SPDX-License-Identifier: Apache-2.0
"""What the checks are made with."""

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
class SpeedSizes:
    """What is moved to measure bandwidth, and how often."""

    tokens: int
    layers: int
    kv_heads: int
    head_size: int
    iterations: int


@dataclass(frozen=True, slots=True)
class Options:
    """Of the checks that need no engine; see ``engine.EngineOptions`` for those of the others."""

    dtypes: tuple[torch.dtype, ...]
    thorough: bool
    speed: SpeedSizes


@dataclass(frozen=True, slots=True)
class Context:
    """The device, the options, an engine that starts when it is first asked for, and, on NPUs, where its writer is."""

    device: Device
    options: Options
    engine: Engine
    load_writer: LoadWriter | None = None

    def writer(self) -> ReshapeAndCache | None:
        """The engine's writer of K and V, if the device needs it; raises ``ImportError``."""
        return None if self.load_writer is None else self.load_writer()

    def copier(self, layers: Sequence[LayerKV]) -> KVCopier:
        """As the engine would make it; Triton's needs no writer."""
        try:
            writer = self.writer()
        except ImportError:
            writer = None
        return copier_for(layers, writer)
