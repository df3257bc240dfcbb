# SPDX-License-Identifier: Apache-2.0
"""The view "Ask" in a browser."""

import json

import pytest
from playwright.sync_api import Page, Route, expect

from tests.app.pdfs import make_pdf
from tests.support.ask_page import ANSWER, HOSTILE, drop
from tests.web.conftest import EXAMPLE


def texts(page: Page) -> list[str]:
    return page.locator("#chunks textarea").evaluate_all("areas => areas.map(area => area.value)")


def badges(page: Page) -> list[str]:
    return [text.split()[-1] for text in page.locator("#chunks .badge").all_inner_texts()]


def ask(page: Page, button: str = "Ask") -> dict:
    """The request's body; waits for the end of the response."""
    with page.expect_request("**/v1/rag/chat") as sent:
        page.get_by_role("button", name=button, exact=True).click()
    expect(page.locator("#ask-status")).to_contain_text("token after")
    return sent.value.post_data_json


@pytest.fixture
def example(page: Page) -> Page:
    page.get_by_role("button", name="Load example", exact=True).click()
    expect(page.locator("#chunks li")).to_have_count(len(EXAMPLE.documents))
    return page


def test_one_click_from_an_empty_page_to_a_hit(page):
    page.get_by_role("button", name="Load example and ask").click()
    expect(page.locator("#chunks .badge.hit")).to_have_count(len(EXAMPLE.documents))
    expect(page.locator(".answer-text")).to_have_text(ANSWER)
    assert sorted(texts(page)) == sorted(EXAMPLE.documents)
    assert texts(page) != list(EXAMPLE.documents)
    expect(page.locator(".facts")).to_contain_text("ms")
    expect(page.locator(".bar-words")).to_contain_text("reused (9")


def test_what_was_computed_is_hit_in_another_order(example):
    ask(example)
    assert badges(example) == ["filled"] * len(EXAMPLE.documents)
    before = texts(example)
    rows = example.locator("#chunks li")
    rows.nth(0).locator("textarea").focus()
    example.keyboard.press("Alt+ArrowDown")
    example.keyboard.press("Alt+ArrowDown")
    assert texts(example) == [before[1], before[2], before[0], *before[3:]]
    expect(rows.nth(2).locator("textarea")).to_be_focused()
    rows.nth(1).get_by_role("button", name="Move chunk 2 of 12 up").click()
    rows.nth(5).locator(".handle").drag_to(rows.nth(0), target_position={"x": 100, "y": 4})
    assert texts(example) == [before[5], before[2], before[1], before[0], before[3], before[4], *before[6:]]
    sent = ask(example)
    assert [chunk["text"] for chunk in sent["chunks"]] == texts(example)
    assert badges(example) == ["hit"] * len(EXAMPLE.documents)
    expect(example.locator(".answer-text")).to_have_text(ANSWER)


def test_the_form_is_what_is_sent(example):
    example.get_by_label("System prompt").first.fill("Be brief.")
    example.get_by_role("button", name=EXAMPLE.questions[2]).click()
    example.get_by_text("Sampling and cache").click()
    example.get_by_label("Temperature").fill("0.5")
    example.get_by_label("Top p").fill("0.9")
    example.get_by_label("Seed").fill("7")
    example.get_by_label("Positions").select_option("offset")
    example.get_by_label("Scope").select_option("isolated")
    example.locator("#namespace").fill("tenant")
    example.get_by_label("Maximum answer tokens").fill("5")
    example.get_by_role("checkbox", name="Use chunk 2 of 12").uncheck()
    sent = ask(example)
    assert len(sent.pop("chunks")) == len(EXAMPLE.documents) - 1
    cache = {"scope": "isolated", "position_strategy": "offset", "namespace": "tenant"}
    assert sent.pop("cache") == {"cite": True, "mode": "auto", **cache}
    sampling = {"max_tokens": 5, "temperature": 0.5, "top_p": 0.9, "seed": 7, "stream": True}
    assert sent == {"model": "demo", "system": "Be brief.", "question": EXAMPLE.questions[2], **sampling}
    assert len(badges(example)) == len(EXAMPLE.documents) - 1
    expect(example.locator("#chunk-count")).to_have_text("11 of 12")


