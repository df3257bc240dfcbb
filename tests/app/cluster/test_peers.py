# SPDX-License-Identifier: Apache-2.0
"""Replicas that fetch chunks from one another: real source and endpoint around fake engines.

On each load, the fake engine compares the page's tag and tokens with those last saved there.
"""

import asyncio

import httpx
import pytest

from app.cluster import peers as peers_module
from app.cluster import prefillers as prefillers_module
from cache.eviction.removal import Removal
from cache.segments.holdings import DocumentKey, Holding, Tier
from replicas.peer_file import FINGERPRINT_HEADER
from replicas.registry import InProcessRegistry, RegistryError
from replicas.signing import HEADER, PeerKey
from tests.engine_ext.fake_llm import turns
from tests.support.nodes import SECRET, A, B, Node


@pytest.fixture
async def nodes(monkeypatch):
    monkeypatch.setattr(peers_module, "_KNOWN_S", 0)
    monkeypatch.setattr(peers_module, "_POLL_S", 0.001)
    registry, mounts, made = InProcessRegistry(), {}, []

    async def make(*names, **fields):
        added = [Node(name, registry, mounts, **fields) for name in names]
        for node in added:
            await node.join()
        made.extend(added)
        return added

    yield make
    for node in made:
        node.check()
        await node.client.aclose()
        await node.peers_client.aclose()


async def test_what_another_replica_has_is_fetched(nodes):
    a, b = await nodes("a", "b")
    assert await a.ask(A, B) == [("filled", None)] * 2
    assert await b.ask(B, A) == [("fetched", "a")] * 2
    assert await b.ask(A) == [("hit", None)]
    assert not b.llm.computed
    assert b.manager.metrics.fetches == {"fetched": 2}
    assert b.manager.metrics.fills == {"fetched": 2}
    assert b.manager.metrics.fetched_bytes > 0


async def test_a_chunk_and_the_system_segment_before_it_are_fetched_at_once(nodes):
    a, b = await nodes("a", "b")
    await a.ask(A)
    a.transfers.may_end.clear()
    asked = asyncio.create_task(b.ask(A))
    async with asyncio.timeout(10):
        while a.transfers.reads < 2:
            await asyncio.sleep(0)
    a.transfers.may_end.set()
    assert await asked == [("fetched", "a")]


async def test_a_system_segment_that_nobody_has_is_computed_with_a_chunk(nodes):
    a, b = await nodes("a", "b")
    await a.ask(A, B)
    a.manager.detach(next(entry for entry in a.manager.index if entry.is_system), "cleared")
    await a.tell()
    assert sorted(status for status, _ in await b.ask(A, B)) == ["fetched", "filled"]


async def test_what_everybody_wants_at_once_is_computed_by_one(nodes):
    replicas = await nodes("a", "b", "c")
    for node in replicas:
        node.llm.work = lambda _: asyncio.sleep(0.05)
    found = await asyncio.gather(*(node.ask(A, B) for node in replicas for _ in range(3)))
    computed = sum(node.llm.computed[A.token_ids] for node in replicas)
    assert computed == 1
    assert {status for each in found for status, _ in each} == {"filled", "fetched", "waited"}


async def test_who_waits_for_another_replica_does_so_for_a_bounded_time(nodes):
    a, b = await nodes("a", "b", wait_s=0.05)
    await a.registry.begin_fills(a.id, [DocumentKey(A.packed[:4] * 4)])  # and never computes it
    assert await b.ask(A) == [("filled", None)]
    assert b.manager.metrics.fetches == {"late": 1}


async def test_who_said_that_it_computes_and_is_gone_is_not_waited_for(nodes):
    a, b = await nodes("a", "b", wait_s=60)
    await a.registry.begin_fills(a.id, [DocumentKey(A.packed[:4] * 4)])
    await a.registry.leave(a.id)
    assert await b.ask(A) == [("filled", None)]


async def test_what_a_replica_no_longer_has_is_computed(nodes):
    a, b = await nodes("a", "b")
    await a.ask(A)
    a.manager.clear()  # not announced
    assert await b.ask(A) == [("filled", None)]
    assert b.manager.metrics.fetches == {"absent": 1}


async def test_another_holder_is_asked_then(nodes):
    a, b, c = await nodes("a", "b", "c")
    await a.ask(A)
    await b.ask(A)
    a.manager.clear()
    assert await c.ask(A) == [("fetched", "b")]


