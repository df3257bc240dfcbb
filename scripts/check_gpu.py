#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Find out whether Tessera's kernels and chunk cache are right, and fast, on this machine's NVIDIA GPU.

A line for each check says PASS, FAIL or SKIPPED, and what was measured or why. Everything takes some minutes, most of
them for compiling kernels the first time. Run it with the project's Python: .venv/bin/python scripts/check_gpu.py
"""

import sys

import torch

from measuring.device.command import Defaults, main

DEFAULTS = Defaults(
    "cuda", dtypes=(torch.float32, torch.float16, torch.bfloat16), model="bench-100m", description=__doc__ or ""
)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], DEFAULTS))
