# SPDX-License-Identifier: Apache-2.0
"""Files and links in the documentation exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "models" / "demo" / "README.md"])
PATH = re.compile(
    r"`((?:app|cache|docs|engine_ext|kernels|measuring|replicas|scripts|tests|tools|training|web)/[\w/.-]+\.\w+)"
)
LINK = re.compile(r"\]\((?!https?://)([^)#\s]*)(?:#([\w-]*))?\)")


def anchors(page: Path) -> set[str]:
    """Anchors that GitHub generates from the page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    words = (re.sub(r"[^\w\- ]", "", re.sub(r"\[(.*?)\]\(.*?\)", r"\1", heading)) for heading in headings)
    return {each.strip().lower().replace(" ", "-") for each in words}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_files_that_are_named_exist(page: Path) -> None:
    named = PATH.findall(page.read_text(encoding="utf-8"))
    assert [name for name in named if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    dead = []
    for target, anchor in LINK.findall(page.read_text(encoding="utf-8")):
        there = page if not target else (page.parent / target).resolve()
        if not there.exists() or (anchor and there.suffix == ".md" and anchor not in anchors(there)):
            dead.append(f"{target}#{anchor}")
    assert dead == []


def test_the_readme_is_of_one_page() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 900