async def test_a_damaged_file_is_refused_and_the_chunk_computed(nodes):
    a, b = await nodes("a", "b")
    await a.ask(A)
    a.transfers.damaged = True
    assert await b.ask(A) == [("filled", None)]
    assert b.manager.metrics.fetches == {"refused": 1}


async def test_a_replica_that_does_not_answer_costs_a_bounded_time(nodes):
    a, b = await nodes("a", "b", wait_s=0.05)
    await a.ask(A)
    a.transfers.may_end.clear()
    assert await b.ask(A) == [("filled", None)]
    assert b.manager.metrics.fetches["failed"] == 1
    a.transfers.may_end.set()
    await turns(10)


async def test_a_replica_with_another_secret_gives_nothing(nodes):
    (a,) = await nodes("a", secret="quite another secret")
    (b,) = await nodes("b")
    await a.ask(A)
    assert await b.ask(A) == [("filled", None)]
    assert b.manager.metrics.fetches == {"failed": 1}
    assert a.transfers.reads == 0


@pytest.mark.parametrize("fingerprint", ["other", ""])
async def test_a_replica_with_other_kv_is_never_asked(nodes, fingerprint):
    (a,) = await nodes("a", fingerprint=fingerprint)
    (b,) = await nodes("b")
    await a.ask(A)
    assert await b.ask(A) == [("filled", None)]
    assert not b.manager.metrics.fetches


async def test_an_adapters_chunks_are_never_fetched(nodes):
    a, b = await nodes("a", "b")
    await a.ask(A, adapter="x")
    assert await b.ask(A, adapter="x") == [("filled", None)]
    assert not b.manager.metrics.fetches


async def test_what_is_quicker_to_compute_is_not_fetched(nodes):
    a, b = await nodes("a", "b")
    await a.ask(A)
    b.cache.costs.fetching.observe(100, 5)
    b.cache.costs.computing.observe(100, 0.001)
    assert await b.ask(A) == [("filled", None)]


async def test_without_the_registry_everything_is_computed(nodes, monkeypatch):
    a, b = await nodes("a", "b")
    await a.ask(A, B)
    b.is_up = False
    assert await b.ask(A) == [("filled", None)]

    async def fails(*_):
        raise RegistryError("gone")

    b.is_up = True
    monkeypatch.setattr(b.registry, "begin_fills", fails)
    assert await b.ask(B) == [("filled", None)]


async def test_after_new_weights_nothing_is_given_or_taken(nodes):
    a, b = await nodes("a", "b")
    await a.ask(A)
    a.llm.reset_prefix_cache = b.llm.reset_prefix_cache = lambda *_: asyncio.sleep(0, True)
    await b.engine.reset_prefix_cache()
    assert await b.ask(A) == [("filled", None)]
    (c,) = await nodes("c")
    await a.engine.reset_prefix_cache()
    await b.registry.leave(b.id)
    assert await c.ask(A) == [("filled", None)]
    assert a.transfers.reads == 0


async def test_a_client_that_leaves_frees_no_page_that_is_being_written(nodes):
    a, b = await nodes("a", "b")
    await a.ask(A)
    b.transfers.may_end.clear()
    asked = asyncio.create_task(b.ask(A))
    while not any(entry.state.name == "FILLING" for entry in b.manager.index):
        await asyncio.sleep(0)
    await turns(50)
    asked.cancel()
    b.transfers.may_end.set()
    await asyncio.wait([asked])
    await turns(10)
    assert await b.ask(A) in ([("fetched", "a")], [("hit", None)])


async def get(node, key="00" * 16, *, rank=0, secret=SECRET, fingerprint="engine", **headers):
    target = f"/peer/chunks/{key}?rank={rank}"
    if secret is not None:
        headers[HEADER] = PeerKey(secret).sign("GET", target)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(node.app), base_url="http://x") as client:
        headers["x-tessera-fingerprint"] = fingerprint
        return await client.get(target, headers=headers)


async def test_the_endpoint_takes_the_secret_and_nothing_else(nodes):
    (a,) = await nodes("a")
    await a.ask(A)
    key = str(next(entry.key for entry in a.manager.index if not entry.is_system))
    assert (await get(a, key)).status_code == 200
    for wrong in (None, "", "wrong", SECRET + "x", SECRET[:-1]):
        assert (await get(a, key, secret=wrong)).status_code == 403
    assert (await get(a, key, secret=None, authorization=f"Bearer {SECRET}")).status_code == 403
    assert a.transfers.reads == 1


