# SPDX-License-Identifier: Apache-2.0
"""Requests of a browser that opens the page."""

from playwright.sync_api import expect


def test_the_first_load_is_small_and_comes_from_this_server_alone(page, server):
    page.get_by_role("link", name="Cache").click()
    expect(page.locator(".plot").first).to_be_visible()
    requests = page.watched.requests
    assert all(request.url.startswith(server.url) for request in requests)
    files = [request for request in requests if "/v1/" not in request.url]
    sizes = [request.sizes() for request in files]
    sent = sum(size["responseHeadersSize"] + size["responseBodySize"] for size in sizes)
    assert len(files) > 10
    assert 20_000 < sent < 300_000


def test_the_policy_stops_inline_script(page):
    page.evaluate("""() => {
        const script = document.createElement("script");
        script.textContent = "window.hacked = 1";
        document.body.append(script);
    }""")
    assert page.evaluate("window.hacked") is None
    (refused,) = [error for error in page.watched.errors if "Content Security Policy" in error]
    page.watched.errors.remove(refused)
