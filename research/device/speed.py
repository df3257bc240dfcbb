# SPDX-License-Identifier: Apache-2.0
"""Checks of speed: K and V move at the memory's bandwidth, without any waiting."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from kernels.layout import PagedTensor
from kernels.paged import LayerKV, make_pool
from kernels.reference import frequencies
from research.device.cases import dtype_name
from research.device.context import Context
from research.device.devices import Device, Event
from research.device.findings import CheckError, Finding, SkippedError
from research.device.memory import Shape, make_blocks

LEAST_SHARE = 0.70
"""Least share of a plain copy's bandwidth."""
_DTYPE = torch.bfloat16
_PAGE_TOKENS = 32
_CHUNK_TOKENS = 512
_WARM_UPS = 5
_MOST_LEADING_COPIES = 64
_SYNC_TOKENS, _SYNC_LAYERS = 200, 4


@dataclass(frozen=True, slots=True)
class Sizes:
    """Tokens and layers that are moved, and the number of measurements."""

    tokens: int
    layers: int
    kv_heads: int
    head_size: int
    iterations: int


SIZES = Sizes(tokens=4096, layers=32, kv_heads=8, head_size=128, iterations=50)
"""2 GiB of memory."""

Work = Callable[[], Any]


async def bandwidth(context: Context) -> Finding:
    """Times loads and saves in turn with a plain copy of the same bytes.

    Each begins while the device is busy, so that the device's time is measured; the host's is reported beside it.
    Raises :class:`CheckError` below ``LEAST_SHARE`` of the plain copy's bandwidth.
    """
    device, sizes = context.device, SIZES
    copier, plan = context.copier(_layers(device, sizes)), _Plan(device, sizes)
    numel = 2 * sizes.layers * sizes.tokens * sizes.kv_heads * sizes.head_size
    source, target = (torch.zeros(numel, dtype=_DTYPE, device=device.kind) for _ in range(2))
    works: dict[str, Work] = {
        "copy": lambda: target.copy_(source),
        "load": lambda: copier.load(plan.slots, plan.rows, plan.deltas),
        "save": lambda: copier.save(plan.slots, plan.rows),
    }
    host_s = _host_seconds(device, works)
    seconds = _device_seconds(device, works, sizes.iterations, _leading_copies(device, works["copy"], host_s))
    moved = 2 * numel * source.element_size()  # read and written
    return _judge(copier.name, {name: moved / median(times) / 1e9 for name, times in seconds.items()}, host_s, sizes)


def _judge(copier: str, rates: dict[str, float], host_s: dict[str, float], sizes: Sizes) -> Finding:
    """``rates`` are in GB/s."""
    shares = {name: rates[name] / rates["copy"] for name in ("load", "save")}
    values = {
        "copier": copier,
        "gb_per_s": rates,
        "share_of_copy": shares,
        "host_ms": {name: 1e3 * host_s[name] for name in shares},
        **asdict(sizes),
    }
    each = (f"{name} {rates[name]:.0f} GB/s, {shares[name]:.2f} of it" for name in shares)
    host = " and ".join(f"{1e3 * host_s[name]:.2f}" for name in shares)
    message = (
        f"by {copier} in {dtype_name(_DTYPE)}: a plain copy {rates['copy']:.0f} GB/s, {', '.join(each)}; they keep the "
        f"host for {host} ms"
    )
    if min(shares.values()) < LEAST_SHARE:
        raise CheckError(f"{message}; at least {LEAST_SHARE:.2f} is expected", values)
    return Finding(message, values)


