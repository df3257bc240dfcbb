# SPDX-License-Identifier: Apache-2.0
"""The checks, in the order in which they are made."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from research.device import copies, speed
from research.device.context import Context
from research.device.devices import Kind
from research.device.findings import Finding

Make = Callable[[Context], Awaitable[Finding]]
"""Makes a check; see ``findings`` for its errors."""


@dataclass(frozen=True, slots=True)
class Check:
    """A check, and the kinds of devices that it is for."""

    name: str
    title: str
    make: Make
    kinds: tuple[Kind, ...] = ("cuda", "npu", "cpu")


async def engine(context: Context) -> Finding:
    """Starts the engine with its chunk cache on.

    Then K and V were found in the memory of its layers, and the self-check at start has found what was loaded and
    turned to be what the engine computes itself, in every layer.
    """
    server = await context.engine.server()
    version, pool = await server.vllm_version(), await server.pool()
    tokens = pool.pages * pool.page_tokens
    message = f"vLLM {version} started, its self-check passed, and the chunk cache is on, for {tokens} tokens"
    flags = list(context.engine.options.all_flags())
    return Finding(message, {"vllm": version, "flags": flags, "pool_tokens": tokens})


async def exactness(context: Context) -> Finding:
    """See :mod:`research.device.exactness`, which can't be imported without the server's packages."""
    await context.engine.server()
    from research.device import exactness

    return await exactness.exactness(context)


def _by_triton(make: Make) -> Make:
    return lambda context: make(replace(context, by_triton=True))


CHECKS = (
    Check("kernels", "saves and loads in every layout, dtype and page size, against a naive reference", copies.kernels),
    Check(
        "kernels-triton", "the same by Triton-Ascend, which no engine uses yet", _by_triton(copies.kernels), ("npu",)
    ),
    Check("no-sync", "saves and loads never wait for the device", speed.no_sync, ("cuda",)),
    Check("bandwidth", f"loads and saves at {speed.LEAST_SHARE:.2f} of a plain copy's speed or more", speed.bandwidth),
    Check("bandwidth-triton", "the same by Triton-Ascend", _by_triton(speed.bandwidth), ("npu",)),
    Check("engine", "the engine starts, and its self-check passes", engine),
    Check("exactness", "answers over cached chunks are those over missing ones", exactness),
)


def checks_for(kind: Kind) -> tuple[Check, ...]:
    """The checks for a kind of device."""
    return tuple(check for check in CHECKS if kind in check.kinds)
