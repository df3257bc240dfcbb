# SPDX-License-Identifier: Apache-2.0
"""The machine's processor."""

import platform
from pathlib import Path
from typing import Final

_INSTRUCTIONS: Final = {"amx_bf16": "AMX", "avx512_bf16": "AVX512_BF16", "avx512f": "AVX-512", "avx2": "AVX2"}
"""Names of the instructions that decide how fast models run, by the kernel's flags."""


def cpu_model() -> str:
    """The processor's name, as the system has it."""
    return _cpu_info("model name") or platform.machine()


def cpu_flags() -> frozenset[str]:
    """The kernel's flags of the processor; none where the system tells none."""
    return frozenset(_cpu_info("flags").split())


def instruction_sets(flags: frozenset[str]) -> list[str]:
    """Names of the matrix and vector instructions among the processor's ``flags``."""
    return [name for flag, name in _INSTRUCTIONS.items() if flag in flags]


def _cpu_info(field: str) -> str:
    """A field of the first core; empty where the system does not tell it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    pairs = (line.partition(":") for line in lines)
    return next((value.strip() for name, _, value in pairs if name.strip() == field), "")
