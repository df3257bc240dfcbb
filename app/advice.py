# SPDX-License-Identifier: Apache-2.0
"""Advice for the reasons that chunk cache and engine give for not working."""

from typing import Final

INSTALL: Final = "pip install 'tessera-rag[cpu]' (or [cuda], [ascend]) installs the vLLM that Tessera is made for"
_MORE_POOL: Final = "give the pool more, e.g. --chunk-cache-memory 1GiB"
_LESS_POOL: Final = "a smaller --chunk-cache-memory, or a higher --gpu-memory-utilization"
_BACKEND: Final = "another --attention-backend; on a CPU --dtype float32"
_CONNECTOR: Final = (
    "leave it out: --chunk-cache-tiers keep ordinary prompts too; docs/connectors.md has the connectors that fit"
)
_HYBRID: Final = "leave out --disable-hybrid-kv-cache-manager, --chunk-cache-placement in-place and other KV connectors"
_REPORT: Final = "please report it with these lines and the log; answers are right all the same, in full attention"
_ON_CPUS: Final = (
    "on a CPU without instructions for bfloat16 --dtype float32, which is quicker there; "
    f"""with DeepSeek on a CPU --compilation-config '{{"custom_ops": ["none"]}}'; else {_REPORT}"""
)

ADVICE: Final = {
    "it finds KV by token ids": _CONNECTOR,
    "not known to find KV by request": _CONNECTOR,
    "it names no connector": "leave it out",
    "not tried with several connectors": "leave it out",
    "chunks can be reused in fp8_e4m3": "--kv-cache-dtype fp8, or leave it out",
    "chunks can't be reused in fp8": "leave out --kv-cache-dtype",
    "positions turn keys, which rounds": "--chunk-mode parallel; tessera calibrate measures each strategy",
    "has a quantized KV cache (": "--kv-cache-dtype fp8 or bfloat16",
    "of compute capability 8.9 and later": "leave out --kv-cache-dtype",
    "has expandable_segments:True": "unset PYTORCH_CUDA_ALLOC_CONF, or add --enable-sleep-mode",
    "context parallelism": "leave out --decode-context-parallel-size and --prefill-context-parallel-size",
    "asynchronous scheduling keeps tokens from": "add --no-async-scheduling",
    "without its hybrid KV cache manager": _HYBRID,
    "heads of two sizes": _HYBRID,
    "GiB leave nothing of vLLM's": _LESS_POOL,
    "MiB that are free": _LESS_POOL,
    "size of the device's memory is unknown": "--kv-cache-memory-bytes, beside which the pool needs no share",
    "hold no page of": _MORE_POOL,
    "pool is too small for the self-check": _MORE_POOL,
    "layout that Tessera can't read": _BACKEND,
    "has no cache writer to probe": _BACKEND,
    "enable_kv_nz": "leave it out of --additional-config",
    "Triton is needed": "pip install triton",
    "vLLM-Ascend's writer is needed": "pip install vllm-ascend",
    "differs from computed KV": _ON_CPUS,
    " tokens reused, ": _REPORT,
    "nothing saved": _REPORT,
    "switched off by --chunk-cache off": "leave out --chunk-cache off (--no-chunk-cache, TESSERA_CHUNK_CACHE=off)",
}
"""Advice by words of the chunk cache's reason."""

ENGINE_ADVICE: Final = {
    "out of memory": "--chunk-cache-memory or --gpu-memory-utilization lower",
    "Free memory on device": "end what else runs there, or set --gpu-memory-utilization lower",
    "maximum model length": "a longer --max-model-len: the self-check takes 141 tokens",
    "No available memory for the cache blocks": f"more --kv-cache-memory-bytes, or {_LESS_POOL}",
    "max seq len": "a shorter --max-model-len, or more --kv-cache-memory-bytes",
    "cannot open shared object": "install the library; on Debian: apt-get install g++ libnuma1",
}
"""Advice by words of errors from vLLM, torch and the system."""

OTHERWISE: Final = "no flag changes that: take another model; answers of this one are right, in full attention"


def advice_for(reason: str) -> str | None:
    """The advice for ``reason``, if there is any."""
    return next((fix for words, fix in {**ADVICE, **ENGINE_ADVICE}.items() if words in reason), None)


def remedy_for(reason: str) -> str:
    """Return the cure for a cache that is off for ``reason``.

    Where there is no advice, the reason is an exception's, or lies in the model.
    """
    return advice_for(reason) or (_REPORT if "Error: " in reason else OTHERWISE)


def off_message(reason: str) -> str:
    """One line for users of a server whose cache is off: what that means, the reason, and what helps."""
    return (
        "CHUNK CACHE OFF: no chunk is reused, every request is computed in full, as slowly as without Tessera. "
        f"Reason: {' '.join(reason.split())}. What helps: {remedy_for(reason)}"
    )
