# SPDX-License-Identifier: Apache-2.0
"""Advice for an off cache: for every reason, and in words for users."""

import ast
from collections.abc import Iterator

import pytest

pytest.importorskip("vllm")

from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import AsyncEngineArgs

from app.advice import ADVICE, OTHERWISE, advice_for, off_message, remedy_for
from app.models.demo_model import DEMO_MODEL
from engine_ext.start.support import unsupported_reason
from machine.server_process import ROOT


def constants() -> Iterator[str]:
    """All source text of the packages that give reasons."""
    for path in (*(ROOT / "engine_ext").rglob("*.py"), *ROOT.glob("kernels/*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


@pytest.mark.parametrize("words", ADVICE)
def test_advice_is_for_reasons_that_are_given(words):
    assert any(words in constant for constant in constants())


@pytest.mark.parametrize(
    "flag",
    [
        {"kv_transfer_config": KVTransferConfig(kv_connector="ExampleConnector", kv_role="kv_both")},
        {"kv_transfer_config": KVTransferConfig(kv_connector="Unheard", kv_role="kv_both")},
        {"kv_transfer_config": KVTransferConfig(kv_connector="MultiConnector", kv_role="kv_both")},
        {"kv_offloading_size": 1, "kv_offloading_backend": "lmcache"},
        {"kv_cache_dtype": "fp8_e5m2"},
        {"decode_context_parallel_size": 2},
        {"prefill_context_parallel_size": 2},
    ],
)
def test_every_flag_that_is_refused_has_advice(flag):
    args = AsyncEngineArgs(model=str(DEMO_MODEL))
    model = args.create_model_config()
    for name, value in flag.items():
        setattr(args, name, value)
    reason = unsupported_reason(args, model)
    assert reason is not None
    assert advice_for(reason)


@pytest.mark.parametrize(
    ("reason", "remedy"),
    [
        ("layer 3 uses ALiBi, which depends on absolute distances in the bias", OTHERWISE),
        ("self-check failed: ValueError: the prompt is longer than the maximum model length of 64", "--max-model-len"),
        ("RuntimeError: shapes differ:\n  [2] and [3]", "please report it"),
        ("the chunk pool's 9216 MiB are more than the 77 MiB that are free", "a smaller --chunk-cache-memory"),
    ],
)
def test_a_user_is_told_the_reason_and_what_helps(reason, remedy):
    assert remedy in remedy_for(reason)
    message = off_message(reason)
    assert message.startswith("CHUNK CACHE OFF: no chunk is reused, every request is computed in full")
    assert message.endswith(f"Reason: {' '.join(reason.split())}. What helps: {remedy_for(reason)}")
