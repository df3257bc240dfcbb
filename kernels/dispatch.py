# SPDX-License-Identifier: Apache-2.0
"""Choice of the implementation that moves K and V, by device."""

import logging
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kernels.attention.plan import ChunkAttention
from kernels.layout import PagedTensor
from kernels.npu_copier import NpuCopier, ReshapeAndCache
from kernels.paged import KVCopier, LayerKV, UnsupportedKVError
from kernels.torch_copier import TorchCopier

if TYPE_CHECKING:
    from kernels.attention.amx_attention import AmxAttention
    from kernels.attention.numba_attention import NumbaAttention
    from kernels.attention.triton_attention import TritonAttention

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn)
_FP8_CAPABILITY = (8, 9)

logger = logging.getLogger(__name__)


def copier_for(layers: Sequence[LayerKV], reshape_and_cache: ReshapeAndCache | None = None) -> KVCopier:
    """The fastest copier for `layers`, at least one. `reshape_and_cache` is the engine's cache writer, on NPUs.

    Raises :class:`UnsupportedKVError` for unsupported devices, dtypes or shapes.
    """
    device = _device(layers)
    for layer in layers:
        _check(layer)
    match device.type:
        case "cpu":
            copier = _cpu_copier(layers)
        case "cuda":
            copier = _triton_copier(layers)
        case "npu":
            copier = _npu_copier(layers, reshape_and_cache)
        case other:
            raise UnsupportedKVError(f"the KV cache is on {other}; supported: cpu, cuda, npu")
    logger.info("K and V are moved by %s on %s", copier.name, device)
    return copier


def fp8_reason(capability: tuple[int, int]) -> str | None:
    """The reason why Triton can't turn fp8 keys on GPUs of this compute capability, if any."""
    if capability >= _FP8_CAPABILITY:
        return None
    return "Triton turns float8_e4m3fn on GPUs of compute capability 8.9 and later"


def attention_for(layers: Sequence[LayerKV]) -> ChunkAttention:
    """Attention over the pool of `layers`, at least one. Raises :class:`UnsupportedKVError`."""
    device, view = _device(layers), layers[0].key_blocks
    kind = _gpu_attention() if device.type == "cuda" else _cpu_attention(layers)
    if not kind.supports(layers):
        raise UnsupportedKVError(
            f"attention over the chunk pool needs {kind.needs}; here it is {_names({view.dtype})} on {device} with "
            f"heads of {view.shape[3]}"
        )
    return kind(layers)


def _device(layers: Sequence[LayerKV]) -> torch.device:
    devices = {view.device for layer in layers for view in _views(layer)}
    if len(devices) != 1:
        raise UnsupportedKVError(f"K and V of all layers must be on one device, not on {sorted(map(str, devices))}")
    return devices.pop()


def _check(layer: LayerKV) -> None:
    dtypes = {view.dtype for view in _views(layer)}
    if len(dtypes) != 1 or not dtypes <= set(DTYPES):
        raise UnsupportedKVError(f"K and V are {_names(dtypes)}; supported: one of {_names(DTYPES)}")
    pairs = ((layer.key_blocks, layer.key_pool), (layer.value_blocks, layer.value_pool))
    if any(blocks.shape[2:] != tuple(pool.shape[2:]) for blocks, pool in pairs):
        shapes = [tuple(view.shape) for view in _views(layer)]
        raise UnsupportedKVError(f"blocks and pool differ in heads or head size: {shapes}")
    head_size, rotary_dim = layer.key_blocks.shape[3], layer.rotary_dim
    if not 0 < rotary_dim <= head_size:
        raise UnsupportedKVError(f"RoPE turns {rotary_dim} dims of K's head size {head_size}")


def _views(layer: LayerKV) -> tuple[Tensor | PagedTensor, ...]:
    return layer.key_blocks, layer.key_pool, layer.value_blocks, layer.value_pool


def _names(dtypes: Iterable[torch.dtype]) -> str:
    return ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))


def _cpu_copier(layers: Sequence[LayerKV]) -> KVCopier:
    # Machines with an accelerator may lack Numba, or have a NumPy that it refuses.
    from kernels.numba_copier import MOST_TORCH_THREADS, NumbaCopier

    if NumbaCopier.supports(layers):
        return NumbaCopier(layers)
    logger.warning(
        "K and V are moved by torch's indexing: compiled copies, which are several times faster, are for float32 and "
        "bfloat16 in vLLM's CPU layouts with up to %d threads; here it is %s with %d threads",
        MOST_TORCH_THREADS,
        _names({layers[0].key_blocks.dtype}),
        torch.get_num_threads(),
    )
    return TorchCopier(layers)


def _cpu_attention(layers: Sequence[LayerKV]) -> "type[AmxAttention] | type[NumbaAttention]":
    from kernels.attention.amx_attention import AmxAttention
    from kernels.attention.numba_attention import NumbaAttention

    return AmxAttention if AmxAttention.supports(layers) else NumbaAttention


def _gpu_attention() -> "type[TritonAttention]":
    from kernels.attention.triton_attention import TritonAttention

    return TritonAttention


def _triton_copier(layers: Sequence[LayerKV]) -> KVCopier:
    dtype, device = layers[0].key_blocks.dtype, layers[0].key_blocks.device
    if dtype.itemsize == 1 and (reason := fp8_reason(torch.cuda.get_device_capability(device))):
        raise UnsupportedKVError(reason)
    try:
        # Only where there is a device for it: importing Triton takes a second.
        from kernels.triton_copier import TritonCopier
    except ImportError as error:
        raise UnsupportedKVError(f"on {device} Triton is needed: {error}") from error
    return TritonCopier(layers)


def _npu_copier(layers: Sequence[LayerKV], reshape_and_cache: ReshapeAndCache | None) -> KVCopier:
    # Triton-Ascend may turn scattered pointers into scalar access; research/check_npu.py measures both.
    if reshape_and_cache is None:
        raise UnsupportedKVError(f"on {layers[0].key_blocks.device}, vLLM-Ascend's writer is needed")
    return NpuCopier(layers, reshape_and_cache)
