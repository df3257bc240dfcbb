# SPDX-License-Identifier: Apache-2.0
"""Compiles Triton kernels for an NVIDIA GPU that may be absent; run by `test_triton_compiles.py`.

    python -m tests.kernels.compile_triton 90 '{"kernel": "move_tokens", "dtype": "bf16", "head_size": 128, ...}'

Prints the widths in bits or bytes of the compiled loads and stores, and what the machine code takes, as JSON.
"""

import json
import re
import subprocess
import sys
import tempfile
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.attention.plan import PLACE_BITS
from kernels.attention.triton_attention import MERGED_ENTRIES, PRECISION, tiles_of
from kernels.attention.triton_kernel import attend_units, merge_units
from kernels.triton_kernel import move_tokens

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_FLOAT32 = ("cos", "sin", "parts", "sums")
_INT64 = (
    *("source_layers", "target_layers", "source_tokens", "target_tokens", "turns", "tables"),
    *("strides", "places", "units", "entries", "tokens", "order", "bounds"),
)
_DATA = ("source", "target", "query", "keys", "values", "output")
_ALIGNED_SCALARS = (
    *(f"{end}_{stride}" for end in ("source", "target") for stride in ("block", "token", "head")),
    *(f"{name}_{stride}" for name in ("query", "output") for stride in ("token", "head")),
)


def of_copies(head_size: int, pairs: int, is_neox: bool) -> tuple[Any, dict[str, Any], dict[str, int]]:
    """`TritonCopier`'s values for pages of 32 tokens, blocks of 16, and heads with adjacent elements."""
    width = triton.next_power_of_2(head_size)
    fixed = {"source_dim": 1, "target_dim": 1, "SOURCE_SIZE": 32, "TARGET_SIZE": 16, "ALIGNED": 16, "IS_NEOX": is_neox}
    fixed |= {"HEAD_SIZE": head_size, "WIDTH": width, "TILE": 4096 // width}
    fixed |= {"PAIRS": pairs, "PAIRS_WIDTH": triton.next_power_of_2(max(pairs, 1))}
    if not pairs:
        fixed |= dict.fromkeys(("turns", "cos", "sin", "tables"))
    return move_tokens, fixed, {}


def of_attention(
    dtype: str, head_size: int, tiles: int, group: int, is_neox: bool
) -> tuple[Any, dict[str, Any], dict[str, int]]:
    """`TritonAttention`'s values, with so many-th tiles."""
    rows, keys, warps, stages = tiles_of(DTYPES[dtype], head_size)[tiles]
    fixed = {"HEAD_SIZE": head_size, "WIDTH": triton.next_power_of_2(head_size), "PAIRS": head_size // 2}
    fixed |= {"IS_NEOX": is_neox, "GROUP": group, "ROWS": rows, "KEYS": keys, "PLACE_BITS": PLACE_BITS}
    fixed |= {"ALIGNED": 16, "ADJACENT": True, "PRECISION": PRECISION}
    return attend_units, fixed, {"num_warps": warps, "num_stages": stages}


def of_merge(head_size: int) -> tuple[Any, dict[str, Any], dict[str, int]]:
    """`TritonAttention`'s values for what the units have."""
    width = triton.next_power_of_2(head_size)
    return merge_units, {"HEAD_SIZE": head_size, "WIDTH": width, "ENTRIES": MERGED_ENTRIES}, {}


def type_of(name: str, dtype: str) -> str:
    """The argument's type; pointers begin with ``*``."""
    if name in _DATA:
        return f"*{dtype}"
    if name in _FLOAT32:
        return "*fp32"
    if name == "scale":
        return "fp32"
    return "*i64" if name in _INT64 else "i32"


def compiled(capability: int, kernel: str, dtype: str, **sizes: Any) -> Any:
    match kernel:
        case "move_tokens":
            function, fixed, options = of_copies(**sizes)
        case "attend_units":
            function, fixed, options = of_attention(dtype, **sizes)
        case _:
            function, fixed, options = of_merge(**sizes)
    names: list[str] = function.arg_names
    unaligned = getattr(function, "do_not_specialize_on_alignment", None) or ()
    signature = {name: "constexpr" if name in fixed else type_of(name, dtype) for name in names}
    pointers = {n for n in names if signature[n].startswith("*")} - set(unaligned)
    aligned = pointers | {n for n in names if n in _ALIGNED_SCALARS and n not in fixed}
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    values = {(names.index(name),): value for name, value in fixed.items()}
    source = ASTSource(function, signature, values, attributes)
    return triton.compile(source, GPUTarget("cuda", capability, 32), options=options)


def resources(cubin: bytes) -> dict[str, int]:
    """Registers of a thread, and bytes of its stack, where registers are spilled."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", done.stdout).groups()
    return {"registers": int(registers), "stack": int(stack)}


def main() -> None:
    kernel = compiled(int(sys.argv[1]), **json.loads(sys.argv[2]))
    ptx, cubin = kernel.asm["ptx"], kernel.asm["cubin"]
    code = {verb: sorted(set(re.findall(rf"\b{verb}\.global\.(\S+)", ptx))) for verb in ("ld", "st")}
    code["copied"] = sorted(set(re.findall(r"cp\.async\.c\w\S+ \[.*?\], \[.*?\], (\w+),", ptx)))
    code["products"] = sorted(set(re.findall(r"wgmma|tcgen05\.mma|mma\.sync|fma\.rn\.f32", ptx)))
    numbers = {"machine_code": len(cubin), "shared": kernel.metadata.shared, **resources(cubin)}
    print(json.dumps(code | numbers))


if __name__ == "__main__":
    main()
