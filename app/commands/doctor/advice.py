# SPDX-License-Identifier: Apache-2.0
"""Advice for the reasons that chunk cache and engine give for not working."""

from typing import Final

INSTALL: Final = "pip install 'tessera-rag[cpu]' (or [cuda], [ascend]) installs the vLLM that Tessera is made for"
_MORE_POOL: Final = "give the pool more, e.g. --chunk-cache-memory 1GiB"
_BACKEND: Final = "another --attention-backend; on a CPU --dtype float32"
_CONNECTOR: Final = (
    "leave it out: --chunk-cache-tiers keep ordinary prompts too; docs/connectors.md has the connectors that fit"
)
_REPORT: Final = "please report it with these lines and the log; answers are right all the same, in full attention"

ADVICE: Final = {
    "it finds KV by token ids": _CONNECTOR,
    "not known to find KV by request": _CONNECTOR,
    "it names no connector": "leave it out",
    "not tried with several connectors": "leave it out, or install vLLM 0.32",
    "chunks can be reused in fp8_e4m3": "--kv-cache-dtype fp8, or leave it out",
    "positions turn keys, which rounds": "tessera calibrate measures what reuse costs at each position",
    "has a quantized KV cache (": "--kv-cache-dtype fp8 or bfloat16",
    "context parallelism": "leave out --decode-context-parallel-size and --prefill-context-parallel-size",
    "hold no page of": _MORE_POOL,
    "pool is too small for the self-check": _MORE_POOL,
    "elements changed in the last two blocks": _BACKEND,
    "read through the probed strides is not what was written": _BACKEND,
    "has no cache writer to probe": _BACKEND,
    "enable_kv_nz": "leave it out of --additional-config",
    "Triton is needed": "pip install triton",
    "vLLM-Ascend's writer is needed": "pip install vllm-ascend",
    "differs from computed KV": _REPORT,
    " tokens reused, ": _REPORT,
    "nothing saved": _REPORT,
}
"""Advice by words of the chunk cache's reason."""

ENGINE_ADVICE: Final = {
    "out of memory": "--chunk-cache-memory or --gpu-memory-utilization lower",
    "Free memory on device": "end what else runs there, or set --gpu-memory-utilization lower",
    "maximum model length": "a longer --max-model-len: the self-check takes 141 tokens",
    "No available memory for the cache blocks": "more --kv-cache-memory-bytes, or a higher --gpu-memory-utilization",
    "max seq len": "a shorter --max-model-len, or more --kv-cache-memory-bytes",
    "cannot open shared object": "install the library; on Debian: apt-get install g++ libnuma1",
}
"""Advice by words of errors from vLLM, torch and the system."""

OTHERWISE: Final = "no flag changes that: tessera serve answers with this model, but reuses nothing"


def advice_for(reason: str) -> str | None:
    """The advice for ``reason``, if there is any."""
    return next((fix for words, fix in {**ADVICE, **ENGINE_ADVICE}.items() if words in reason), None)
