# SPDX-License-Identifier: Apache-2.0
"""The view "Cache" in a browser."""

import pytest
from playwright.sync_api import Page, expect

from measuring.quality.questions.demo_language import DEFAULT_SYSTEM
from tests.support.ask_page import HOSTILE
from tests.web.conftest import EXAMPLE

NUM_PARAGRAPHS = 40


@pytest.fixture
def cache(page: Page) -> Page:
    page.get_by_role("link", name="Cache").click()
    expect(page.get_by_role("heading", name="Cache", exact=True)).to_be_visible()
    return page


def rows(page: Page):
    return page.locator("#list tbody tr")


def row(page: Page, text: str):
    return rows(page).filter(has_text=text)


def ingest(page: Page, name: str, content: str) -> None:
    file = {"name": name, "mimeType": "text/plain", "buffer": content.encode()}
    page.locator("#ingest-files").set_input_files([file])
    page.locator("#ingest-tokens").fill("16")
    page.get_by_role("button", name="Compute ahead").click()


def remember_values(page: Page) -> None:
    """Records the progress bar and its text."""
    page.evaluate("""() => {
        window.seen = [];
        const note = () => window.seen.push([
            document.getElementById("ingest-progress").value, document.getElementById("ingest-status").textContent]);
        new MutationObserver(note).observe(document.getElementById("ingest-status"), {childList: true, subtree: true});
    }""")


def test_files_are_computed_ahead_with_progress(cache, server):
    text = "\n\n".join(f"The room number of Falcon is {number}." for number in range(100, 100 + NUM_PARAGRAPHS))
    remember_values(cache)
    cache.get_by_label("Pin: never evict").check()
    cache.locator("#ingest-system").fill(DEFAULT_SYSTEM)
    ingest(cache, "rooms.txt", text)
    expect(cache.locator("#ingest-status")).to_contain_text("Done: 40 computed, 0 already cached, 0 failed")
    seen = [value for value, said in cache.evaluate("window.seen") if " of 40 chunks" in said]
    assert seen == sorted(seen)
    assert len({value for value in seen if 0 < value < 1}) > 5
    chunks = server.get("/v1/rag/chunks", kind="chunk", pinned="true")["data"]
    assert len(chunks) == NUM_PARAGRAPHS
    expect(cache.locator("#listed-count")).to_have_text(str(NUM_PARAGRAPHS + 1))
    expect(row(cache, "rooms.txt#1-")).to_contain_text("pinned")
    # Chunks computed here are hits there.
    answer = server.chat(
        system=DEFAULT_SYSTEM, chunks=[{"text": text.split("\n\n")[3]}], question=EXAMPLE.questions[4], max_tokens=1
    )
    assert answer["cache"]["chunks"][0]["status"] == "hit"


def test_errors_of_files_are_told(cache):
    cache.get_by_role("button", name="Compute ahead").click()
    expect(cache.locator("#ingest-problem")).to_have_text("Choose files first.")
    ingest(cache, "blank.txt", " \n")
    expect(cache.locator("#ingest-problem")).to_contain_text("blank.txt: there is no text in the file")


@pytest.fixture
def filled(server, cache: Page) -> Page:
    chunks = [{"id": f"d{i}", "text": text} for i, text in enumerate(EXAMPLE.documents)]
    server.ingest(chunks, system=DEFAULT_SYSTEM)
    expect(cache.locator("#list .id")).to_have_count(len(EXAMPLE.documents) + 1)
    return cache


def test_chunks_are_searched_and_sorted(filled, server):
    filled.get_by_label("Search").fill("D1")
    expect(rows(filled)).to_have_count(3)  # d1, d10, d11
    expect(filled.locator("#listed-count")).to_have_text("3 of 13")
    (chunk,) = server.get("/v1/rag/chunks", id="d7")["data"]
    filled.get_by_label("Search").fill(chunk["key"][:12])
    expect(rows(filled)).to_have_count(1)
    filled.get_by_label("Search").fill("no such chunk")
    expect(filled.locator("#list")).to_contain_text("Nothing matches the search.")
    filled.get_by_label("Search").fill("")
    for direction in ("descending", "ascending"):
        header = filled.get_by_role("columnheader", name="Tokens")
        header.get_by_role("button").click()
        expect(header).to_have_attribute("aria-sort", direction)
        expect(header.get_by_role("button")).to_be_focused()
        tokens = [int(text) for text in filled.locator("#list tbody td:nth-child(3)").all_inner_texts()]
        assert tokens == sorted(tokens, reverse=direction == "descending")


