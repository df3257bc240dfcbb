# SPDX-License-Identifier: Apache-2.0
"""Every way for the chunk cache to be off: served in full attention with the reason, or no start if it is required."""

import json
import logging
import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs

from app.advice import OTHERWISE, remedy_for
from cache.config import ChunkCacheUse
from engine_ext.chunks.cache_off import CacheOff
from engine_ext.start import startup
from engine_ext.start.startup import SWITCHED_OFF, ChunkCacheOptions, RequiredCacheError, start_chunk_engine
from tests.support.comparing_llm import ComparingLLM

POOL = {"num_pages": 400, "page_bytes": 1, "block_order": "order"}
GPT_OSS = {"model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "head_dim": 64, "vocab_size": 1000}
MAMBA = {"model_type": "mamba", "architectures": ["MambaForCausalLM"], "vocab_size": 1000}


class Engine(ComparingLLM):
    """An engine whose workers prepare these pools, or have these reasons, and find these differences."""

    def __init__(
        self, pools: Sequence[dict[str, Any]] = (POOL,), differences: Sequence[float] = (0, 0), kv_dtype: str = "auto"
    ) -> None:
        super().__init__(torch.float32, *differences)
        self.pools = pools
        self.kv_dtype = kv_dtype
        self.is_running = False

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        if method == "chunk_cache_prepare":
            return list(self.pools)
        return await super().collective_rpc(method, args)

    @asynccontextmanager
    async def started(self, _: AsyncEngineArgs) -> AsyncIterator["Engine"]:
        self.is_running = True
        try:
            yield self
        finally:
            self.is_running = False
            self.requests.append("shut down")


class FailingEngine(Engine):
    async def generate(self, prompt: Any, params: Any, request_id: str, **kwargs: Any) -> Any:
        raise RuntimeError("Tensor with surprising shape")
        yield


@dataclass(frozen=True)
class Way:
    """A way for the cache to be off, with words of the reason and of what helps; the model's is a folder's config."""

    reason: str
    remedy: str
    flags: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] | None = None
    options: ChunkCacheOptions = field(default_factory=ChunkCacheOptions)
    engine: Callable[[], Engine] = Engine


BEFORE_THE_START = {
    "flag": Way("context parallelism", "leave out --decode", {"decode_context_parallel_size": 2}),
    "KV type": Way("--kv-cache-dtype=fp8_e5m2", "--kv-cache-dtype fp8", {"kv_cache_dtype": "fp8_e5m2"}),
    "model": Way("no attention and so no KV cache (Mamba)", OTHERWISE, model=MAMBA),
    "model that keeps all blocks": Way(
        "wrong for windows with attention sinks",
        "leave out --disable-hybrid",
        {"disable_hybrid_kv_cache_manager": True},
        GPT_OSS,
    ),
    "pool beyond vLLM's share": Way(
        "leave nothing of vLLM's", "a smaller --chunk-cache-memory", options=ChunkCacheOptions(pool_bytes=1 << 60)
    ),
}
AFTER_IT = {
    "keys of an fp8 cache turn": Way(
        "rounds them once more", "--chunk-mode parallel", engine=lambda: Engine(kv_dtype="fp8")
    ),
    "a worker refuses": Way(
        "layer 0 uses ALiBi", OTHERWISE, engine=lambda: Engine([POOL, {"reason": "layer 0 uses ALiBi"}])
    ),
    "reuse differs": Way("reuse: loaded KV differs", "please report it", engine=lambda: Engine(differences=[0.5])),
    "rotation differs": Way("rotation: loaded KV differs", "report", engine=lambda: Engine(differences=[0, 0.5])),
    "pool too small for the self-check": Way(
        "pool is too small for the self-check",
        "e.g. --chunk-cache-memory 1GiB",
        engine=lambda: Engine([POOL | {"num_pages": 2}]),
    ),
    "the self-check breaks": Way("self-check failed: RuntimeError: Tensor", "please report it", engine=FailingEngine),
}
WAYS = {**BEFORE_THE_START, **AFTER_IT}


@pytest.fixture(scope="module")
def config(tiny_llama: Path) -> VllmConfig:
    return AsyncEngineArgs(model=str(tiny_llama), dtype="float32", enforce_eager=True).create_engine_config()


@asynccontextmanager
async def starting(
    way: Way, use: ChunkCacheUse, config: VllmConfig, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[Any, Engine]]:
    """The chunk engine started in this way, and vLLM's."""
    engine, model = way.engine(), Path(config.model_config.model)
    engine.vllm_config, engine.model_config = config, config.model_config
    monkeypatch.setattr(config.cache_config, "cache_dtype", engine.kv_dtype)
    if way.model is not None:
        (folder / "config.json").write_text(json.dumps(way.model))
        model = folder
    monkeypatch.setattr(startup, "mark_engine", lambda: None)
    monkeypatch.setattr(startup, "build_async_engine_client_from_engine_args", engine.started)
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    args = AsyncEngineArgs(model=str(model), dtype="float32", skip_tokenizer_init=True, **way.flags)
    try:
        async with start_chunk_engine(args, replace(way.options, use=use)) as started:
            yield started, engine
    finally:
        assert not engine.is_running


@pytest.mark.parametrize("name", WAYS)
async def test_it_serves_without_the_cache_and_says_why_or_does_not_start_if_that_is_required(
    name, config, tmp_path, monkeypatch, caplog
):
    way = WAYS[name]
    caplog.set_level(logging.WARNING, "engine_ext")
    async with starting(way, "on", config, tmp_path, monkeypatch) as (started, engine):
        assert engine.is_running
        assert isinstance(started.cache, CacheOff)
        assert way.reason in started.cache.reason
        assert way.remedy in remedy_for(started.cache.reason)
        assert f"chunk cache off: {started.cache.reason}" in caplog.text
    engine = way.engine()
    with pytest.raises(RequiredCacheError, match=re.escape(way.reason)):
        async with starting(replace(way, engine=lambda: engine), "require", config, tmp_path, monkeypatch):
            pass
    assert ("shut down" in engine.requests) == (name in AFTER_IT)  # other models are not even loaded


@pytest.mark.parametrize(("use", "reason"), [("on", None), ("require", None), ("off", SWITCHED_OFF)])
async def test_a_sound_engine_has_the_cache_and_one_that_was_switched_off_is_no_warning(
    use, reason, config, tmp_path, monkeypatch, caplog
):
    caplog.set_level(logging.WARNING, "engine_ext")
    async with starting(Way("", ""), use, config, tmp_path, monkeypatch) as (started, engine):
        assert started.cache.reason == reason
        assert bool(engine.requests) == (reason is None)
    assert "cache off" not in caplog.text
