# SPDX-License-Identifier: Apache-2.0
"""Citations rest on the model's own attention while it answered, in whatever way its chunks were composed."""

from typing import Any

import pytest

from tests.engine.server import TesseraServer
from tests.support.exactness import LAYER, PROBED, STEPS, ask, assert_exact, blank_question, segments, statuses

LENGTHS = (50, 130, 70)


def lifts(server: TesseraServer, oracle: Any, response: dict[str, Any], strategy: str) -> list[tuple[float, float]]:
    """Each chunk's share of the attention of all answer tokens, and how many times it is that of a blank question."""
    report, tokens = response["cache"], response["choices"][0]["token_ids"]
    system, chunks, question = segments(report)

    def mean(own: list[int]) -> list[float]:
        of_each = oracle.attention(strategy, (system, chunks, own), [LAYER], report.get("opening"))
        return [sum(each) for each in of_each]

    asked, answered = question[:-1], [*question, *tokens[:-1]]

    def shares(attention: list[float]) -> list[float]:
        return [each / sum(attention) for each in attention]

    of_all, of_asked = mean(answered), mean(asked)
    paid = shares([len(answered) * a - len(asked) * b for a, b in zip(of_all, of_asked, strict=True)])
    usual = shares(mean(blank_question(server)))
    return [(share, share / least) for share, least in zip(paid, usual, strict=True)]


@pytest.mark.serve_with(*PROBED)
@pytest.mark.parametrize("strategy", ["offset", pytest.param("parallel", marks=pytest.mark.matrix)])
def test_shares_are_those_of_the_oracles_attention(strategy, server, oracle, text):
    chunks, question = [text(length) for length in LENGTHS], text(20)
    for status in ("filled", "hit"):
        response = ask(server, strategy, chunks, question, cache={"cite": True})
        assert statuses(response) == [status] * 3
        assert_exact(response, oracle("tiny-llama"), strategy)
        report, answer = response["cache"], response["choices"][0]["message"]["content"]
        assert "cite" in report["timings_ms"]
        assert "".join(answer[each["start"] : each["end"]] for each in report["citations"]) == "".join(answer.split())
        (citation,) = report["citations"]
        found = {each["chunk"]: (each["share"], each["lift"]) for each in citation["chunks"]}
        expected = lifts(server, oracle("tiny-llama"), response, strategy)
        assert found == {number: pytest.approx(each, abs=2e-3) for number, each in enumerate(expected)}
    plain = ask(server, strategy, chunks, question)
    assert plain["choices"][0]["token_ids"] == response["choices"][0]["token_ids"]
    assert "citations" not in plain["cache"]


@pytest.mark.parametrize("cache", [{"recompute": 0.5}, {"sparse": {"budget_share": 0.6}}])
def test_windows_and_chunks_left_out(cache, server, oracle, text):
    response = ask(server, "offset", [text(length) for length in LENGTHS], text(20), cache={"cite": True, **cache})
    assert_exact(response, oracle("tiny-llama"), "offset")
    report = response["cache"]
    kept = {index for index, chunk in enumerate(report["chunks"]) if chunk.get("kept", True)}
    assert report["citations"]
    assert {cited["chunk"] for each in report["citations"] for cited in each["chunks"]} <= kept


@pytest.mark.parametrize(
    ("fields", "why"), [({"n": 2, "seed": 0}, "several answers"), ({"cache": {"mode": "full"}}, "full attention")]
)
def test_why_there_are_none(fields, why, server, text):
    cache = {"cite": True, **fields.pop("cache", {})}
    body = {"chunks": [text(40), text(50)], "question": text(10), "max_tokens": STEPS, "cache": cache, **fields}
    report = server.post("/v1/rag/chat", body)["cache"]
    assert "citations" not in report
    assert why in report["uncited"]
