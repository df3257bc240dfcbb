# SPDX-License-Identifier: Apache-2.0
"""vLLM plugin (an entry point in pyproject.toml), called first in each process of an engine."""

import os
from typing import Final

from tools.process_watch import end_with_parent

_ATTENDS: Final = "_TESSERA_ATTENDS"


def load() -> None:
    """Ends the process with its parent, and extends vLLM's attention where needed.

    Does nothing in other engines' processes, which have the plugin, too.
    """
    end_with_parent()
    if os.environ.get(_ATTENDS):
        extend_attention()


def attend_to_pool() -> None:
    """Extends the attention of this process and of the next engine's."""
    os.environ[_ATTENDS] = "1"
    extend_attention()


def extend_attention() -> None:
    """Registers the extended backend for CPUs in place of vLLM's."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend  # takes seconds to import

    register_backend(AttentionBackendEnum.CPU_ATTN, "engine_ext.core.attention.cpu.ChunkAttentionBackend")
