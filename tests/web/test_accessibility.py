# SPDX-License-Identifier: Apache-2.0
"""axe-core finds no violation in any view and theme, including contrast."""

import pytest
from playwright.sync_api import Page, expect

from measuring.quality.questions.demo_language import DEFAULT_SYSTEM
from tests.support.accessibility import check
from tests.web.conftest import EXAMPLE


@pytest.fixture(params=["light", pytest.param("dark", marks=pytest.mark.matrix)])
def themed(request, page):
    """The page in a theme that its button sets, against the system's theme."""
    return in_theme(page, request.param)


OTHERS = {"dark": ("dark", 1280), "phone": ("light", 360)}


@pytest.fixture(
    params=[
        pytest.param(("light", 1280), id="light"),
        *(pytest.param(each, id=name, marks=pytest.mark.matrix) for name, each in OTHERS.items()),
    ]
)
def sized(request, page):
    theme, width = request.param
    page.set_viewport_size({"width": width, "height": 800})
    return in_theme(page, theme)


def in_theme(page: Page, theme: str) -> Page:
    page.emulate_media(color_scheme="dark" if theme == "light" else "light", reduced_motion="reduce")
    while page.locator("html").get_attribute("data-theme") != theme:
        page.get_by_role("button", name="Theme").click()
    return page


def test_ask(sized):
    check(sized)
    sized.get_by_role("button", name="Load example and ask").click()
    expect(sized.locator("#chunks .badge.hit")).to_have_count(len(EXAMPLE.documents))
    sized.get_by_text("Sampling and cache").click()
    sized.get_by_role("checkbox", name="Use chunk 2 of 12").uncheck()
    sized.get_by_role("button", name="Compare with full attention").click()
    expect(sized.locator("#comparison")).to_contain_text("The answers are equal.")
    for summary in sized.locator(".answer summary").all():
        summary.click()
    check(sized)
    sized.get_by_label("Question").fill("")
    sized.get_by_role("button", name="Ask", exact=True).click()
    expect(sized.locator("#ask-problem")).to_be_visible()
    check(sized)


def test_every_status_can_be_read(themed):
    themed.get_by_role("button", name="Load example and ask").click()
    expect(themed.locator("#chunks .badge.hit")).to_have_count(len(EXAMPLE.documents))
    themed.evaluate("""async () => {
        const { badge } = await import("/web/status.js");
        for (const status of ["filled", "waited", "fetched", "full", "failed"])
            document.querySelector("#ask-status").append(badge(status, status === "fetched" ? "b" : undefined));
    }""")
    shown = ["+ filled", "… waited", "⇄ fetched from b", "○ full", "! failed"]
    expect(themed.locator("#ask-status .badge")).to_have_text(shown)
    check(themed)


def test_collections(sized):
    sized.get_by_role("link", name="Collections").click()
    expect(sized.locator("#collection option")).not_to_have_count(0)
    check(sized)
    sized.locator("#collection").select_option("")
    width, content = sized.viewport_size["width"], f"{EXAMPLE.documents[0]}\n\n{EXAMPLE.documents[1]}"
    sized.get_by_label("Name", exact=True).fill(f"wide-{width}-{sized.locator('html').get_attribute('data-theme')}")
    file = {"name": "codes.txt", "mimeType": "text/plain", "buffer": content.encode()}
    scan = {"name": "a.docx", "mimeType": "text/plain", "buffer": b"x"}
    sized.locator("#upload-files").set_input_files([file, scan])
    expect(sized.locator("#upload-problem")).to_contain_text("a.docx")
    sized.locator("#turn-question").fill(EXAMPLE.questions[0])
    sized.get_by_role("button", name="Ask", exact=True).click()
    expect(sized.locator("#turns .facts")).to_be_visible()
    check(sized)
    sized.locator(".passage").first.click()
    expect(sized.locator("#passage-list li.wanted")).to_be_visible()
    check(sized)


def test_cache(sized, server):
    sized.get_by_role("link", name="Cache").click()
    expect(sized.locator("#list")).to_contain_text("The cache is empty.")
    check(sized)
    chunks = [{"id": f"d{i}", "text": text} for i, text in enumerate(EXAMPLE.documents)]
    server.ingest(chunks, system=DEFAULT_SYSTEM, pin=True, ttl_s=9999)
    expect(sized.locator("#list tbody tr")).to_have_count(len(EXAMPLE.documents) + 1)
    sized.get_by_role("button", name="Compute ahead").click()
    check(sized)
    sized.get_by_role("button", name="Clear cache…").click()
    expect(sized.get_by_role("dialog")).to_be_visible()
    check(sized)


def test_without_a_server_and_without_a_key(sized):
    sized.route("**/v1/**", lambda route: route.abort())
    expect(sized.locator("#trouble")).to_be_visible()
    check(sized)
    sized.unroute("**/v1/**")
    refusal = {"status": 401, "body": '{"error": "Unauthorized"}'}
    sized.route("**/v1/**", lambda route: route.fulfill(**refusal))
    expect(sized.get_by_role("dialog")).to_be_visible(timeout=30_000)  # after failures the page pauses up to 15 s
    check(sized)


def test_the_whole_page_goes_by_keyboard(page):
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to content")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("main")).to_be_focused()
    page.get_by_role("button", name="Load example", exact=True).focus()
    page.keyboard.press("Enter")
    expect(page.get_by_label("Question")).to_be_focused()
    page.keyboard.press("Control+Enter")
    expect(page.locator("#chunks .badge")).to_have_count(len(EXAMPLE.documents))
    page.get_by_role("button", name="Move chunk 1 of 12 down").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Move chunk 2 of 12 down")).to_be_focused()
    expect(page.locator("#ask-status")).to_have_text("Chunk moved to position 2 of 12.")
