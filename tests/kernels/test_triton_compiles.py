# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels compile to NVIDIA machine code, with the widest loads and stores and no spills, without a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
MATRIX = pytest.mark.matrix
CASES = {
    "rotated": {"dtype": "bf16", "head_size": 128, "pairs": 64, "is_neox": True},
    "copied": {"dtype": "bf16", "head_size": 128, "pairs": 0, "is_neox": True},
    "rotated in part": {"dtype": "fp16", "head_size": 80, "pairs": 16, "is_neox": True},
    "rotated in neighbouring pairs": {"dtype": "fp32", "head_size": 64, "pairs": 32, "is_neox": False},
    "quantized": {"dtype": "fp8e4nv", "head_size": 128, "pairs": 64, "is_neox": True},
    "latent": {"dtype": "bf16", "head_size": 512, "pairs": 0, "is_neox": True},
}


PARAMS = [
    pytest.param(case, capability, marks=[] if capability == 90 else MATRIX)
    for case in CASES
    for capability in (80, 90, 100)
    if case != "quantized" or capability != 80  # which has no such type (:mod:`kernels.dispatch` refuses it)
]


@pytest.mark.parametrize(("case", "capability"), PARAMS)
def test_it_compiles(case: str, capability: int, tmp_path: Path) -> None:
    code = compiled(tmp_path, capability, kernel="move_tokens", **CASES[case])
    # 16 bytes at once (8 for a few pairs).
    assert "v4.b32" in code["ld"]
    assert {"v4.b32"} <= set(code["st"]) <= {"v4.b32", "v2.b32"}


SHARED_BYTES = {80: 166_912, 90: 232_448, 100: 232_448}
"""Most shared memory of a program, by compute capability."""
ATTENTION = [
    *((dtype, size, tiles) for dtype in ("bf16", "fp16") for size in (64, 128) for tiles in range(3)),
    *((dtype, 256, tiles) for dtype in ("bf16", "fp16") for tiles in range(2)),
    *(("fp32", size, 0) for size in (64, 128, 256)),
]


@pytest.mark.parametrize(
    ("form", "capability"),
    [
        pytest.param(form, capability, marks=[] if (form, capability) == (("bf16", 128, 1), 90) else MATRIX)
        for form in ATTENTION
        for capability in SHARED_BYTES
    ],
    ids=str,
)
def test_attention_compiles_without_spills(form: tuple[str, int, int], capability: int, tmp_path: Path) -> None:
    dtype, head_size, tiles = form
    sizes = {"dtype": dtype, "head_size": head_size, "tiles": tiles, "group": 4, "is_neox": True}
    code = compiled(tmp_path, capability, kernel="attend_units", **sizes)
    assert code["stack"] == 0
    assert code["registers"] <= 255
    assert code["shared"] <= SHARED_BYTES[capability]
    # Keys and values come 16 bytes at once, their places 8 if at all.
    assert set(code["copied"]) <= {"0x10", "0x8"}
    assert "0x10" in code["copied"] or "v4.b32" in code["ld"]
    if dtype != "fp32":
        assert {"wgmma", "tcgen05.mma", "mma.sync"} & set(code["products"])


@pytest.mark.matrix
@pytest.mark.parametrize("head_size", [64, 80, 128, 256])
@pytest.mark.parametrize("capability", SHARED_BYTES)
def test_the_merge_compiles_without_spills(head_size: int, capability: int, tmp_path: Path) -> None:
    code = compiled(tmp_path, capability, kernel="merge_units", dtype="bf16", head_size=head_size)
    assert code["stack"] == 0
    assert "v4.b32" in code["ld"]


def compiled(cache: Path, capability: int, **case: object) -> dict[str, Any]:
    """The output of `compile_triton`."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compile_triton", str(capability), json.dumps(case)],
        env={**environment, "TRITON_CACHE_DIR": str(cache), "TRITON_DEFAULT_FP_FUSION": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    code: dict[str, Any] = json.loads(done.stdout)
    assert code["machine_code"] > 1000
    return code
