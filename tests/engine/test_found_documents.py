# SPDX-License-Identifier: Apache-2.0
"""Documents found in any prompt: each app's form is exact against the oracle, and its chunks are hits ever after."""

from typing import Any

import pytest

from tests.engine.server import TesseraServer, token_logprobs
from tests.support.app_prompts import FORMS, Messages

STEPS = 6
AUTO = {"documents": "auto"}
"""In the field `cache`, as `--documents auto` of a server (`test_integrations.py`)."""


def ask(server: TesseraServer, messages: Messages, **fields: Any) -> dict[str, Any]:
    body = {"messages": messages, "cache": {**AUTO, "explain": True, **fields.pop("cache", {})}, **fields}
    body |= {"max_tokens": STEPS, "temperature": 0, "ignore_eos": True, "logprobs": True, "return_token_ids": True}
    return server.post("/v1/chat/completions", body)


def report_of(answer: dict[str, Any]) -> dict[str, Any]:
    return answer["kv_transfer_params"]["cache"]


def assert_exact(answer: dict[str, Any], oracle: Any) -> None:
    """Log probabilities are the oracle's: chunks computed apart, the text between them behind everything before it."""
    report = report_of(answer)
    assert report["mode"] == "chunked", report
    assert report["position_strategy"] == "offset"
    system, *within, question = report["segments"]
    assert (system["kind"], question["kind"]) == ("system", "question")
    parts = [segment["token_ids"] for segment in within]
    is_computed = report.get("text_between") == "computed"
    windows = [[(0, len(p))] if is_computed and s["kind"] == "text" else [] for p, s in zip(parts, within, strict=True)]
    tokens = answer["choices"][0]["token_ids"]
    segments = system["token_ids"], parts, question["token_ids"]
    expected = oracle.score("offset", segments, tokens, report.get("opening"), windows if is_computed else None)
    differences = [abs(a - b) for a, b in zip(token_logprobs(answer), expected.logprobs, strict=True)]
    assert max(differences) <= 1e-4, differences
    counted, size = report["tokens"], sum(map(len, (*segments[1], segments[0], segments[2])))
    assert counted["reused"] + counted["computed"] == counted["prompt"] == size
    assert min(counted.values()) >= 0


def statuses(answer: dict[str, Any]) -> list[str]:
    return [chunk["status"] for chunk in report_of(answer)["chunks"]]


@pytest.mark.parametrize("form", FORMS)
def test_the_second_request_with_other_numbers_and_another_order_hits(form, server, oracle, text) -> None:
    one, two, three = (text(n) for n in (90, 40, 130))
    first = ask(server, FORMS[form]([one, two, three], 0))
    second = ask(server, FORMS[form]([three, one, two], 7))
    assert statuses(first) == ["filled"] * 3
    assert statuses(second) == ["hit"] * 3
    for answer in (first, second):
        assert_exact(answer, oracle("tiny-llama"))
        assert len(report_of(answer)["found"]) == 3
    assert report_of(second)["scope"] == "isolated"


def test_passages_computed_ahead_are_hits_behind_the_same_text(server, oracle, text) -> None:
    one, two, system = text(120), text(80), text(30)
    server.ingest([one, {"text": two, "title": "Title"}], system=system)
    prompt = f"{one}\n\nand {two}. Why?"
    same = ask(server, [{"role": "system", "content": system}, {"role": "user", "content": prompt}])
    assert (report_of(same)["scope"], statuses(same)) == ("system", ["hit", "filled"])  # a title was part of the other
    other = ask(server, [{"role": "system", "content": text(20)}, {"role": "user", "content": prompt}])
    assert (report_of(other)["scope"], statuses(other)) == ("isolated", ["filled"] * 2)
    for answer in (same, other):
        assert [each["by"] for each in report_of(answer)["found"]] == ["known passage"] * 2
        assert_exact(answer, oracle("tiny-llama"))


def test_documents_in_several_messages(server, oracle, text) -> None:
    one, two = text(70), text(90)
    messages = [
        {"role": "system", "content": f"[CONTEXT 0]:\n{one}\n[END CONTEXT 0]"},
        {"role": "user", "content": "What is it?"},
        {"role": "assistant", "content": text(40)},
        {"role": "user", "content": f'<source id="1">{two}</source>\nAnd this?'},
    ]
    for status in ("filled", "hit"):
        answer = ask(server, messages)
        assert statuses(answer) == [status] * 2
        assert_exact(answer, oracle("tiny-llama"))


def test_another_namespace_and_ordinary_prompts_find_nothing(server, text) -> None:
    passage = text(100)
    messages = [{"role": "user", "content": f"{passage}\n\nWhy?"}]
    server.chat(chunks=[passage], question="Why?", max_tokens=1, cache={"namespace": "mine"})
    theirs = ask(server, messages, cache={"namespace": "theirs"})
    assert (report_of(theirs)["mode"], report_of(theirs)["reason"]) == ("full", "the request has no chunks")
    assert "found" not in report_of(theirs)
    salted = ask(server, messages, cache={"namespace": "mine"}, cache_salt="salt")
    assert "found" not in report_of(salted)
    assert len(report_of(ask(server, messages, cache={"namespace": "mine"}))["found"]) == 1
    plain = [{"role": "user", "content": text(300)}]
    for messages, documents in ((plain, "auto"), (FORMS["open_webui"]([text(50)], 1), "off")):
        report = report_of(ask(server, messages, cache={"documents": documents}))
        assert (report["mode"], report["reason"]) == ("full", "the request has no chunks")
        assert "found" not in report


def test_a_plan_shows_what_would_be_found(server, text) -> None:
    one, two = text(60), text(70)
    messages = FORMS["anything_llm"]([one, two], 0)
    before = server.post("/v1/rag/plan", {"messages": messages})
    ask(server, messages)
    after = server.post("/v1/rag/plan", {"messages": FORMS["anything_llm"]([two, one], 4)})
    for plan, order, status in ((before, (one, two), "missing"), (after, (two, one), "hit")):
        places = [(each["by"], each["at"], each["end"] - each["start"]) for each in plan["found"]]
        assert places == [("AnythingLLM", "messages.0.content", len(each)) for each in order]
        assert [chunk["status"] for chunk in plan["chunks"]] == [status] * 2
    assert server.post("/v1/rag/plan", {"question": "Why?"})["found"] == []


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses", "/v1/messages"])
def test_every_endpoint(path, server, text) -> None:
    passages = [text(80), text(60)]
    for status, order in (("filled", passages), ("hit", passages[::-1])):
        (message,) = FORMS["langchain"](order, 0)
        given = {"prompt": message["content"]} if path == "/v1/completions" else {"input": [message]}
        if path == "/v1/messages":
            given = {"messages": [message], "model": server.get("/v1/models")["data"][0]["id"]}
        limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
        assert statuses(server.post(path, {**given, limit: 2, "cache": AUTO})) == [status] * 2