def test_pinning_and_deleting(filled, server):
    def shown(name):
        return [chunk["pinned"] for chunk in server.get("/v1/rag/chunks", id=name)["data"]]

    filled.get_by_role("button", name="Pin d3", exact=True).click()
    expect(filled.locator("#list-status")).to_have_text("Pinned: d3.")
    expect(filled.get_by_role("button", name="Unpin d3", exact=True)).to_be_focused()
    assert shown("d3") == [True]
    filled.get_by_role("button", name="Unpin d3", exact=True).click()
    expect(filled.locator("#list-status")).to_have_text("Unpinned: d3.")
    assert shown("d3") == [False]
    filled.get_by_role("button", name="Delete d3", exact=True).click()
    expect(filled.locator("#list-status")).to_have_text("Deleted: d3.")
    expect(rows(filled)).to_have_count(len(EXAMPLE.documents))
    assert shown("d3") == []


def test_what_was_deleted_meanwhile_is_told(filled, server):
    (chunk,) = server.get("/v1/rag/chunks", id="d5")["data"]
    filled.route("**/v1/cache/stats*", lambda route: route.abort())  # keeps the list unchanged
    server.client.delete(f"/v1/rag/chunks/{chunk['key']}")
    filled.get_by_role("button", name="Delete d5", exact=True).click()
    expect(filled.locator("#list-problem")).to_contain_text("no cached segment has the key")
    filled.unroute("**/v1/cache/stats*")


def test_clearing_asks_first(filled, server):
    filled.get_by_role("button", name="Clear cache…").click()
    filled.get_by_role("dialog").get_by_role("button", name="Keep").click()
    assert server.stats()["occupancy"]["segments"] == len(EXAMPLE.documents) + 1
    filled.get_by_role("button", name="Clear cache…").click()
    filled.get_by_label("Only this namespace").fill("another")
    filled.get_by_role("button", name="Clear", exact=True).click()
    expect(filled.locator("#list-status")).to_have_text("Cleared: 0 segments.")
    filled.get_by_role("button", name="Clear cache…").click()
    filled.get_by_role("button", name="Clear", exact=True).click()
    expect(filled.locator("#list-status")).to_have_text("Cleared: 13 segments.")
    expect(filled.locator("#list")).to_contain_text("The cache is empty.")
    assert server.stats()["occupancy"]["segments"] == 0


def test_tiles_and_plots_show_the_state_with_units(filled, server):
    server.chat(system=DEFAULT_SYSTEM, chunks=[{"id": "d0"}, "new"], question="Why?", max_tokens=1)
    tile = filled.locator(".tile")
    expect(tile.filter(has_text="Segments").locator(".big")).to_have_text("14")
    expect(tile.filter(has_text="Memory, pool")).to_contain_text("of 64.0 MiB")
    expect(tile.filter(has_text="Hit rate").locator(".big")).to_contain_text("%")
    expect(tile.filter(has_text="Refused loads").locator(".big")).to_have_text("0")
    expect(filled.locator(".plot")).to_have_count(6)
    memory = filled.get_by_role("img", name="Memory")
    assert "MiB" in memory.get_attribute("aria-label")
    assert "L" in memory.locator("path").first.get_attribute("d")
    marks = filled.locator(".plot .mark").all_text_contents()
    assert {"100 %", "0 MiB", "0/s", "now"} <= set(marks)


def test_hostile_ids_stay_text(cache, server):
    server.ingest([{"id": HOSTILE, "text": HOSTILE}], cache={"namespace": HOSTILE})
    expect(row(cache, HOSTILE).first).to_be_visible()
    cache.get_by_role("button", name=f"Delete {HOSTILE}").click()
    expect(cache.locator("#list-status")).to_contain_text(HOSTILE)
    assert cache.evaluate("window.hacked") is None
    assert cache.locator("#list img").count() == 0