def test_comparing_runs_one_after_the_other_and_shows_both(example):
    order = []
    example.on("request", lambda request: order.append("sent") if "rag/chat" in request.url else None)
    example.on("requestfinished", lambda request: order.append("done") if "rag/chat" in request.url else None)
    ask(example, "Compare with full attention")
    expect(example.locator("#comparison")).to_contain_text("The answers are equal.")
    expect(example.locator("#comparison")).to_contain_text("to the first token with chunks reused")
    expect(example.locator(".answer h2")).to_have_text(["Chunks reused", "Full attention"])
    expect(example.locator(".answer-text")).to_have_text([ANSWER, ANSWER])
    expect(example.locator(".answer").nth(1)).to_contain_text("12 chunks: 12 full")
    assert order == ["sent", "done", "sent", "done"]
    ask(example, "Compare with full attention")
    expect(example.locator("#comparison")).to_contain_text("prefix cache")


def test_stopping_ends_the_request_and_keeps_what_has_come(example, server):
    def long_answer(route: Route) -> None:
        body = {**route.request.post_data_json, "max_tokens": 1500, "ignore_eos": True}
        route.continue_(post_data=json.dumps(body))

    example.route("**/v1/rag/chat", long_answer)
    example.get_by_role("button", name="Ask", exact=True).click()
    expect(example.locator(".answer-text")).to_contain_text("7342")
    example.get_by_role("button", name="Stop", exact=True).click()
    expect(example.locator("#ask-status")).to_have_text("Stopped.")
    expect(example.locator(".answer-text")).to_contain_text("7342")
    expect(example.get_by_role("button", name="Ask", exact=True)).to_be_enabled()
    server.wait_idle()


def test_text_that_is_pasted_becomes_chunks(page):
    page.get_by_role("button", name="Use this text").click()
    expect(page.locator("#chunks-problem")).to_have_text("Paste some text first.")
    expect(page.get_by_label("Text of your own")).to_be_focused()
    page.get_by_label("Text of your own").fill(f"{ANSWER}\n\nThe mayor of Lovik is Sena Maro.")
    page.locator("#chunk-tokens").fill("16")
    page.get_by_role("button", name="Use this text").click()
    expect(page.locator("#chunks li")).to_have_count(2)
    expect(page.get_by_label("Text of your own")).to_have_value("")
    expect(page.locator("#chunks-problem")).to_have_text("")
    page.get_by_label("Question").fill("What is the access code of Falcon?")
    assert [chunk["text"] for chunk in ask(page)["chunks"]] == [ANSWER, "The mayor of Lovik is Sena Maro."]
    expect(page.locator(".answer-text")).to_have_text(ANSWER)


def test_files_become_chunks(page):
    files = [
        {"name": "guide.md", "mimeType": "text/markdown", "buffer": b"# Guide\n## Setup\nInstall it.\n## Use\nUse it."},
        {"name": "report.pdf", "mimeType": "application/pdf", "buffer": make_pdf([ANSWER])},
    ]
    page.locator("#chunk-files").set_input_files(files)
    expect(page.locator("#chunks li")).to_have_count(3)
    assert texts(page) == ["Install it.", "Use it.", ANSWER]
    expect(page.locator("#chunks .title")).to_have_text(["Guide › Setup", "Guide › Use"])
    drop(page, "#chunks-card", "notes.txt", "Falcon is in Riga.")
    expect(page.locator("#chunks li")).to_have_count(4)
    page.get_by_label("Question").fill("What is the access code of Falcon?")
    assert [chunk.get("title") for chunk in ask(page)["chunks"]] == ["Guide › Setup", "Guide › Use", None, None]


def test_errors_are_told_in_words(example):
    problem = example.locator("#ask-problem")
    example.get_by_label("Question").fill("  ")
    example.get_by_role("button", name="Ask", exact=True).click()
    expect(problem).to_have_text("Write a question first.")
    expect(example.get_by_label("Question")).to_be_focused()
    example.get_by_label("Question").fill("Why?")
    example.get_by_label("Maximum answer tokens").fill("1000000")
    example.get_by_role("button", name="Ask", exact=True).click()
    expect(problem).to_contain_text("cannot be greater than max_model_len=")
    drop(example, "#chunks-card", "a.docx", "x")
    expect(example.locator("#chunks-problem")).to_contain_text("a.docx: this is not a docx file that can be read")
    drop(example, "#chunks-card", "a.pdf", "x")
    expect(example.locator("#chunks-problem")).to_contain_text("this is not a PDF that can be read")
    example.get_by_label("Maximum answer tokens").fill("16")
    ask(example)
    expect(problem).to_be_empty()


