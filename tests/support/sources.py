# SPDX-License-Identifier: Apache-2.0
"""The modules of the product."""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("app", "cache", "engine_ext", "kernels", "machine", "measuring", "replicas", "training", "web")
MODULES = {path.relative_to(ROOT).as_posix(): path for name in PACKAGES for path in sorted((ROOT / name).rglob("*.py"))}


@cache
def parse(name: str) -> ast.Module:
    return ast.parse(MODULES[name].read_text(encoding="utf-8"), name)
