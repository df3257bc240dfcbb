# SPDX-License-Identifier: Apache-2.0
"""The server stops and restarts with an API key while the page is open."""

import pytest
from playwright.sync_api import expect

KEY = "a key of these tests"


@pytest.mark.matrix
def test_a_server_that_stops_and_comes_back_with_a_key(demo, browser):
    context = browser.new_context()
    context.set_default_timeout(30_000)
    page = context.new_page()
    page.goto(demo.url)
    page.get_by_role("button", name="Load example", exact=True).click()
    page.get_by_label("Question").fill("What is the access code of Falcon?")

    port = demo.process.port
    demo.process.stop()
    expect(page.locator("#connection")).to_have_text("Server not reachable", timeout=30_000)
    expect(page.locator("#trouble")).to_contain_text("Server not reachable. Retrying every")
    page.get_by_role("button", name="Ask", exact=True).click()
    expect(page.locator("#ask-problem")).to_have_text("The server can’t be reached.")

    demo.start("--api-key", KEY, port=port)
    dialog = page.get_by_role("dialog")
    expect(dialog).to_be_visible(timeout=30_000)
    page.locator("#key").fill("wrong")
    page.get_by_role("button", name="Use it").click()
    expect(dialog).to_contain_text("The server rejected the API key.")
    page.locator("#key").fill(KEY)
    page.get_by_role("button", name="Use it").click()
    expect(page.get_by_text("Connected")).to_be_visible()
    expect(page.locator("#trouble")).to_be_hidden()
    page.get_by_role("button", name="Ask", exact=True).click()
    expect(page.locator(".answer-text")).to_have_text("The access code of Falcon is 7342.")
    assert page.evaluate("Object.values(localStorage)").count(KEY) == 0
    context.close()
