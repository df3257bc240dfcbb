# SPDX-License-Identifier: Apache-2.0
"""Required answers, and differences that are ties."""

from types import SimpleNamespace

import pytest

from measuring.kit.client import Answer
from measuring.speed.answers import Asked, DifferentAnswerError, check_report, check_same
from measuring.speed.query import Query
from measuring.speed.servers import Server
from tests.measuring.fake_server import CHAT, RAG, serving

QUERY = Query("system", ("one", "two"), "question", 4)


def report(*statuses, mode="chunked", reason=None):
    return Answer(cache={"mode": mode, "reason": reason, "chunks": [{"status": status} for status in statuses]})


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
def test_a_report_must_have_the_one_status(answer, words):
    check_report(report("hit", "hit"), "hit")
    with pytest.raises(DifferentAnswerError, match=words):
        check_report(answer, "hit")


class Replaying:
    """Tells likely tokens when asked again: lists of ``(token, logprob)``, the chosen one first."""

    def __init__(self, name, *tokens, tie=1e-3):
        self.name, self.tie = name, tie
        self.asked = []
        self.tokens = [
            {"token": top[0][0], "top_logprobs": [{"token": token, "logprob": logprob} for token, logprob in top]}
            for top in tokens
        ]

    async def token_logprobs(self, query, namespace):
        self.asked.append((query, namespace))
        return self.tokens


def compare(text, other, *servers):
    one, another = servers if len(servers) == 2 else servers * 2
    return check_same(QUERY, Asked(one, Answer(text=text), "a"), Asked(another, Answer(text=other), "b"))


SAME = [("a", -0.1), ("b", -3.0)]
TIE = [("b", -0.7000), ("c", -0.7009), ("d", -2.0)]
NO_TIE = [("b", -0.7000), ("c", -0.7011)]


async def test_texts_may_part_at_a_tie_of_both():
    server = Replaying("stock", SAME, TIE, SAME)
    await compare("ab", "ab", server)
    assert server.asked == []  # equal ones are not asked again
    await compare("abx", "acy", server)
    assert server.asked == [(QUERY, "a"), (QUERY, "b")]
    await compare("ab", "ac", Replaying("one", SAME, NO_TIE, tie=0.25))  # as wide as the dtype's error
    several_letters = [("a", 0.0)], [(" won", -0.7), (" word", -0.7), (" wo", -0.1)]
    await compare("a wonder", "a words", Replaying("one", *several_letters))
    tie, no_tie = Replaying("one", SAME, TIE), Replaying("two", SAME, NO_TIE)
    for servers in ((tie, no_tie), (no_tie, tie)):
        with pytest.raises(DifferentAnswerError, match="answered differently; not reporting: 'ab' and 'ac'"):
            await compare("ab", "ac", *servers)


@pytest.mark.parametrize(
    ("text", "other", "tokens"),
    [
        ("ab", "ac", [SAME, NO_TIE]),
        ("ab", "az", [SAME, TIE]),  # z is not among the likeliest
        ("ab", "zb", [SAME, TIE]),  # a tie comes after they part
        ("xb", "xc", [SAME, TIE]),  # asked again, it says something else before they part
        ("ab", "a", [SAME, TIE]),
        ("ab", "ac", [SAME]),
        ("a wonder", "a words", [[("a", 0.0)], [(" won", -0.7), (" wo", -0.7)]]),  # both begin with the latter
    ],
)
async def test_texts_may_not_part_elsewhere(text, other, tokens):
    with pytest.raises(DifferentAnswerError, match=f"one and one answered differently; not reporting: '{text}' and "):
        await compare(text, other, Replaying("one", *tokens))


@pytest.mark.parametrize(("is_stock", "path"), [(True, CHAT), (False, RAG)])
async def test_over_http_the_same_request_is_asked_again(is_stock, path, tmp_path):
    with serving(answer=lambda prompt, n: "abcd") as fake:
        process = SimpleNamespace(url=fake.url, log=tmp_path / "x.log")
        async with Server("stock", process, is_stock=is_stock, tie=1e-3) as server:
            answer = await server.ask(QUERY, "n")
            with pytest.raises(DifferentAnswerError):
                await check_same(QUERY, Asked(server, answer, "n"), Asked(server, Answer(text="abce"), "n"))
    first, again = fake.bodies(path)
    assert (again.pop("logprobs"), again.pop("top_logprobs")) == (True, 5)
    assert first.pop("stream") is True
    assert first.pop("stream_options")
    assert again == first
