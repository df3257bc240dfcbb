# SPDX-License-Identifier: Apache-2.0
"""Compiles the Triton kernel for an NVIDIA GPU that may be absent; run by `test_triton_compiles.py`.

    python -m tests.kernels.compile_triton 90 '{"dtype": "bf16", "head_size": 128, "pairs": 64, "is_neox": true}'

Prints the widths of the compiled loads and stores and the bytes of machine code, as JSON.
"""

import json
import re
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.triton_kernel import move_tokens

_NAMES: list[str] = move_tokens.arg_names
_ALIGNED_SCALARS = {f"{end}_{stride}" for end in ("source", "target") for stride in ("block", "token", "head")}


def constants(head_size: int, pairs: int, is_neox: bool) -> dict[str, Any]:
    """`TritonCopier`'s values for pages of 32 tokens, blocks of 16, and heads with adjacent elements."""
    width = triton.next_power_of_2(head_size)
    fixed = {
        "source_dim": 1,
        "target_dim": 1,
        "SOURCE_SIZE": 32,
        "TARGET_SIZE": 16,
        "ALIGNED": 16,
        "HEAD_SIZE": head_size,
        "WIDTH": width,
        "TILE": 4096 // width,
        "PAIRS": pairs,
        "PAIRS_WIDTH": triton.next_power_of_2(max(pairs, 1)),
        "IS_NEOX": is_neox,
    }
    return fixed if pairs else fixed | dict.fromkeys(("turns", "cos", "sin", "tables"))


def type_of(name: str, dtype: str) -> str:
    """The argument's type; pointers begin with ``*``."""
    if name in ("source", "target"):
        return f"*{dtype}"
    if name in ("cos", "sin"):
        return "*fp32"
    is_table = name.endswith("_layers") or name in ("source_tokens", "target_tokens", "turns", "tables")
    return "*i64" if is_table else "i32"


def compiled(capability: int, dtype: str, head_size: int, pairs: int, is_neox: bool) -> Any:
    fixed = constants(head_size, pairs, is_neox)
    signature = {name: "constexpr" if name in fixed else type_of(name, dtype) for name in _NAMES}
    aligned = [n for n in _NAMES if signature[n].startswith("*") or (n in _ALIGNED_SCALARS and n not in fixed)]
    attributes = {(_NAMES.index(name),): [["tt.divisibility", 16]] for name in aligned}
    values = {(_NAMES.index(name),): value for name, value in fixed.items()}
    return triton.compile(ASTSource(move_tokens, signature, values, attributes), GPUTarget("cuda", capability, 32))


def main() -> None:
    kernel = compiled(int(sys.argv[1]), **json.loads(sys.argv[2]))
    ptx = kernel.asm["ptx"]
    widths = {verb: sorted(set(re.findall(rf"\b{verb}\.global\.(\S+)", ptx))) for verb in ("ld", "st")}
    print(json.dumps({**widths, "machine_code": len(kernel.asm["cubin"])}))


if __name__ == "__main__":
    main()
