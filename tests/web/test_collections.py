# SPDX-License-Identifier: Apache-2.0
"""The view "Collections" in a browser: from files to answers, and back to the place in the file."""

from pathlib import Path
from urllib.parse import unquote

import pytest
from playwright.sync_api import Page, Route, expect

from app.documents.readers import READERS
from measuring.quality.questions.demo_language import DEFAULT_SYSTEM
from tests.app.pdfs import make_pdf
from tests.support.ask_page import ANSWER, HOSTILE, drop
from tests.support.tier_servers import archived
from tests.web.conftest import EXAMPLE

QUESTION = EXAMPLE.questions[0]
FOLDER = {
    "codes/falcon.md": f"# Codes\n## Falcon\n{ANSWER}\n## Raven\nThe access code of Raven is 1134.",
    "mayors.txt": "The mayor of Lovik is Sena Maro.",
    "rooms.pdf": make_pdf(["The room number of Falcon is 105."], ["The room number of Raven is 230."]),
    "picture.png": b"not read",
    ".hidden/secret.txt": "not read",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, content in FOLDER.items():
        path = tmp_path / "papers" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return tmp_path / "papers"


@pytest.fixture
def collections(page: Page, server) -> Page:
    for each in server.get("/v1/rag/collections")["data"]:
        server.client.delete(f"/v1/rag/collections/{each['name']}")
    page.get_by_role("link", name="Collections").click()
    expect(page.locator("#collection-system")).to_have_value(EXAMPLE.system)
    return page


def file_of(name: str, content: str | bytes) -> dict:
    buffer = content if isinstance(content, bytes) else content.encode()
    return {"name": name, "mimeType": "application/octet-stream", "buffer": buffer}


def upload(page: Page, *names: str) -> None:
    page.locator("#upload-files").set_input_files([file_of(Path(name).name, FOLDER[name]) for name in names])
    expect(page.locator("#upload-status")).to_contain_text("Passages:")


def kept(page: Page) -> list[str]:
    return [text.split("\t")[0] for text in page.locator("#kept tbody tr").all_inner_texts()]


def ask(page: Page, question: str) -> dict:
    """The request's body; waits for the end of the response."""
    turns = page.locator("#turns li .facts").count()
    page.locator("#turn-question").fill(question)
    with page.expect_request("**/v1/rag/chat") as sent:
        page.keyboard.press("Enter")
    expect(page.locator("#turns li .facts")).to_have_count(turns + 1)
    return sent.value.post_data_json


def last(page: Page):
    return page.locator("#turns > li").last


def test_a_folder_becomes_a_collection_with_progress(collections, folder, server):
    collections.evaluate("""() => {
        window.seen = [];
        const status = document.getElementById("upload-status");
        const note = () => window.seen.push([document.getElementById("upload-progress").value, status.textContent]);
        new MutationObserver(note).observe(status, {childList: true, subtree: true});
    }""")
    collections.get_by_label("Name", exact=True).fill("papers")
    collections.locator("#collection-tokens").fill("16")
    collections.locator("#upload-folder").set_input_files(folder)
    expect(collections.locator("#upload-status")).to_have_text("Files: 3 added. Passages: 6 computed, 0 already there.")
    assert kept(collections) == ["codes/falcon.md", "mayors.txt", "rooms.pdf"]
    seen = [value for value, said in collections.evaluate("window.seen") if "of 3 files" in said]
    assert seen == sorted(seen)
    assert len(set(seen)) >= 5
    expect(collections.locator("#collection-about")).to_contain_text("3 files, 6 passages of at most 16 tokens")
    assert server.get("/v1/rag/collections")["data"][0]["system"] == DEFAULT_SYSTEM
    collections.locator("#upload-folder").set_input_files(folder)
    unchanged = "Files: 3 unchanged. Passages: 0 computed, 6 already there."
    expect(collections.locator("#upload-status")).to_have_text(unchanged)


def test_an_answer_opens_its_passage_and_follow_ups_reuse(collections):
    drop(collections, "#collection-card", "codes.md", FOLDER["codes/falcon.md"])
    expect(collections.locator("#upload-status")).to_contain_text("1 added")
    upload(collections, "rooms.pdf")
    sent = ask(collections, QUESTION)
    assert sent["retrieve"] == {"collection": "documents", "top_k": 8}
    assert "system" not in sent
    turn = last(collections)
    expect(turn.locator(".answer-text")).to_have_text(ANSWER)
    expect(turn.locator("h2")).to_have_text(QUESTION)
    expect(turn.locator(".badge.hit").first).to_be_visible()
    turn.get_by_role("button", name="codes.md · Codes › Falcon").click()
    dialog = collections.get_by_role("dialog", name="codes.md")
    expect(dialog.locator("li.wanted")).to_contain_text(ANSWER)
    expect(dialog.locator("li.wanted")).to_be_in_viewport()
    expect(dialog.locator("li.wanted")).to_be_focused()
    expect(dialog.locator("li")).to_have_count(2)
    dialog.get_by_role("button", name="Close").click()
    expect(turn.get_by_role("button", name="rooms.pdf · page 1")).to_be_visible()

    sent = ask(collections, "What is the access code of Raven?")
    turns = [("user", QUESTION), ("assistant", ANSWER), ("user", "What is the access code of Raven?")]
    assert [(each["role"], each["content"]) for each in sent["messages"]] == turns
    expect(last(collections).locator(".passages .badge:not(.hit)")).to_have_count(0)
    expect(collections.locator("#turn-status")).to_contain_text("tokens reused")
    collections.get_by_role("button", name="New conversation").click()
    expect(collections.locator("#turns > li")).to_have_count(0)
    assert len(ask(collections, QUESTION)["messages"]) == 1


def test_a_link_asks_the_same_questions_again(collections, server):
    upload(collections, "mayors.txt", "codes/falcon.md")
    ask(collections, QUESTION)
    ask(collections, "Who is the mayor of Lovik?")
    link = collections.get_by_role("link", name="Link to this conversation")
    assert unquote(link.get_attribute("href")).endswith("&q=Who+is+the+mayor+of+Lovik?")
    collections.reload()
    expect(collections.locator("#turns li .facts")).to_have_count(2)
    expect(collections.locator(".answer-text").first).to_have_text(ANSWER)
    expect(collections.locator("#turns h2")).to_have_text([QUESTION, "Who is the mayor of Lovik?"])
    expect(collections.locator("#turns .passages .badge:not(.hit)")).to_have_count(0)
    collections.goto(f"{server.url}/#collections?collection=none&q=Why")
    expect(collections.locator("#turn-problem")).to_have_text("There is no collection “none” here.")
    collections.get_by_role("link", name="Ask", exact=True).click()
    expect(collections.locator("#chunks-card")).to_be_visible()


def test_files_are_changed_and_removed(collections):
    upload(collections, "mayors.txt", "rooms.pdf")
    changed = file_of("mayors.txt", "The mayor of Lovik is Ada Brandt.")
    collections.locator("#upload-files").set_input_files([changed, file_of("rooms.pdf", FOLDER["rooms.pdf"])])
    expect(collections.locator("#upload-status")).to_contain_text("1 changed, 1 unchanged. Passages: 1 computed")
    ask(collections, "Who is the mayor of Lovik?")
    collections.get_by_role("button", name="Remove mayors.txt").click()
    expect(collections.locator("#upload-status")).to_have_text("Removed: mayors.txt.")
    assert kept(collections) == ["rooms.pdf"]
    last(collections).get_by_role("button", name="mayors.txt").click()
    expect(collections.locator("#passage-problem")).to_contain_text("has no file 'mayors.txt'")
    collections.get_by_role("button", name="Close").click()
    collections.get_by_role("button", name="Delete…").click()
    collections.get_by_role("button", name="Delete", exact=True).click()
    expect(collections.locator("#collection-name")).to_be_visible()
    expect(collections.locator("#kept")).to_have_text("No files yet.")


def test_errors_are_told_in_words(collections):
    problem = collections.locator("#upload-problem")
    collections.locator("#turn-question").fill(QUESTION)
    collections.get_by_role("button", name="Ask", exact=True).click()
    expect(collections.locator("#turn-problem")).to_contain_text("Choose a collection first")
    scan = make_pdf([])
    collections.locator("#upload-files").set_input_files(
        [file_of("scan.pdf", scan), file_of("a.docx", b"x"), file_of("mayors.txt", FOLDER["mayors.txt"])]
    )
    expect(collections.locator("#upload-status")).to_contain_text("1 added, 2 failed")
    expect(problem).to_contain_text("scan.pdf: ")
    expect(problem).to_contain_text("a.docx: this is not a docx file that can be read")
    assert kept(collections) == ["mayors.txt"]
    collections.get_by_role("button", name="Ask", exact=True).click()
    expect(collections.locator("#turns li .facts")).to_have_count(1)
    collections.locator("#collection").select_option("")
    collections.get_by_label("Name", exact=True).fill("no spaces")
    collections.locator("#upload-files").set_input_files([file_of("b.txt", "x")])
    assert collections.locator("#collection-name:invalid").count() == 1
    collections.route("**/v1/rag/chat", lambda route: route.abort())
    collections.locator("#collection").select_option("documents")
    ask_button = collections.get_by_role("button", name="Ask", exact=True)
    collections.locator("#turn-question").fill("Why?")
    ask_button.click()
    expect(collections.locator("#turn-problem")).to_have_text("The server can’t be reached.")


def test_an_upload_and_an_answer_can_be_stopped(collections):
    held: list[Route] = []
    collections.route("**/v1/rag/collections/documents?*", lambda route: held.append(route))
    collections.locator("#upload-files").set_input_files([file_of("a.txt", "x")])
    collections.locator("#upload-stop").click()
    expect(collections.locator("#upload-status")).to_contain_text("Stopped. Stored files are kept")
    collections.unroute("**/v1/rag/collections/documents?*")
    upload(collections, "mayors.txt")
    collections.route("**/v1/rag/chat", lambda route: held.append(route))
    collections.locator("#turn-question").fill(QUESTION)
    collections.get_by_role("button", name="Ask", exact=True).click()
    collections.locator("#turn-stop").click()
    expect(collections.locator("#turn-status")).to_have_text("Stopped.")
    expect(collections.locator("#turn-question")).to_be_focused()


def test_text_is_never_read_as_html(collections):
    collections.locator("#upload-files").set_input_files([file_of("<b>x<b>.md", f"# {HOSTILE}\n{HOSTILE}\n")])
    expect(collections.locator("#upload-status")).to_contain_text("1 added")
    expect(collections.locator("#kept td").first).to_have_text("<b>x<b>.md")
    ask(collections, HOSTILE)
    last(collections).locator(".passage").first.click()
    expect(collections.locator(".passage-text")).to_have_text(HOSTILE)
    assert collections.evaluate("window.hacked") is None
    assert collections.locator("img:not([src='web/icon.svg']), script:not([src]), main b").count() == 0


@pytest.mark.matrix
def test_a_restart_keeps_the_collection_and_computes_nothing(demo, browser, tmp_path):
    tiers = ("--chunk-cache-tiers", f"file://{tmp_path}/kv?size=1GiB")
    port = demo.process.port
    demo.process.stop()
    demo.start(*tiers, port=port)
    context = browser.new_context()
    context.set_default_timeout(30_000)
    page = context.new_page()
    page.goto(f"{demo.url}/#collections")
    expect(page.locator("#collection option")).not_to_have_count(0)
    page.locator("#collection").select_option("")
    page.get_by_label("Name", exact=True).fill("kept")
    upload(page, "codes/falcon.md", "mayors.txt")
    ask(page, QUESTION)
    archived(demo.process)
    demo.process.stop()
    expect(page.locator("#connection")).to_have_text("Server not reachable", timeout=30_000)
    demo.start(*tiers, port=port)
    expect(page.get_by_text("Connected")).to_be_visible(timeout=30_000)
    expect(page.locator("#collection")).to_have_value("kept")
    ask(page, QUESTION)
    expect(last(page).locator(".answer-text")).to_have_text(ANSWER)
    expect(last(page).locator(".passages .badge.filled")).to_have_count(0)
    fills = demo.process.get("/v1/cache/stats")["counters"]["fills"]
    assert fills.get("succeeded", 0) == 0
    page.locator("#upload-files").set_input_files([file_of("mayors.txt", FOLDER["mayors.txt"])])
    expect(page.locator("#upload-status")).to_contain_text("1 unchanged. Passages: 0 computed, 1 already there.")
    context.close()


def test_a_pool_that_is_too_small_is_told(collections):
    def displacing(route: Route) -> None:
        response = route.fetch()
        route.fulfill(response=response, body=response.text().replace('"displaced": 0', '"displaced": 7'))

    collections.route("**/v1/rag/collections/*", displacing)
    collections.get_by_label("Name", exact=True).fill("large")
    upload(collections, "mayors.txt")
    expect(collections.locator("#upload-status")).to_contain_text("The pool was too small: 7 chunks left it")


def test_the_page_takes_the_types_that_the_server_reads(page):
    types = page.evaluate("async () => (await import('/web/files.js')).TYPES")
    assert types == list(READERS)
    assert page.locator("#upload-files").get_attribute("accept") == ",".join(types)
