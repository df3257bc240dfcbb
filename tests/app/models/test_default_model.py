# SPDX-License-Identifier: Apache-2.0
"""The dtype of the default model and of measurements: by the processor, unless a flag says otherwise."""

import pytest

pytest.importorskip("vllm")

from app import arguments
from app.models.default_model import DEFAULT_DTYPE, DEFAULT_MODEL_FLAGS, cpu_dtype
from measuring.quality.arguments import parse as parse_eval
from measuring.speed.arguments import parse as parse_bench


def test_bfloat16_where_the_cpu_has_instructions_for_it() -> None:
    sapphire_rapids, zen_4 = "avx2 avx512f avx512_bf16 amx_tile amx_bf16", "avx2 avx512f avx512_bf16"
    cascade_lake, zen_3 = "avx2 avx512f avx512_vnni", "avx2 f16c"
    assert [cpu_dtype(frozenset(flags.split())) for flags in (sapphire_rapids, zen_4)] == ["bfloat16"] * 2
    assert [cpu_dtype(frozenset(flags.split())) for flags in (cascade_lake, zen_3, "")] == ["float32"] * 3


@pytest.mark.parametrize(
    ("given", "dtype", "is_eager"),
    [
        ([], DEFAULT_DTYPE, True),
        (["--dtype", "float16"], "float16", True),
        (["--dtype", "auto", "--no-enforce-eager"], "auto", False),
        (["some/model"], "auto", False),
    ],
)
def test_without_a_model_serve_has_the_default_models_flags(given: list[str], dtype: str, is_eager: bool) -> None:
    args = arguments.parse(given)
    assert (args.dtype, bool(args.enforce_eager)) == (dtype, is_eager)
    explicit = arguments.parse(["some/model", *DEFAULT_MODEL_FLAGS])
    assert (explicit.dtype, explicit.enforce_eager) == (DEFAULT_DTYPE, True)


@pytest.mark.parametrize(
    ("given", "dtype"),
    [([], DEFAULT_DTYPE), (["--dtype", "float16"], "float16"), (["--dtype=bfloat16"], "bfloat16")],
)
def test_an_explicit_dtype_wins_in_measurements(given: list[str], dtype: str) -> None:
    for flags in (parse_bench(given).flags, parse_eval(["some/model", "--", *given]).server_arguments):
        assert arguments.parse(["some/model", *flags]).dtype == dtype
    assert parse_eval(["--server", "http://127.0.0.1:8000"]).server_arguments == ()  # it runs already
