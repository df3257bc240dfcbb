# SPDX-License-Identifier: Apache-2.0
"""The Triton kernel compiles to NVIDIA machine code with the widest loads and stores, without a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

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
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compile_triton", str(capability), json.dumps(CASES[case])],
        env={**environment, "TRITON_CACHE_DIR": str(tmp_path), "TRITON_DEFAULT_FP_FUSION": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    code = json.loads(done.stdout)
    assert code["machine_code"] > 1000
    # 16 bytes at once (8 for a few pairs).
    assert "v4.b32" in code["ld"]
    assert {"v4.b32"} <= set(code["st"]) <= {"v4.b32", "v2.b32"}
