#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Check Tessera's kernels and chunk cache on this machine's NVIDIA GPU: correct, and fast.

Each check prints a line: PASS, FAIL or SKIPPED, with the measurement or the reason. The first run takes some minutes,
mostly to compile kernels. Run it with the project's Python: .venv/bin/python research/check_gpu.py
"""

import sys

import torch

from research.device.command import Defaults, main

DEFAULTS = Defaults(
    "cuda", dtypes=(torch.float32, torch.float16, torch.bfloat16), model="bench-100m", description=__doc__ or ""
)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], DEFAULTS))
