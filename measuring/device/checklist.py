# SPDX-License-Identifier: Apache-2.0
"""The checks, in the order in which they are made."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from measuring.device import copies, engine, exactness, speed
from measuring.device.context import Context
from measuring.device.devices import Kind
from measuring.device.findings import Finding

Make = Callable[[Context], Awaitable[Finding]]
"""Makes a check; see ``findings`` for what it raises."""


@dataclass(frozen=True, slots=True)
class Check:
    """A check, and the kinds of devices that it is for."""

    name: str
    title: str
    make: Make
    kinds: tuple[Kind, ...] = ("cuda", "npu", "cpu")


def _asks_engine(make: Callable[[engine.Engine], Awaitable[Finding]]) -> Make:
    """A check that needs nothing but the engine."""

    def made(context: Context) -> Awaitable[Finding]:
        return make(context.engine)

    return made


CHECKS = (
    Check("kernels", "saves and loads in every layout, dtype and page size, against a naive reference", copies.kernels),
    Check("kernels-operators", "the same by torch_npu's operators, without Triton-Ascend", copies.operators, ("npu",)),
    Check("no-sync", "saves and loads never wait for the device", speed.no_sync, ("cuda",)),
    Check("bandwidth", f"loads and saves at {speed.LEAST_SHARE:.2f} of a plain copy's speed or more", speed.bandwidth),
    Check("engine", "the engine starts, and its self-check passes", _asks_engine(engine.starts)),
    Check("exactness", "answers over cached chunks are those over missing ones", _asks_engine(exactness.exactness)),
)


def checks_for(kind: Kind) -> tuple[Check, ...]:
    """Those for a kind of device."""
    return tuple(check for check in CHECKS if kind in check.kinds)
