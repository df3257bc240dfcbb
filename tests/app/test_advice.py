# SPDX-License-Identifier: Apache-2.0
"""Advice for an off cache: for every reason, and in words for users."""

import ast
from collections.abc import Iterator

import pytest

from app.advice import ADVICE, OTHERWISE, off_message, remedy_for
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
    ("reason", "remedy"),
    [
        ("layer 3 uses ALiBi, which depends on absolute distances in the bias", OTHERWISE),
        ("self-check failed: ValueError: the prompt is longer than the maximum model length of 64", "--max-model-len"),
        ("RuntimeError: shapes differ:\n  [2] and [3]", "please report it"),
        ("ValueError: To serve one request of max seq len 8192, take more.", "--max-model-len"),
        ("the chunk pool's 9216 MiB are more than the 77 MiB that are free", "a smaller --chunk-cache-memory"),
    ],
)
def test_a_user_is_told_the_reason_and_what_helps(reason, remedy):
    assert remedy in remedy_for(reason)
    message = off_message(reason)
    assert message.startswith("CHUNK CACHE OFF: no chunk is reused, every request is computed in full")
    assert message.endswith(f"Reason: {' '.join(reason.split())}. What helps: {remedy_for(reason)}")
