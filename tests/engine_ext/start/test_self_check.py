# SPDX-License-Identifier: Apache-2.0
"""Differences count only where the engine reproduces its own KV; with real engines: `tests/engine/test_engine.py`."""

import pytest
import torch

from cache.config import ChunkCacheConfig
from engine_ext.start.self_check import SelfCheck, SelfCheckError
from tests.support.comparing_llm import ComparingLLM


def check(dtype: torch.dtype, *differences: float) -> tuple[SelfCheck, ComparingLLM]:
    llm = ComparingLLM(dtype, *differences)
    return SelfCheck(llm, ChunkCacheConfig(400, 16, "engine", page_bytes=1)), llm


@pytest.mark.parametrize(
    ("dtype", "differences"),
    [
        (torch.float32, [1e-5, 1e-5]),
        (torch.bfloat16, [0.05, 0.05]),
        (torch.bfloat16, [0.7, 0.0, 0.05]),  # the same in batches of the same sizes
        (torch.float8_e4m3fn, [0.7, 0.4, 0.4]),
        (torch.float16, [0.7, 0.0, 0.3, 0.3, 0.3, 0.01]),  # and one token of four is turned exactly
    ],
)
async def test_passes(dtype: torch.dtype, differences: list[float]) -> None:
    self_check, llm = check(dtype, *differences)
    await self_check.run()
    assert next(llm.differences, None) is None
    assert ("self-check-reuse-cached" in llm.requests) is (differences[0] > 0.1)


@pytest.mark.parametrize(
    ("dtype", "differences", "name"),
    [
        (torch.float32, [1e-2], "reuse"),
        (torch.float32, [0.0, 1e-2], "rotation"),
        (torch.bfloat16, [0.7, 0.7], "reuse"),
        (torch.bfloat16, [float("inf"), 0.2], "reuse"),
        (torch.float8_e4m3fn, [0.6, 0.6], "reuse"),
        (torch.float8_e4m3fn, [0.2, 0.6, 0.6, 0.6, 0.6], "rotation"),
        (torch.bfloat16, [0.0, 0.3, 0.3, 0.3, 0.3], "rotation"),
    ],
)
async def test_fails(dtype: torch.dtype, differences: list[float], name: str) -> None:
    self_check, llm = check(dtype, *differences)
    with pytest.raises(SelfCheckError, match=f"{name}: loaded KV differs"):
        await self_check.run()
    assert next(llm.differences, None) is None