class _Plan:
    """Indices of a load: random pages and blocks, each chunk rotated by its own delta."""

    def __init__(self, device: Device, sizes: Sizes) -> None:
        self.slots = _shuffled(sizes.tokens, device.block_size, seed=1)
        self.rows = _shuffled(sizes.tokens, _PAGE_TOKENS, seed=2)
        self.deltas = (torch.arange(sizes.tokens) // _CHUNK_TOKENS + 1) * _CHUNK_TOKENS


def _shuffled(tokens: int, size: int, seed: int) -> Tensor:
    order = torch.randperm(-(-tokens // size), generator=torch.Generator().manual_seed(seed))
    at = torch.arange(tokens)
    return order[at // size] * size + at % size


def _layers(device: Device, sizes: Sizes) -> list[LayerKV]:
    blocks, pages = -(-sizes.tokens // device.block_size), -(-sizes.tokens // _PAGE_TOKENS)
    shape = Shape(blocks, device.block_size, sizes.kv_heads, sizes.head_size, sizes.head_size)
    rotation = frequencies(sizes.head_size, 1e4, is_neox=True)
    layers = []
    for _ in range(sizes.layers):
        _, views = make_blocks(device.usual_layout, shape, _DTYPE, device.kind)
        keys, values = map(PagedTensor.of, views)
        key_pool, value_pool = (make_pool(blocks, pages, _PAGE_TOKENS).normal_() for blocks in (keys, values))
        layers.append(LayerKV(keys, values, key_pool, value_pool, rotation))
    return layers


def _host_seconds(device: Device, works: dict[str, Work]) -> dict[str, float]:
    """Seconds that each call keeps the host, once everything is compiled and allocated."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(2 * _WARM_UPS):
        for name, work in works.items():
            device.synchronize()
            started = time.perf_counter()
            work()
            times[name].append(time.perf_counter() - started)
    device.synchronize()
    return {name: median(values[_WARM_UPS:]) for name, values in times.items()}


def _leading_copies(device: Device, copy: Work, host_s: dict[str, float]) -> Work:
    """Copies that keep the device busy until the host has submitted the measured work."""
    start, end = device.event(), device.event()
    start.record()
    for _ in range(_WARM_UPS):
        copy()
    end.record()
    device.synchronize()
    copy_s = max(start.elapsed_time(end) / 1e3 / _WARM_UPS, 1e-9)
    number = min(1 + int(2 * max(host_s.values()) / copy_s), _MOST_LEADING_COPIES)

    def lead() -> None:
        for _ in range(number):
            copy()

    return lead


def _device_seconds(device: Device, works: dict[str, Work], iterations: int, lead: Work) -> dict[str, list[float]]:
    """Seconds of each work in each iteration, all works in turn."""
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(iterations):
        marks = {name: _marked(device, work, lead) for name, work in works.items()}
        device.synchronize()
        for name, (start, end) in marks.items():
            seconds[name].append(start.elapsed_time(end) / 1e3)
    return seconds


def _marked(device: Device, work: Work, lead: Work) -> tuple[Event, Event]:
    start, end = device.event(), device.event()
    lead()
    start.record()
    work()
    end.record()
    return start, end


async def no_sync(context: Context) -> Finding:
    """Loads and saves while torch raises an error for each wait, provoked once first."""
    if context.device.kind != "cuda":
        raise SkippedError("only torch.cuda has a mode in which waiting for the device is an error")
    sizes = Sizes(_SYNC_TOKENS, _SYNC_LAYERS, kv_heads=2, head_size=64, iterations=1)
    copier, plan = context.copier(_layers(context.device, sizes)), _Plan(context.device, sizes)
    lengths = (_SYNC_TOKENS, 1, 33)
    # Compiled, and pinned memory allocated, in the first two rounds.
    for watch in (nullcontext(), nullcontext(), _waiting_is_an_error()):
        with watch:
            for length in lengths:
                copier.load(*(each[:length] for each in (plan.slots, plan.rows, plan.deltas)))
                copier.save(*(each[:length] for each in (plan.slots, plan.rows)))
    context.device.synchronize()
    tokens = ", ".join(map(str, lengths))
    return Finding(f"loads and saves of {tokens} tokens in {_SYNC_LAYERS} layers by {copier.name} wait for nothing")


@contextmanager
def _waiting_is_an_error() -> Iterator[None]:
    probe = torch.ones(1, device="cuda")
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        _check_that_it_is(probe)
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _check_that_it_is(probe: Tensor) -> None:
    try:
        probe.item()
    except RuntimeError:
        return
    raise CheckError("torch noticed no synchronisation where there is one, so this check would say nothing")
