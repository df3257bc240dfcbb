# SPDX-License-Identifier: Apache-2.0
"""Required answers, and differences that are ties."""

from types import SimpleNamespace

import pytest

from measuring.kit.client import Answer
from measuring.speed.answers import Asked, DifferentAnswerError, check_prompt, check_report, check_same
from measuring.speed.query import Query
from measuring.speed.servers import Server
from tests.measuring.fake_server import serving

QUERY = Query("system", ("one", "two"), "question", 4)


def report(*statuses, mode="chunked", reason=None):
    return Answer(cache={"mode": mode, "reason": reason, "chunks": [{"status": status} for status in statuses]})


@pytest.mark.parametrize("status", ["hit", "filled"])
def test_a_report_may_have_the_one_status(status):
    check_report(report(status, status), status)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (report("hit", "filled"), "not all hit"),
        (report("waited"), "chunked with chunks waited"),
        (report(), "chunked with chunks none"),
        (report(None, mode="full", reason="no room"), r"ran as full .*\(no room\); not reporting"),
        (Answer(), "no report"),
    ],
)
def test_another_report_is_refused(answer, words):
    with pytest.raises(DifferentAnswerError, match=words):
        check_report(answer, "hit")


def test_prompts_have_the_same_number_of_tokens():
    check_prompt(Answer(prompt_tokens=7), Answer(prompt_tokens=7))
    with pytest.raises(DifferentAnswerError, match="7 and 8 tokens"):
        check_prompt(Answer(prompt_tokens=7), Answer(prompt_tokens=8))


class Replaying:
    """Tells likely tokens when asked again: lists of ``(token, logprob)``, the chosen one first."""

    def __init__(self, name, *tokens, tie=1e-3):
        self.name, self.tie = name, tie
        self.asked = []
        self.tokens = [
            {
                "token": top[0][0],
                "logprob": top[0][1],
                "top_logprobs": [{"token": token, "logprob": logprob} for token, logprob in top],
            }
            for top in tokens
        ]

    async def token_logprobs(self, query, namespace):
        self.asked.append((query, namespace))
        return self.tokens


def compare(text, other, *servers):
    one, another = servers if len(servers) == 2 else servers * 2
    asked = Asked(one, Answer(text=text), "a"), Asked(another, Answer(text=other), "b")
    return check_same(QUERY, *asked)


SAME = [("a", -0.1), ("b", -3.0)]
TIE = [("b", -0.7000), ("c", -0.7009), ("d", -2.0)]
NO_TIE = [("b", -0.7000), ("c", -0.7011)]


async def test_equal_texts_are_not_asked_again():
    server = Replaying("stock")
    await compare("ab", "ab", server)
    assert server.asked == []


async def test_texts_may_part_at_a_tie():
    server = Replaying("stock", SAME, TIE, SAME)
    await compare("abx", "acy", server)
    assert server.asked == [(QUERY, "a"), (QUERY, "b")]


@pytest.mark.parametrize(
    ("text", "other", "tokens"),
    [
        ("ab", "ac", [SAME, NO_TIE]),
        ("ab", "az", [SAME, TIE]),  # z is not among the likeliest
        ("ab", "zb", [SAME, TIE]),  # a tie comes after they part
        ("xb", "xc", [SAME, TIE]),  # asked again, it says something else before they part
        ("ab", "a", [SAME, TIE]),
        ("ab", "ac", [SAME]),
        ("ab", "ac", []),
    ],
)
async def test_texts_may_not_part_elsewhere(text, other, tokens):
    with pytest.raises(DifferentAnswerError, match="one and one answered differently; not reporting: "):
        await compare(text, other, Replaying("one", *tokens))


async def test_it_must_be_a_tie_for_both():
    tie, no_tie = Replaying("one", SAME, TIE), Replaying("two", SAME, NO_TIE)
    for servers in ((tie, no_tie), (no_tie, tie)):
        with pytest.raises(DifferentAnswerError, match="answered differently; not reporting: 'ab' and 'ac'"):
            await compare("ab", "ac", *servers)


async def test_a_tie_is_as_wide_as_the_dtypes_error():
    await compare("ab", "ac", Replaying("one", SAME, NO_TIE, tie=0.25))


async def test_tokens_of_several_characters():
    parting = [(" won", -0.7), (" word", -0.7), (" wo", -0.1)]
    await compare("a wonder", "a words", Replaying("one", [("a", 0.0)], parting))
    with pytest.raises(DifferentAnswerError):  # what both begin with is no choice between them
        await compare("a wonder", "a words", Replaying("one", [("a", 0.0)], [(" won", -0.7), (" wo", -0.7)]))


@pytest.mark.parametrize("is_stock", [True, False])
async def test_over_http_the_same_request_is_asked_again(is_stock, tmp_path):
    with serving(answer=lambda prompt, n: "abcd") as fake:
        process = SimpleNamespace(url=fake.url, log=tmp_path / "x.log")
        server = Server("stock", process, is_stock=is_stock, tie=1e-3)
        answer = await server.ask(QUERY, "n")
        with pytest.raises(DifferentAnswerError):
            await check_same(QUERY, Asked(server, answer, "n"), Asked(server, Answer(text="abce"), "n"))
        await server.__aexit__()
    (_, first), (path, again) = fake.requests
    assert path == ("/v1/chat/completions" if is_stock else "/v1/rag/chat")
    assert again.pop("logprobs") is True
    assert again.pop("top_logprobs") == 5
    assert first.pop("stream") is True
    assert first.pop("stream_options")
    assert again == first
