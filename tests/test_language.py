# SPDX-License-Identifier: Apache-2.0
"""The voice of docstrings: short summaries, no clauses with "what" for nouns."""

import ast
import re

import pytest

from tests.test_architecture import MODULES

MOST_WORDS = 15
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def summaries(source: str) -> list[str]:
    """The first sentence of each docstring."""
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, _DOCUMENTED)]
    texts = [" ".join(text.split("\n\n")[0].split()) for node in nodes if (text := ast.get_docstring(node))]
    return [re.split(r"(?<=[.;:]) ", text)[0] for text in texts]


@pytest.mark.parametrize("name", MODULES)
def test_summaries_are_short_and_name_things(name):
    wrong = [
        summary
        for summary in summaries(MODULES[name].read_text(encoding="utf-8"))
        if len(summary.split()) > MOST_WORDS or summary.startswith(("What ", "Whatever "))
    ]
    assert wrong == []


def test_a_long_summary_would_be_noticed():
    assert summaries('"""One: two.\n\nThree."""\ndef f():\n    """Four five.\n    Six."""\n') == ["One:", "Four five."]
