# SPDX-License-Identifier: Apache-2.0
"""The device under test."""

import gc
import importlib
import time
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Literal, Protocol

import torch

from machine.processor import cpu_model

Kind = Literal["cuda", "npu", "cpu"]

_GPU_LAYOUTS = ("2BNHD", "B2NHD", "BHN2D", "BNH2D", "B2HND", "BLNHC", "MLA")
_NPU_LAYOUTS = ("pair", "pair MLA")
_GPU_NEEDS = "needed: a machine with an NVIDIA GPU and its driver, and Tessera installed by make setup EXTRA=cuda"
_NPU_NEEDS = (
    "needed: a machine with an Ascend NPU, its driver and CANN (its set_env.sh sourced), and Tessera installed by "
    "make setup EXTRA=ascend"
)


class MissingDeviceError(Exception):
    """There is no such device; the message names the symptom and the requirements."""


class Event(Protocol):
    """A moment in the device's work, as torch has it."""

    def record(self) -> None: ...

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds; only after the device was waited for."""


@dataclass(frozen=True, slots=True)
class Device:
    """A device.

    ``layouts`` are those that engines have on it, ``usual_layout`` and ``block_size`` are what speed is measured with.
    ``sizes`` are tokens in the engine's blocks, and in the pool's pages. ``paddings`` are numbers of elements that a
    cache may begin behind, some of which leave nothing aligned.
    """

    kind: Kind
    name: str
    layouts: tuple[str, ...]
    usual_layout: str
    block_size: int
    sizes: tuple[int, ...] = (1, 16, 64)
    head_sizes: tuple[int, ...] = (64, 80, 96, 128, 256)
    paddings: tuple[int, ...] = (64, 3)

    def event(self) -> Event:
        """A new event, not recorded yet."""
        if self.kind == "cpu":
            return _HostEvent()
        event: Event = self._torch.Event(enable_timing=True)
        return event

    def synchronize(self) -> None:
        """Waits for all of the device's work."""
        if self.kind != "cpu":
            self._torch.synchronize()

    def release(self) -> None:
        """Gives unused memory back: the engine's process wants it."""
        gc.collect()
        if self.kind != "cpu":
            self._torch.empty_cache()

    @property
    def _torch(self) -> Any:
        return getattr(torch, self.kind)


class _HostEvent:
    """On a CPU, work has ended when its call returns."""

    def __init__(self) -> None:
        self._at_s = 0.0

    def record(self) -> None:
        self._at_s = time.perf_counter()

    def elapsed_time(self, end_event: Any) -> float:
        return float(end_event._at_s - self._at_s) * 1e3


def find_device(kind: Kind) -> Device:
    """The device at hand; a CPU is for trying the checks themselves. Raises :class:`MissingDeviceError`."""
    match kind:
        case "cuda":
            return _gpu()
        case "npu":
            return _npu()
        case "cpu":
            return Device("cpu", cpu_model(), _GPU_LAYOUTS, usual_layout="BNH2D", block_size=16)


def _gpu() -> Device:
    if not torch.cuda.is_available():
        seen = "is built without CUDA" if torch.version.cuda is None else "finds none"
        raise MissingDeviceError(f"no NVIDIA GPU at hand: torch {version('torch')} {seen}; {_GPU_NEEDS}")
    return Device("cuda", torch.cuda.get_device_name(), _GPU_LAYOUTS, usual_layout="BNH2D", block_size=16)


def _npu() -> Device:
    try:
        importlib.import_module("torch_npu")
    except (ImportError, OSError) as error:
        raise MissingDeviceError(f"no Ascend NPU at hand: torch_npu: {error}; {_NPU_NEEDS}") from error
    npu: Any = getattr(torch, "npu", None)
    if npu is None or not npu.is_available():
        raise MissingDeviceError(f"no Ascend NPU at hand: torch_npu {version('torch_npu')} finds none; {_NPU_NEEDS}")
    # The operators take whole blocks as they are allocated, so nothing odd is tried here.
    return Device(
        "npu",
        str(npu.get_device_name()),
        _NPU_LAYOUTS,
        usual_layout="pair",
        block_size=128,
        sizes=(1, 16, 64, 128),
        head_sizes=(64, 128),
        paddings=(64,),
    )
