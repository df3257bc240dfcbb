# SPDX-License-Identifier: Apache-2.0
"""A vLLM plugin by which vLLM keeps bfloat16 K and V in AMX's layout on any CPU.

For tests alone: `make test-amx` puts this folder on the module path. Attention converts the blocks that a step reads
into this CPU's own layout and runs vLLM's operator on them: answers stay the same, bit for bit.

``AMX_RUNTIME=off`` is the contrary: vLLM on a CPU with AMX as on one without.
"""

import os
from typing import Any

import torch
from torch import Tensor
from vllm.logger import init_logger

from tests.kernels import amx

logger = init_logger(f"vllm.{__name__}")

AMX, WITHOUT_AMX = "amx", "vec"
"""vLLM's names of instructions for heads and blocks of multiples of 32."""


def load() -> None:
    """Replaces vLLM's choice of instructions, and with AMX its writer, its attention and that one's scheduler."""
    from vllm import _custom_ops as ops  # a plugin is found before vLLM can be imported
    from vllm.v1.attention.backends import cpu_attn

    choose = cpu_attn._get_attn_isa
    is_off = os.environ.get("AMX_RUNTIME") == "off"

    def choose_instead(dtype: torch.dtype, block_size: int, head_size: int, kv_cache_dtype: str = "auto") -> str:
        chosen = choose(dtype, block_size, head_size, kv_cache_dtype)
        if kv_cache_dtype != "auto" or not amx.is_tiled(dtype, block_size, head_size):
            return chosen
        if is_off:
            return WITHOUT_AMX if chosen == AMX else chosen
        logger.warning("AMX's layout, emulated: blocks of %d, heads of %d", block_size, head_size)
        return AMX

    cpu_attn._get_attn_isa = choose_instead
    if is_off:
        return

    write, schedule = ops.cpu_attn_reshape_and_cache, ops.cpu_attn_get_scheduler_metadata
    attend = ops.cpu_attention_with_kv_cache
    own = choose(torch.bfloat16, amx.MULTIPLE, amx.MULTIPLE)

    def write_tiles(
        key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor, isa: str, **options: Any
    ) -> None:
        if isa == AMX:
            amx.write(key, value, key_cache, value_cache, slots)
        else:
            write(key, value, key_cache, value_cache, slots, isa, **options)

    def schedule_as_own(*, isa: str, **options: Any) -> Tensor:
        return schedule(isa=own if isa == AMX else isa, **options)

    def attend_to_tiles(
        *, key_cache: Tensor, value_cache: Tensor, seq_lens: Tensor, block_table: Tensor, **options: Any
    ) -> None:
        _, heads, block_size, head_size = key_cache.shape
        if amx.is_tiled(key_cache.dtype, block_size, head_size):
            block_table = block_table[: len(seq_lens)].clone()
            used = torch.arange(block_table.shape[1]) < -(-seq_lens // block_size)[:, None]
            blocks, numbers = block_table[used].unique(return_inverse=True)
            key, value = amx.read(key_cache, value_cache, blocks)
            scratch = key.new_zeros(len(blocks), heads, 2 * block_size, head_size)
            key_cache, value_cache = scratch.chunk(2, dim=2)
            write(key, value, key_cache, value_cache, torch.arange(len(key)), own)
            block_table[used] = numbers.to(block_table.dtype)
        attend(key_cache=key_cache, value_cache=value_cache, seq_lens=seq_lens, block_table=block_table, **options)

    ops.cpu_attn_reshape_and_cache = write_tiles
    ops.cpu_attn_get_scheduler_metadata = schedule_as_own
    ops.cpu_attention_with_kv_cache = attend_to_tiles
