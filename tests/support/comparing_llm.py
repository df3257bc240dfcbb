# SPDX-License-Identifier: Apache-2.0
"""An engine that compares pages for the self-check."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

from tests.engine_ext.fake_llm import FakeLLM


class ComparingLLM(FakeLLM):
    """Its workers find these differences, one after the other."""

    def __init__(self, dtype: torch.dtype, *differences: float) -> None:
        super().__init__()
        is_quantized = dtype.itemsize == 1
        self.model_config.dtype = torch.float32 if is_quantized else dtype
        self.vllm_config.cache_config = SimpleNamespace(cache_dtype="fp8" if is_quantized else "auto")
        self.model_config.get_vocab_size = lambda: 1000
        self.differences: Iterator[float] = iter(differences)
        self.requests: list[str] = []

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        if method in ("chunk_cache_prepare_attention", "chunk_cache_prepare_probes"):
            return ["not of this engine"]
        assert method == "chunk_cache_compare"
        return [0.0, next(self.differences)]

    async def generate(self, prompt: Any, params: Any, request_id: str, **kwargs: Any) -> Any:
        self.requests.append(request_id)
        async for output in super().generate(prompt, params, request_id, **kwargs):
            yield output