async def test_the_endpoint_says_what_it_does_not_have(nodes):
    (a,) = await nodes("a")
    await a.ask(A)
    key = str(next(iter(a.manager.index)).key)
    assert (await get(a)).status_code == 404
    assert (await get(a, key, rank=1)).status_code == 404
    assert (await get(a, key, rank=-1)).status_code == 422
    assert (await get(a, "zz")).status_code == 422
    assert (await get(a, key, fingerprint="other")).status_code == 409
    a.cache.transfers = None
    assert (await get(a, key)).status_code == 404


async def test_claims_of_one_document_and_not_of_the_system_segment_are_no_reason_to_ask(nodes):
    a, b = await nodes("a", "b")
    await a.registry.publish(a.id, {DocumentKey(A.packed[:4] * 4): Holding(Tier.DEVICE, 30)})
    assert await b.ask(A) == [("filled", None)]
    assert a.transfers.reads == 0


async def test_a_replica_that_decodes_has_chunks_computed(nodes):
    """By the same replica that prefills, for all that decode, and once."""
    (one,) = await nodes("p", role="prefill")
    a, b = await nodes("a", "b", role="decode")
    a.cache.costs.fetching.observe(100, 50)  # fetching is always right
    assert await a.ask(A, B) == [("fetched", "p")] * 2
    await one.tell()
    assert {status for status, _ in await b.ask(B, A)} == {"fetched"}
    assert not a.llm.computed
    assert not b.llm.computed
    assert set(one.llm.computed.values()) == {1}
    assert await a.ask(B) == [("hit", None)]


async def test_a_system_segment_alone_is_computed_elsewhere_too(nodes):
    """The chunks are there; the system segment was evicted."""
    (one,) = await nodes("p", role="prefill")
    (a,) = await nodes("a", role="decode")
    await a.ask(A)
    (system,) = [entry for entry in a.manager.index if entry.is_system]
    a.manager.detach(system, Removal.EVICTED)
    assert await a.ask(A) == [("hit", None)]
    assert not a.llm.computed
    assert len(one.llm.computed) == 2


async def test_replicas_that_prefill_compute_for_themselves(nodes):
    """They answer where no others are."""
    one, two = await nodes("p", "q", role="prefill")
    assert await one.ask(A) == [("filled", None)]
    assert await two.ask(B) == [("filled", None)]


async def test_a_dead_replica_that_prefills_is_followed_by_the_next_and_then_by_the_own_engine(nodes):
    one, two = await nodes("p", "q", role="prefill")
    (a,) = await nodes("a", role="decode")
    one.llm.loses = lambda prompt: True  # its fills fail
    two.llm.loses = lambda prompt: True
    assert await a.ask(A) == [("filled", None)]
    two.llm.loses = lambda prompt: False
    assert await a.ask(B) == [("fetched", "q")]


async def test_a_replica_that_vanishes_while_it_computes_is_not_waited_for(nodes, monkeypatch):
    monkeypatch.setattr(prefillers_module, "_LOOK_S", 0.01)
    (one,) = await nodes("p", role="prefill")
    (a,) = await nodes("a", role="decode")
    stuck = asyncio.Event()
    one.llm.work = lambda num_tokens: stuck.wait()
    asking = asyncio.create_task(a.ask(A))
    await asyncio.sleep(0.05)
    assert not asking.done()
    await one.registry.leave(one.id)
    assert await asking == [("filled", None)]
    stuck.set()
    await turns(50)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({}, 400),
        ({"namespace": "x", "segments": []}, 400),
        ({"namespace": "x", "segments": [{"prefix": "", "tokens": "", "is_system": False, "document": None}]}, 400),
        ({"namespace": "x", "segments": [{"prefix": "", "tokens": "01", "is_system": False, "document": None}]}, 400),
    ],
)
async def test_fills_are_for_peers_with_sense(nodes, body, status):
    (a,) = await nodes("p", role="prefill")
    url, own, other = "http://p/peer/fills", {FINGERPRINT_HEADER: "engine"}, {FINGERPRINT_HEADER: "other"}
    assert (await a.peers_client.post(url, json=body, headers=own)).status_code == status
    assert (await a.peers_client.post(url, json=body, headers=other)).status_code == 409
    assert (await a.client.post(url, json=body, headers=own)).status_code == 403
    wrong = PeerKey("wrong").sign("POST", "/peer/fills", b"{}")
    assert (await a.client.post(url, content=b"{}", headers={**own, HEADER: wrong})).status_code == 403