def test_a_stream_that_breaks_off_is_told(example):
    first = 'data: {"choices": [{"delta": {"content": "The"}}]}\n\n'
    example.route("**/v1/rag/chat", lambda route: route.fulfill(content_type="text/event-stream", body=first))
    example.get_by_role("button", name="Ask", exact=True).click()
    expect(example.locator("#ask-problem")).to_contain_text("was lost before the answer was complete")
    expect(example.locator(".answer-text")).to_have_text("The")


@pytest.mark.parametrize(
    ("cache", "words", "row"),
    [
        ({"reread": 0.3}, "chunks most: the model reads", "and read again"),
        ({"sparse": {"budget_tokens": 100}}, "are left out", "%"),
    ],
)
def test_what_the_question_attends_to_is_told(example, cache, words, row):
    def choosing(route: Route) -> None:
        body = route.request.post_data_json
        route.continue_(post_data=json.dumps({**body, "cache": {**body.get("cache", {}), **cache}}))

    example.route("**/v1/rag/chat", choosing)
    ask(example)
    expect(example.locator(".report .reason")).to_contain_text(words)
    example.locator(".report summary").click()
    expect(example.locator(".report details table")).to_contain_text("Question’s attention")
    expect(example.locator(".report details table")).to_contain_text(row)


def test_text_is_never_read_as_html(page):
    file = f"# {HOSTILE}\n{HOSTILE}\n"
    page.locator("#chunk-files").set_input_files(
        [{"name": "<b>x<b>.md", "mimeType": "text/markdown", "buffer": file.encode()}]
    )
    expect(page.locator("#chunks .title")).to_have_text("window.hacked=1")  # what Markdown leaves of it, as text
    page.get_by_label("System prompt").first.fill(HOSTILE)
    page.get_by_label("Question").fill(HOSTILE)

    def echo(route: Route) -> None:
        report = {"mode": HOSTILE, "reason": HOSTILE, "tokens": {"prompt": 1, "reused": 0, "computed": 1}}
        chunk = {"index": 0, "status": HOSTILE, "origin": HOSTILE, "tokens": 1, "key": HOSTILE}
        events = [
            {"choices": [{"delta": {"content": HOSTILE}}]},
            {"choices": [], "cache": {**report, "chunks": [chunk], "timings_ms": {}}},
        ]
        body = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
        route.fulfill(content_type="text/event-stream", body=body)

    page.route("**/v1/rag/chat", echo)
    ask(page)
    expect(page.locator(".answer-text")).to_have_text(HOSTILE)
    refused = json.dumps({"error": {"message": HOSTILE}})
    page.route("**/v1/rag/chat", lambda route: route.fulfill(status=400, body=refused))
    page.get_by_role("button", name="Ask", exact=True).click()
    expect(page.locator("#ask-problem")).to_have_text(HOSTILE)
    assert page.evaluate("window.hacked") is None
    assert page.locator("img:not([src='web/icon.svg']), script:not([src]), main b").count() == 0


def test_a_pasted_prompt_shows_the_documents_that_would_be_found(page, server):
    known = EXAMPLE.documents[0]
    server.ingest([known])
    page.get_by_text("Documents in a prompt of another app").click()
    find, prompt = page.get_by_role("button", name="Find documents"), page.get_by_label("Prompt", exact=True)
    rows = page.locator("#prompt-found li")
    find.click()
    expect(page.locator("#prompt-status")).to_have_text("Paste a prompt first.")
    prompt.fill(f'\U0001f600 {known}\n<source id="1" name="a">{HOSTILE}</source>\nWhy?')
    find.click()
    expect(rows).to_have_count(2)
    expect(rows.nth(0)).to_contain_text(f"known passage: {known[:60]}")
    expect(rows.nth(1)).to_contain_text(f"missing Open WebUI: {HOSTILE}")
    prompt.fill("Why?")
    find.click()
    expect(page.locator("#prompt-status")).to_have_text("No document found.")
    expect(rows).to_have_count(0)
    assert page.evaluate("window.hacked") is None
