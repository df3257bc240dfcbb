# SPDX-License-Identifier: Apache-2.0
"""The machine."""

import platform
from pathlib import Path


def cpu_model() -> str:
    """The processor's name, as the system has it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
