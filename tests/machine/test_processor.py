# SPDX-License-Identifier: Apache-2.0
"""The processor's instruction sets, read from the system."""

import platform
from pathlib import Path

import pytest

from machine.processor import cpu_flags, cpu_model, instruction_sets


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        ("fpu avx2 avx512f avx512_bf16 amx_tile amx_bf16 amx_int8", ["AMX", "AVX512_BF16", "AVX-512", "AVX2"]),
        ("fpu avx avx2 avx512f", ["AVX-512", "AVX2"]),
        ("fpu avx avx2", ["AVX2"]),
        ("fp asimd bf16", []),  # ARM
    ],
)
def test_instructions_are_named(flags, names):
    assert instruction_sets(frozenset(flags.split())) == names


@pytest.mark.skipif(platform.machine() != "x86_64" or not Path("/proc/cpuinfo").exists(), reason="Linux on x86 only")
def test_this_processor_is_read():
    assert {"fpu", "sse2"} <= cpu_flags()
    assert cpu_model()
