# SPDX-License-Identifier: Apache-2.0
"""What tests need that not every vLLM has; docs/vllm-versions.md has the list for users."""

import pytest

from engine_ext.wire.vllm_compat import VERSION, vllm_version

HAS_QUEUE_LIMIT = VERSION >= (0, 29)
CHECKS_BODY_TYPE = VERSION >= (0, 28)
ANSWERS_EMPTY_MESSAGES = VERSION >= (0, 29)
RUNS_SLIDING_WINDOWS_ALONE = VERSION >= (0, 29)
HAS_MLA_ON_CPUS = VERSION >= (0, 28)
HAS_FLOAT32_SINKS = VERSION >= (0, 31)
REFUSED_FAMILIES = {} if VERSION >= (0, 31) else {"OLMo2": "no rotary embedding that could be found"}
"""Of ``tests.families``, why chunks can't be cached here, though they can with newer ones."""


def needs(has_it: bool, what: str) -> pytest.MarkDecorator:
    """Skips a test where the installed vLLM has no ``what``."""
    return pytest.mark.skipif(not has_it, reason=f"vLLM {vllm_version()} has no {what}")
