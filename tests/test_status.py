# SPDX-License-Identifier: Apache-2.0
"""docs/status.md matches the tests of families and features; docs/operations.md those of faults."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.families import FAMILIES

ROOT = Path(__file__).resolve().parents[1]
STATUS = (ROOT / "docs/status.md").read_text(encoding="utf-8")
OPERATIONS = (ROOT / "docs/operations.md").read_text(encoding="utf-8")
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


@pytest.mark.parametrize(("path", "name"), NODES)
def test_tests_that_are_named_exist(path: str, name: str) -> None:
    assert name in functions(path)


def test_every_family_has_a_row_that_says_what_its_test_shows() -> None:
    rows = {row[0]: row for row in table("Models")}
    for name, family in FAMILIES.items():
        verdict, gpu, npu, test = rows[name][1:]
        assert verdict.startswith("refused" if family.refused else "exact"), name
        assert ("custom_ops" in verdict) == bool(family.flags), name
        assert (gpu, npu) == ("unproven", "unproven"), name
        assert test == f"`tests/engine/test_families.py::test_exact_or_refused[{name}]`"


@pytest.mark.parametrize("heading", ["Models", "Features"])
def test_every_row_has_a_verdict_for_each_device_and_names_a_test(heading: str) -> None:
    rows = table(heading)
    assert rows
    for name, *verdicts, test in rows:
        assert len(verdicts) == 3, name
        assert all(verdict.startswith(("exact", "refused", "unproven")) for verdict in verdicts), name
        assert re.search(r"`tests/[\w/]+\.py::\w+", test), name


def test_every_fault_names_a_test() -> None:
    rows = table("Faults", OPERATIONS)
    assert len(rows) > 10
    for fault, *_, last in rows:
        assert re.search(r"`tests/[\w/]+\.py::\w+`", last), fault
