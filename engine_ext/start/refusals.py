# SPDX-License-Identifier: Apache-2.0
"""Refusals of a running engine, asked where it decides on them: nothing here knows what works on which device."""

from typing import Final

from vllm.engine.arg_utils import AsyncEngineArgs

from cache.positions.layout import PlacementName
from engine_ext.chunks.chunk_cache import ChunkCache
from engine_ext.client.engine import ChunkEngine
from engine_ext.start.startup import in_place_refusal, refused
from engine_ext.start.support import drops_blocks, in_place_reason, kv_dtype_reason, turning_reason, unsupported_reason

COPY: Final = "placement copy"
IN_PLACE: Final = "placement in-place"
ATTEND: Final = "placement attend"
MEASURED: Final = "sparse requests, windows computed anew, chunks read again, citations"
DECODING: Final = "sparse decoding"
_KV_DTYPES: Final = ("float32", "float16", "bfloat16", "fp8")


async def refusals(engine: ChunkEngine, args: AsyncEngineArgs, placement: PlacementName) -> dict[str, str | None]:
    """Return the reason against each thing that requests and flags may ask of an engine, ``None`` where it works.

    The engine has its cache on, and was started with ``args`` and ``placement``. Reasons are about one thing at a time:
    some exclude each other.
    """
    llm, cache = engine.llm, engine.cache
    assert isinstance(cache, ChunkCache)
    config, model = llm.vllm_config, llm.model_config
    if placement != "in-place" and drops_blocks(args, model, in_place=False):
        # These workers would refuse, but for this placement they keep all blocks.
        in_place = unsupported_reason(args, model, in_place=True) or in_place_reason(config)
    else:
        in_place = await in_place_refusal(llm, cache.config)
    return {
        COPY: None,
        IN_PLACE: in_place,
        ATTEND: None if cache.placement == "attend" else cache.no_attention,
        MEASURED: cache.no_attention,
        DECODING: await refused(llm, "chunk_cache_decoding_reason"),
        **{
            f"KV in {each}": kv_dtype_reason(each, model) or turning_reason(each, engine.strategy)
            for each in _KV_DTYPES
        },
    }
