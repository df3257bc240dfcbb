# SPDX-License-Identifier: Apache-2.0
"""A real model answers from pasted text in a browser."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import expect, sync_playwright

from app.models.default_model import DEFAULT_MODEL_FLAGS
from tests.engine.server import TesseraServer
from tests.web.conftest import CHROMIUM

PASTED = """\
The Milton Bridge is 320 meters long and was opened in 1931. Crossing it costs 2 dollars.

Owen Reyes is a veterinarian in the village of Fenwick. He was born in Lisbon and has two daughters.

The Old Mill Museum shows farm tools from the nineteenth century. A ticket costs 6 euros."""


@pytest.fixture(scope="module")
def real_server(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TesseraServer]:
    log = tmp_path_factory.mktemp("real") / "server.log"
    server = TesseraServer(log, str(smollm2), *DEFAULT_MODEL_FLAGS, "--kv-cache-memory-bytes", "512M")
    yield server.wait_ready()
    server.stop()


@pytest.mark.engine
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed (scripts/test_servers.sh)")
def test_a_question_about_pasted_text_is_answered(real_server: TesseraServer) -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        page.goto(real_server.url)
        page.get_by_label("Text of your own").fill(PASTED)
        page.locator("#chunk-tokens").fill("40")
        page.get_by_role("button", name="Use this text").click()
        expect(page.locator("#chunks li")).to_have_count(3)
        page.get_by_label("Question").fill("What does a ticket to the Old Mill Museum cost?")
        for status in ("filled", "hit"):
            page.get_by_role("button", name="Ask", exact=True).click()
            expect(page.locator(f"#chunks .badge.{status}")).to_have_count(3, timeout=60_000)
            expect(page.locator(".answer-text")).to_contain_text("6 euros", timeout=60_000)
        browser.close()
