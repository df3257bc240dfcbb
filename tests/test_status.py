# SPDX-License-Identifier: Apache-2.0
"""docs/status.md matches the tests of families and features; docs/operations.md those of faults."""

import ast
import re
from functools import cache
from pathlib import Path

from tests.families import FAMILIES

ROOT = Path(__file__).resolve().parents[1]
STATUS = (ROOT / "docs/status.md").read_text(encoding="utf-8")
OPERATIONS = (ROOT / "docs/operations.md").read_text(encoding="utf-8")
VERDICTS = ("exact", "refused", "unproven")
NODES = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)(?:\[.*?\])?`", STATUS + OPERATIONS)))


def table(heading: str, page: str = STATUS) -> list[list[str]]:
    """Cells by row of the first table below a heading."""
    section = page.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


@cache
def functions(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_tests_that_are_named_exist() -> None:
    assert [f"{path}::{name}" for path, name in NODES if name not in functions(path)] == []


def test_every_family_has_a_row_that_says_what_its_test_shows() -> None:
    rows = dict(table("Models"))
    for name, family in FAMILIES.items():
        assert rows[name].startswith("refused" if family.refused else "exact"), name
        assert ("custom_ops" in rows[name]) == bool(family.flags), name
    for name in rows.keys() - FAMILIES.keys():
        assert rows[name].startswith(VERDICTS), name
        assert re.search(r"`tests/[\w/]+\.py::\w+`", rows[name]), name


def test_every_feature_has_a_verdict_and_names_a_test() -> None:
    rows = table("Features")
    assert rows
    for name, verdict, test in rows:
        assert verdict.startswith(VERDICTS), name
        assert re.search(r"`tests/[\w/]+\.py::\w+`", test), name


def test_every_fault_names_a_test() -> None:
    rows = table("Faults", OPERATIONS)
    assert len(rows) > 10
    for fault, *_, last in rows:
        assert re.search(r"`tests/[\w/]+\.py::\w+`", last), fault
