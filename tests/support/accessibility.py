# SPDX-License-Identifier: Apache-2.0
"""Checks of pages by axe-core."""

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page

RULES = {"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]}


def check(page: Page) -> None:
    """Fails on violations of any impact, and if contrast was not measured."""
    found = Axe().run(page, options=RULES).response
    told = [(rule["id"], rule["impact"], [node["html"] for node in rule["nodes"]]) for rule in found["violations"]]
    assert told == []
    assert "color-contrast" in {rule["id"] for rule in found["passes"]}
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
