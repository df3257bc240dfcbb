# SPDX-License-Identifier: Apache-2.0
"""The voice of docstrings: no clauses with "what" for nouns."""

import ast

from tests.support.sources import MODULES, parse

_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def docstrings(tree: ast.Module) -> list[str]:
    nodes = [node for node in ast.walk(tree) if isinstance(node, _DOCUMENTED)]
    return [text for node in nodes if (text := ast.get_docstring(node))]


def test_summaries_name_things():
    texts = [(name, text) for name in MODULES for text in docstrings(parse(name))]
    assert [(name, text) for name, text in texts if text.startswith(("What ", "Whatever "))] == []
