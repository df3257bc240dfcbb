# SPDX-License-Identifier: Apache-2.0
"""Rules for every workload, the requests of `context`, `chat` and `placement`, and refusals."""

from collections import Counter
from pathlib import Path

import pytest

from measuring.speed.answers import DifferentAnswerError
from measuring.speed.samples import Growth, Ratio
from measuring.speed.workloads import WORKLOADS
from measuring.speed.workloads.base import Options
from measuring.speed.workloads.chat import Chat
from measuring.speed.workloads.context import Context
from measuring.speed.workloads.placement import Placement
from tests.measuring import fake_server
from tests.measuring.fake_server import CHAT, CHUNKS, CLEAR, RAG, answer_of, rag_prompt
from tests.measuring.helpers import ROUNDS, run


def options(**fields) -> Options:
    return Options(Path("model"), (), Path("out"), **fields)


def user_text(body):
    return body["messages"][-1]["content"]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("name", WORKLOADS)
async def test_everything_claimed_is_measured_once_a_round(name, fakes, tmp_path):
    workload = WORKLOADS[name](Options(Path("model"), (), tmp_path))
    samples = await run(workload)
    measured = {(s.point, s.system, value) for s in samples for value in s.values}
    ratios = [claim for claim in workload.claims() if isinstance(claim, Ratio)]
    assert ratios
    for claim in ratios:
        assert {(claim.point, system, claim.value) for system in (claim.over, claim.under)} <= measured
    assert all(value > 0 for sample in samples for value in sample.values.values())
    rounds = Counter((s.workload, s.point, s.system) for s in samples)
    assert set(rounds.values()) == {ROUNDS}
    assert {s.round for s in samples} == set(range(1, 1 + ROUNDS))
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
    assert paths == (1 + ROUNDS) * [CHUNKS, RAG, RAG, CLEAR, CLEAR]
    (ahead, warm, empty), cleared = [body for _, body in tessera.requests[5:8]], tessera.bodies(CLEAR)[2:4]
    assert sorted(ahead["chunks"]) == sorted(warm["chunks"])
    assert ahead["chunks"] != warm["chunks"]
    assert {**warm, "cache": None} == {**empty, "cache": None}
    assert "".join(f"{chunk}\n\n" for chunk in warm["chunks"]) + warm["question"] == user_text(stock)
    assert not tessera.cached
    namespaces = [body["cache"]["namespace"] for body in (ahead, warm, empty)]
    assert namespaces[0] == namespaces[1] != namespaces[2]
    assert {body["namespace"] for body in cleared} == set(namespaces)
    assert warm["cache"]["mode"] == "chunked"


def test_points_of_the_context_may_be_chosen_and_workloads_share_no_text():
    growth = [claim for claim in Context(options(is_long=True)).claims() if isinstance(claim, Growth)]
    assert {(claim.first, claim.last) for claim in growth} == {("1024", "16384")}
    workload = Context(options(context_tokens=(1024, 8192)))
    assert workload.sizes()["chunks"] == [2, 16]
    assert {claim.point for claim in workload.claims()} == {"1024", "8192"}
    texts = [options().texts(name).text(40) for name in WORKLOADS]
    assert len(set(texts)) == len(texts)
    assert options(seed=1).texts("context").text(40) not in texts


def reporting(**fields):
    """A server whose reports have other fields."""
    return {"report": lambda report: {**report, **fields}}


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("workload", "names", "state", "words"),
    [
        ("context", ["tessera"], reporting(chunks=[{"status": "waited"}]), "a request ran as"),
        (
            "context",
            ["stock", "tessera"],
            {"answer": lambda prompt, n: (prompt.namespace[::-1] + "x" * n)[:n]},
            "tessera and tessera answered",
        ),
        ("load", ["tessera"], reporting(chunks=[{"status": "filled"}]), "not all hit"),
        ("load", ["quarter"], reporting(mode="full"), "quarter: a request ran as full"),
        ("load", ["quarter"], {"answer": lambda *asked: answer_of(*asked)[::-1]}, "tessera and quarter answered"),
        ("chat", ["stock"], {"answer": lambda prompt, n: "a" * n}, "stock and tessera answered differently"),
        ("placement", ["tessera"], reporting(placement="in-place"), "was placed as"),
        ("placement", ["in-place"], reporting(placement=None), "was placed as"),
        ("placement", ["attend"], reporting(placement=None), "was placed as"),
    ],
)
async def test_another_answer_is_not_reported(workload, names, state, words, fakes, tmp_path):
    fakes.states = dict.fromkeys(names, state)
    with pytest.raises(DifferentAnswerError, match=words):
        await run(WORKLOADS[workload](Options(Path("model"), (), tmp_path)))


async def test_prompts_of_other_lengths_are_not_reported(fakes, monkeypatch):
    def longer(body):
        return rag_prompt({**body, "question": body.get("question", "") + "x"})

    monkeypatch.setattr(fake_server, "rag_prompt", longer)
    with pytest.raises(DifferentAnswerError, match="tokens long; not reporting"):
        await run(Context(options()))


async def test_chat_takes_turns_and_compares_texts(fakes):
    order = []

    def arrives(system):
        async def note():
            order.append(system)

        return note

    fakes.states = {system: {"before": arrives(system)} for system in ("stock", "tessera")}
    samples = await run(Chat(options()))
    assert [s.system for s in samples[:2]] == ["stock", "tessera"]
    turns = ["stock", "tessera", "tessera", "stock"]
    first, second = order[18:36], order[36:54]  # behind the warm-up
    assert (first, second) == ((turns * 5)[:18], (turns[2:] + turns * 5)[:18])
    assert fakes.servers["stock"].bodies(CHAT) == fakes.servers["tessera"].bodies(CHAT)
    texts = [user_text(body) for body in fakes.servers["stock"].bodies(CHAT)]
    assert len(set(texts)) == len(texts) == 9 * (1 + ROUNDS)
    assert {len(text) for text in texts} == {128}


@pytest.mark.usefixtures("small")
async def test_servers_of_placement_have_the_same_little_memory(fakes):
    await run(Placement(options()))
    assert set(fakes.flags) == {"stock", "tessera", "in-place", "attend"}
    memory = fakes.flags["stock"]
    blocks = int(memory[memory.index("--num-gpu-blocks-override") + 1])
    assert 3 * (64 + 2 * 512 + 32 + 3) < 32 * blocks < 4 * (64 + 2 * 512 + 32 + 3)
    assert all(flags[: len(memory)] == memory for flags in fakes.flags.values())
