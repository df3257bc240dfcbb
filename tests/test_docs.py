# SPDX-License-Identifier: Apache-2.0
"""Files and links in the documentation exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
_PLACES = ("*.md", "docs/**/*.md", "models/**/*.md", "research/*.md")
PAGES = sorted(page for pattern in _PLACES for page in ROOT.glob(pattern))
PATH = re.compile(
    r"`((?:app|cache|docs|engine_ext|kernels|machine|measuring|replicas|research|scripts|tests|training|web)/[\w/.-]+\.\w+)"
)
LINK = re.compile(r"\]\((?!https?://)([^)#\s]*)(?:#([\w-]*))?\)")


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
