#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Find out whether Tessera's kernels and chunk cache are right, and fast, on this machine's Ascend NPU.

A line for each check says PASS, FAIL or SKIPPED, and what was measured or why. Everything takes some minutes, most of
them for compiling kernels the first time. Run it with the project's Python: .venv/bin/python scripts/check_npu.py
"""

import sys

import torch

from kernels.npu_copier import ReshapeAndCache
from measuring.device.command import Defaults, main

# Engines keep no float32 KV on NPUs.
DEFAULTS = Defaults("npu", dtypes=(torch.float16, torch.bfloat16), model="bench-100m", description=__doc__ or "")


def load_writer() -> ReshapeAndCache:
    """vLLM-Ascend's. Imported when a check asks for it: the import takes a while, and may fail."""
    from engine_ext.core.ascend import reshape_and_cache

    return reshape_and_cache()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], DEFAULTS, load_writer))
