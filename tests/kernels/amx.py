# SPDX-License-Identifier: Apache-2.0
"""vLLM's cache of bfloat16 K and V on CPUs with AMX, in plain torch: ``cpu_attn_reshape_and_cache(..., isa="amx")``.

Written after vLLM 0.32's ``csrc/cpu/cpu_attn_amx.hpp``. A head of a block has ``block * size`` elements of K, and
as many of V behind them. AMX multiplies by a matrix of 16 columns of pairs: of a query with K, columns are tokens and
pairs are dimensions; of probabilities with V, columns are dimensions and pairs are tokens.
"""

import torch
from torch import Tensor

COLUMNS = 16
PAIR = 2
ROW = COLUMNS * PAIR
MULTIPLE = 32
"""vLLM takes this layout for blocks and heads of multiples of 32."""


def is_tiled(dtype: torch.dtype, block_size: int, head_size: int) -> bool:
    """Whether vLLM keeps such a cache in this layout on a CPU with AMX."""
    return dtype == torch.bfloat16 and block_size % MULTIPLE == 0 and head_size % MULTIPLE == 0


def key_addresses(block_size: int, head_size: int) -> Tensor:
    """Place of each element of K within a head of a block, ``[token, dimension]``."""
    token, dim = torch.arange(block_size)[:, None], torch.arange(head_size)[None, :]
    return _addresses(token, dim, head_size)


def value_addresses(block_size: int, head_size: int) -> Tensor:
    """Place of each element of V within a head of a block, ``[token, dimension]``."""
    token, dim = torch.arange(block_size)[:, None], torch.arange(head_size)[None, :]
    return _addresses(dim, token, block_size)


def _addresses(column: Tensor, depth: Tensor, depths: int) -> Tensor:
    """Place of an element in tiles of 16 columns, each with ``depths`` elements in pairs."""
    tile, column = column // COLUMNS, column % COLUMNS
    row, half = depth // PAIR, depth % PAIR
    return tile * (COLUMNS * depths) + row * ROW + column * PAIR + half


def write(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    """Stores ``[tokens, heads, size]`` in caches ``[blocks, heads, block, size]``, as vLLM's operator does."""
    slots = slots[: len(key)]
    written = slots >= 0
    _scatter(key[written], key_cache, slots[written], key_addresses(*key_cache.shape[2:]))
    _scatter(value[written], value_cache, slots[written], value_addresses(*value_cache.shape[2:]))


def read(key_cache: Tensor, value_cache: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
    """K and V of whole blocks, ``[tokens, heads, size]``."""
    key = _gather(key_cache, blocks, key_addresses(*key_cache.shape[2:]))
    return key, _gather(value_cache, blocks, value_addresses(*value_cache.shape[2:]))


def _scatter(tokens: Tensor, cache: Tensor, slots: Tensor, addresses: Tensor) -> None:
    blocks, heads, block_size, _ = cache.shape
    block, place = slots // block_size, slots % block_size
    elements = cache.view(blocks, heads, -1)
    elements[block[:, None, None], torch.arange(heads)[:, None], addresses[place][:, None]] = tokens


def _gather(cache: Tensor, blocks: Tensor, addresses: Tensor) -> Tensor:
    elements = cache.view(*cache.shape[:2], -1)[blocks]
    return elements[..., addresses].transpose(1, 2).flatten(0, 1)
