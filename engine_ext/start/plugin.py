# SPDX-License-Identifier: Apache-2.0
"""vLLM plugin (an entry point in pyproject.toml), called first in each process of an engine."""

import os
from contextlib import suppress
from typing import Final

from machine.process_watch import end_with_parent, is_engine

PREFIX_SPEC: Final = "TierOffloadingSpec"
_EXTENDS: Final = "_TESSERA_EXTENDS_ATTENTION"
_PREFIXES: Final = "_TESSERA_PREFIXES_IN_TIERS"


def load() -> None:
    """Ends the process with its parent, and lets it use AMX; extends vLLM's attention and names the prefixes' classes.

    Does nothing in other engines' processes, which have the plugin, too.
    """
    end_with_parent()
    if is_engine():
        _ask_for_amx()
    if os.environ.get(_EXTENDS):
        _extend_attention()
    if _PREFIXES in os.environ:
        _register_prefix_spec()


def _ask_for_amx() -> None:
    """Asks the operating system for AMX's registers, where the CPU has them.

    vLLM's attention uses them without asking. It dies of an illegal instruction unless oneDNN has asked before, which
    it does for large matrix products only: not for a first prompt of one token.
    """
    import torch

    torch.cpu._init_amx()


def extend_backends(*, attends: bool) -> None:
    """Extends the attention of this process and of the next engine's.

    GPUs' backends, too, if requests attend to chunks: they cost the CUDA graphs of whole steps.
    """
    os.environ[_EXTENDS] = "all" if attends else "cpu"
    _extend_attention()


def _extend_attention() -> None:
    """Registers the extended backends in place of vLLM's."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend  # takes seconds to import

    register_backend(AttentionBackendEnum.CPU_ATTN, "engine_ext.core.attention.cpu.ChunkAttentionBackend")
    if os.environ[_EXTENDS] == "all":
        register_backend(AttentionBackendEnum.FLASH_ATTN, "engine_ext.core.attention.gpu.ChunkFlashBackend")
        register_backend(AttentionBackendEnum.TRITON_ATTN, "engine_ext.core.attention.gpu.ChunkTritonBackend")


def keep_prefixes() -> None:
    """Registers the prefixes' specification, here and in the next engine's processes."""
    os.environ[_PREFIXES] = "1"
    _register_prefix_spec()


def _register_prefix_spec() -> None:
    """Registers it with vLLM, which warns of specifications that are not."""
    from vllm.v1.kv_offload.factory import OffloadingSpecFactory  # not in every version

    with suppress(ValueError):  # it is registered already
        OffloadingSpecFactory.register_spec(PREFIX_SPEC, "engine_ext.core.prefixes.spec", PREFIX_SPEC)
