# SPDX-License-Identifier: Apache-2.0
"""The documentation names what exists: files, links, and tests that show what it says of families, features, faults."""

import ast
import re
from functools import cache
from pathlib import Path

from tests.families import FAMILIES

ROOT = Path(__file__).parents[1]
_PLACES = ("*.md", "docs/**/*.md", "models/**/*.md", "research/*.md")
PAGES = sorted(page for pattern in _PLACES for page in ROOT.glob(pattern))
PATH = re.compile(
    r"`((?:app|cache|docs|engine_ext|kernels|machine|measuring|replicas|research|scripts|tests|training|web)/[\w/.-]+\.\w+)"
)
LINK = re.compile(r"\]\((?!https?://)([^)#\s]*)(?:#([\w-]*))?\)")
STATUS = (ROOT / "docs/status.md").read_text(encoding="utf-8")
OPERATIONS = (ROOT / "docs/operations.md").read_text(encoding="utf-8")
VERDICTS = ("exact", "refused", "unproven")
NODES = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)(?:\[.*?\])?`", STATUS + OPERATIONS)))


def anchors(page: Path) -> set[str]:
    """Anchors that GitHub generates from the page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    words = (re.sub(r"[^\w\- ]", "", re.sub(r"\[(.*?)\]\(.*?\)", r"\1", heading)) for heading in headings)
    return {each.strip().lower().replace(" ", "-") for each in words}


def test_files_that_are_named_exist() -> None:
    named = [(page.name, name) for page in PAGES for name in PATH.findall(page.read_text(encoding="utf-8"))]
    assert [(page, name) for page, name in named if not (ROOT / name).exists()] == []


def test_each_program_of_research_is_described() -> None:
    described = (ROOT / "research" / "README.md").read_text(encoding="utf-8")
    programs = [path.name for path in (ROOT / "research").iterdir() if path.suffix in (".py", ".sh", ".json")]
    packages = [f"{path.parent.name}/" for path in (ROOT / "research").glob("*/__init__.py")]
    assert [name for name in [*programs, *packages] if name not in described and name != "__init__.py"] == []


def test_links_lead_somewhere() -> None:
    dead = []
    for page in PAGES:
        for target, anchor in LINK.findall(page.read_text(encoding="utf-8")):
            there = page if not target else (page.parent / target).resolve()
            if not there.exists() or (anchor and there.suffix == ".md" and anchor not in anchors(there)):
                dead.append(f"{page.name}: {target}#{anchor}")
    assert dead == []


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
