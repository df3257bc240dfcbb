#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Check Tessera's kernels and chunk cache on this machine's Ascend NPU: correct, and fast.

Each check prints a line: PASS, FAIL or SKIPPED, with the measurement or the reason. The first run takes some minutes,
mostly to compile kernels. Run it with the project's Python: .venv/bin/python research/check_npu.py
"""

import sys

import torch

from kernels.npu_copier import ReshapeAndCache
from research.device.command import Defaults, main

# Engines keep no float32 KV on NPUs.
DEFAULTS = Defaults("npu", dtypes=(torch.float16, torch.bfloat16), model="bench-100m", description=__doc__ or "")


def load_writer() -> ReshapeAndCache:
    """vLLM-Ascend's writer, imported on demand: the import is slow and may fail."""
    from engine_ext.core.ascend import reshape_and_cache

    return reshape_and_cache()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], DEFAULTS, load_writer))
