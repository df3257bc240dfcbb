# SPDX-License-Identifier: Apache-2.0
"""The workloads without concurrent users: requests to each system, records, refusals."""

from collections import Counter
from pathlib import Path

import pytest

from measuring.speed.answers import DifferentAnswerError
from measuring.speed.samples import Growth, Ratio
from measuring.speed.servers import Servers
from measuring.speed.workloads import WORKLOADS
from measuring.speed.workloads.base import Options
from measuring.speed.workloads.chat import Chat
from measuring.speed.workloads.context import Context
from tests.measuring import fake_server
from tests.measuring.fake_server import rag_prompt
from tests.measuring.helpers import ROUNDS, run

CHAT, RAG, INGEST, CLEAR = "/v1/chat/completions", "/v1/rag/chat", "/v1/rag/chunks", "/v1/cache/clear"


def options(**fields) -> Options:
    return Options(Path("model"), (), Path("out"), **fields)


def user_text(body):
    return body["messages"][-1]["content"]


@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize("is_long", [False, True])
def test_what_a_workload_says_of_itself(name, is_long):
    workload = WORKLOADS[name](options(is_long=is_long))
    assert workload.name == name
    assert workload.title
    assert workload.axis
    assert workload.sizes()
    for claim in workload.claims():
        assert claim.workload == name


@pytest.mark.parametrize("workload_type", [Context, Chat])
async def test_everything_claimed_is_measured_once_a_round(workload_type, fakes):
    workload = workload_type(options())
    samples = await run(workload)
    measured = {(s.point, s.system, value) for s in samples for value in s.values}
    ratios = [claim for claim in workload.claims() if isinstance(claim, Ratio)]
    assert ratios
    for claim in ratios:
        assert {(claim.point, system, claim.value) for system in (claim.over, claim.under)} <= measured
    assert all(value > 0 for sample in samples for value in sample.values.values())
    keys = Counter((s.point, s.system, s.round) for s in samples)
    assert set(keys.values()) == {1}
    assert not fakes.servers["tessera"].cached
    assert fakes.running == set()


async def test_a_round_of_context(fakes, monkeypatch):
    monkeypatch.setattr(Context, "short", (3,))
    samples = (await run(Context(options())))[:4]
    assert [(s.point, s.system, s.round) for s in samples] == [
        ("1536", system, 1) for system in ("stock", "prefix hit", "warm", "empty")
    ]
    warm_up, _, stock, hit = fakes.servers["stock"].bodies(CHAT)[:4]
    assert user_text(stock) != user_text(hit)
    assert user_text(stock)[:-32] == user_text(hit)[:-32]  # a new question
    assert user_text(stock) != user_text(warm_up)
    assert (len(stock["messages"][0]["content"]), len(user_text(stock))) == (64, 3 * 512 + 32)
    tessera = fakes.servers["tessera"]
    paths = [path for path, _ in tessera.requests]
    assert paths == (1 + ROUNDS) * [INGEST, RAG, RAG, CLEAR, CLEAR]
    (ahead, warm, empty), cleared = [body for _, body in tessera.requests[5:8]], tessera.bodies(CLEAR)[2:4]
    assert sorted(ahead["chunks"]) == sorted(warm["chunks"])
    assert ahead["chunks"] != warm["chunks"]
    assert {**warm, "cache": None} == {**empty, "cache": None}
    assert "".join(f"{chunk}\n\n" for chunk in warm["chunks"]) + warm["question"] == user_text(stock)
    namespaces = [body["cache"]["namespace"] for body in (ahead, warm, empty)]
    assert namespaces[0] == namespaces[1] != namespaces[2]
    assert {body["namespace"] for body in cleared} == set(namespaces)
    assert warm["cache"]["mode"] == "chunked"


def test_points_of_the_context_are_its_length():
    growth = [claim for claim in Context(options(is_long=True)).claims() if isinstance(claim, Growth)]
    assert {(claim.first, claim.last) for claim in growth} == {("1024", "16384")}
    assert not [claim for claim in Context(options()).claims() if isinstance(claim, Growth)]


def test_contexts_may_be_chosen():
    workload = Context(options(context_tokens=(1024, 8192)))
    assert workload.sizes()["chunks"] == [2, 16]
    assert {claim.point for claim in workload.claims()} == {"1024", "8192"}


def wrong_status(report):
    report["chunks"][0]["status"] = "waited"
    return report


def in_full_attention(report):
    return {**report, "mode": "full", "reason": "no room"}


@pytest.mark.parametrize("change", [wrong_status, in_full_attention])
async def test_a_request_that_ran_otherwise_is_not_reported(change, fakes):
    fakes.state = {"report": change}
    with pytest.raises(DifferentAnswerError, match="a request ran as"):
        await run(Context(options()))


async def test_an_answer_that_depends_on_the_cache_is_not_reported(fakes):
    fakes.state = {"answer": lambda prompt, n: (prompt.namespace[::-1] + "x" * n)[:n]}
    with pytest.raises(DifferentAnswerError, match="tessera and tessera answered differently"):
        await run(Context(options()))


async def test_prompts_of_other_lengths_are_not_reported(fakes, monkeypatch):
    def longer(body):
        return rag_prompt({**body, "question": body.get("question", "") + "x"})

    monkeypatch.setattr(fake_server, "rag_prompt", longer)
    with pytest.raises(DifferentAnswerError, match="tokens long; not reporting"):
        await run(Context(options()))


async def test_chat_takes_turns_and_compares_texts(fakes):
    samples = await run(Chat(options()))
    assert [s.system for s in samples[:4]] == ["stock", "tessera", "tessera", "stock"]
    assert fakes.servers["stock"].bodies(CHAT) == fakes.servers["tessera"].bodies(CHAT)
    texts = [user_text(body) for body in fakes.servers["stock"].bodies(CHAT)]
    assert len(set(texts)) == len(texts) == 1 + ROUNDS
    assert {len(text) for text in texts} == {128}


async def test_chat_that_answers_otherwise_is_not_reported(fakes):
    workload = Chat(options())
    async with Servers("model", (), Path("out")) as servers:
        for name, letter in (("stock", "a"), ("tessera", "b")):
            fakes.state = {"answer": lambda prompt, n, letter=letter: letter * n}
            await servers.get(name)
        with pytest.raises(DifferentAnswerError, match="stock and tessera answered differently"):
            await workload.prepare(servers)


def test_workloads_share_no_text():
    texts = [options().texts(name).text(40) for name in WORKLOADS]
    assert len(set(texts)) == len(texts)
    assert options(seed=1).texts("context").text(40) not in texts
