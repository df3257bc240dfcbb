# SPDX-License-Identifier: Apache-2.0
"""Documents found in any prompt: each app's form is exact against the oracle, and its chunks are hits ever after."""

from typing import Any

import pytest

from tests.engine.server import TesseraServer, token_logprobs
from tests.support.app_prompts import FORMS, QUESTION, Messages, asked

STEPS = 6
AUTO = ("--documents", "auto")


@pytest.fixture
def server(serve) -> TesseraServer:
    return serve("tiny-llama", *AUTO)


def ask(server: TesseraServer, messages: Messages, **fields: Any) -> dict[str, Any]:
    body = {
        "messages": messages,
        "max_tokens": STEPS,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": True,
        "return_token_ids": True,
        "cache": {"explain": True, **fields.pop("cache", {})},
        **fields,
    }
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
    counted = report["tokens"]
    assert (
        counted["reused"] + counted["computed"]
        == counted["prompt"]
        == sum(map(len, (*segments[1], segments[0], segments[2])))
    )
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
