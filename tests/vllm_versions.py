# SPDX-License-Identifier: Apache-2.0
"""Features of vLLM versions that tests depend on; docs/vllm-versions.md has the users' list."""

import pytest

from engine_ext.wire.vllm_compat import VERSION, vllm_version

HAS_QUEUE_LIMIT = VERSION >= (0, 29)
CHECKS_BODY_TYPE = VERSION >= (0, 28)
ANSWERS_EMPTY_MESSAGES = VERSION >= (0, 29)
RUNS_SLIDING_WINDOWS_ALONE = VERSION >= (0, 29)
HAS_MLA_ON_CPUS = VERSION >= (0, 28)
HAS_FLOAT32_SINKS = VERSION >= (0, 31)
REFUSED_FAMILIES = {} if VERSION >= (0, 31) else {"OLMo2": "no rotary embedding that could be found"}
"""Reasons why some of ``tests.families`` can't be cached with this vLLM, unlike newer ones."""
if VERSION < (0, 32):
    REFUSED_FAMILIES |= {
        "Mistral, sliding": "layers with windows drop blocks",
        "Gemma 4, heads of two sizes and layers that share KV": "layers that share KV have heads of two sizes",
        "gpt-oss": "vLLM's CPU attention is wrong for windows with attention sinks",
    }


def needs(has_it: bool, what: str) -> pytest.MarkDecorator:
    """Skips a test if the installed vLLM lacks ``what``."""
    return pytest.mark.skipif(not has_it, reason=f"vLLM {vllm_version()} has no {what}")
