# SPDX-License-Identifier: Apache-2.0
"""Replicas that fetch chunks from one another: real source and endpoint around fake engines.

On each load, the fake engine compares the page's tag and tokens with those last saved there.
"""

import asyncio

import pytest

from app.cluster import peers as peers_module
from app.cluster import prefillers as prefillers_module
from cache.eviction.removal import Removal
from cache.segments.holdings import Holding, Tier
from engine_ext.wire.worker_messages import Answer
from replicas.peer_file import FINGERPRINT_HEADER
from replicas.registry import RegistryError
from tests.engine_ext.fake_llm import turns
from tests.support.nodes import A, B, Node, document_key
from tests.support.registries import InProcessRegistry

FILLED = [("filled", None)]


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
        await node.close()


@pytest.fixture
async def pair(nodes):
    """Two replicas, of which the first has the chunk A."""
    a, b = await nodes("a", "b")
    await a.ask(A)
    return a, b


def system_of(node):
    return next(entry for entry in node.manager.index if entry.is_system)


async def test_what_another_replica_has_is_fetched(nodes):
    a, b = await nodes("a", "b")
    assert await a.ask(A, B) == FILLED * 2
    assert await b.ask(B, A) == [("fetched", "a")] * 2
    assert await b.ask(A) == [("hit", None)]
    assert not b.llm.computed
    assert b.manager.metrics.fetches == b.manager.metrics.fills == {"fetched": 2}
    assert b.manager.metrics.fetched_bytes > 0


async def test_a_chunk_and_the_system_segment_before_it_are_fetched_at_once(pair):
    a, b = pair
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
    a.manager.detach(system_of(a), "cleared")
    await a.tell()
    assert sorted(status for status, _ in await b.ask(A, B)) == ["fetched", "filled"]


async def test_what_everybody_wants_at_once_is_computed_by_one(nodes):
    replicas = await nodes("a", "b", "c")
    for node in replicas:
        node.llm.work = lambda _: asyncio.sleep(0.05)
    found = await asyncio.gather(*(node.ask(A, B) for node in replicas for _ in range(3)))
    assert sum(node.llm.computed[A.token_ids] for node in replicas) == 1
    assert {status for each in found for status, _ in each} == {"filled", "fetched", "waited"}


@pytest.mark.parametrize(("wait_s", "is_gone", "fetches"), [(0.05, False, {"late": 1}), (60, True, {})])
async def test_who_said_that_it_computes_is_waited_for_only_so_long(nodes, wait_s, is_gone, fetches):
    a, b = await nodes("a", "b", wait_s=wait_s)
    await a.registry.begin_fills(a.id, [document_key(A)])  # and never computes it
    if is_gone:
        await a.registry.leave(a.id)
    assert await b.ask(A) == FILLED
    assert b.manager.metrics.fetches == fetches


@pytest.mark.parametrize(
    ("happens", "wait_s", "outcome"),
    [
        (lambda node: node.manager.clear(), 5, "absent"),  # not announced
        (lambda node: setattr(node.transfers, "damaged", True), 5, "refused"),
        (lambda node: node.transfers.may_end.clear(), 0.05, "failed"),  # it hangs
    ],
)
async def test_a_chunk_that_another_replica_cannot_give_is_computed(nodes, happens, wait_s, outcome):
    a, b = await nodes("a", "b", wait_s=wait_s)
    await a.ask(A)
    happens(a)
    assert await b.ask(A) == FILLED
    assert b.manager.metrics.fetches[outcome] == 1
    a.transfers.may_end.set()
    await turns(10)


async def test_what_is_quicker_to_compute_is_not_fetched(pair):
    _, b = pair
    b.cache.costs.fetching[Tier.DEVICE].observe(100, 5)
    b.cache.costs.computing.observe(100, 0.001)
    assert await b.ask(A) == FILLED
    assert not b.manager.metrics.fetches


async def left_to_tiers(node, *tiers):
    """Moves all that the node has into these tiers."""
    for entry in list(node.manager.index):
        entry.tiers = tiers
        await node.transfers.keep(entry)
        node.manager.detach(entry, Removal.EVICTED)
    await node.tell()


async def test_what_another_replica_has_in_host_memory_only_is_fetched(pair):
    a, b = pair
    await left_to_tiers(a, "host", "file")
    assert await b.ask(A) == [("fetched", "a")]
    b.manager.clear()
    a.transfers.stored.clear()  # a tier may evict without a word
    assert await b.ask(A) == FILLED
    assert b.manager.metrics.fetches == {"fetched": 1, "absent": 1}


@pytest.mark.parametrize(("own", "expected"), [((), [("fetched", "a")]), (("cc",), FILLED)])
async def test_what_is_in_storage_is_fetched_by_replicas_that_do_not_read_it_themselves(nodes, own, expected):
    (a,), (b,) = await nodes("a", storages=("cc",)), await nodes("b", storages=own)
    await a.ask(A)
    await left_to_tiers(a, "file")
    assert await b.ask(A) == expected


async def test_the_bytes_in_tiers_are_those_of_all_workers_when_one_sends_a_file(pair):
    a, _ = pair
    await left_to_tiers(a, "host")
    a.cache.metrics.tier_bytes["host"] = 200

    async def read_stored(entry, part):
        return Answer(tier="host", num_bytes=4, held={"host": 100}), memoryview(b"file")

    a.transfers.read_stored = read_stored
    key = next(entry.key for entry in a.manager.away if not entry.is_system)
    assert await a.cache.file(key, 1) == b"file"
    assert a.cache.metrics.tier_bytes["host"] == 200
    assert a.cache.metrics.loaded_bytes["host"] == 4


async def test_the_fastest_holder_is_asked_first_and_slow_tiers_have_a_pace_of_their_own(nodes):
    a, b, c = await nodes("a", "b", "c")
    await a.ask(A)
    await left_to_tiers(a, "host")
    await b.ask(A)
    assert await c.ask(A) == [("fetched", "b")]
    await b.registry.leave(b.id)
    c.manager.clear()
    c.cache.costs.computing.observe(100, 0.001)
    c.cache.costs.fetching[Tier.HOST].observe(100, 5)
    assert await c.ask(A) == FILLED


async def test_another_holder_is_asked_then(nodes):
    a, b, c = await nodes("a", "b", "c")
    await a.ask(A)
    await b.ask(A)
    a.manager.clear()
    assert await c.ask(A) == [("fetched", "b")]


async def test_a_replica_with_another_secret_gives_nothing(nodes):
    (a,) = await nodes("a", secret="quite another secret")
    (b,) = await nodes("b")
    await a.ask(A)
    assert await b.ask(A) == FILLED
    assert b.manager.metrics.fetches == {"failed": 1}
    assert a.transfers.reads == 0


@pytest.mark.parametrize(
    ("fingerprint", "adapter"), [("other", None), ("", None), ("engine", "x")], ids=["other", "none", "adapter"]
)
async def test_other_kv_is_never_asked_for(nodes, fingerprint, adapter):
    (a,) = await nodes("a", fingerprint=fingerprint)
    (b,) = await nodes("b")
    await a.ask(A, adapter=adapter)
    assert await b.ask(A, adapter=adapter) == FILLED
    assert not b.manager.metrics.fetches


async def test_without_the_registry_everything_is_computed(nodes, monkeypatch):
    a, b = await nodes("a", "b")
    await a.ask(A, B)
    b.is_up = False
    assert await b.ask(A) == FILLED

    async def fails(*_):
        raise RegistryError("gone")

    b.is_up = True
    monkeypatch.setattr(b.registry, "begin_fills", fails)
    assert await b.ask(B) == FILLED


async def test_after_new_weights_nothing_is_given_or_taken(nodes, pair):
    a, b = pair
    a.llm.reset_prefix_cache = b.llm.reset_prefix_cache = lambda *_: asyncio.sleep(0, True)
    await b.engine.reset_prefix_cache()
    assert await b.ask(A) == FILLED
    (c,) = await nodes("c")
    await a.engine.reset_prefix_cache()
    await b.registry.leave(b.id)
    assert await c.ask(A) == FILLED
    assert a.transfers.reads == 0


async def test_a_client_that_leaves_frees_no_page_that_is_being_written(pair):
    _, b = pair
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


async def test_the_endpoint_takes_the_secret_and_says_what_it_does_not_have(pair):
    a, _ = pair

    async def get(key, part=0, fingerprint="engine-1", client=a.peers_client):
        url, headers = f"http://a/peer/chunks/{key}?part={part}", {FINGERPRINT_HEADER: fingerprint}
        return (await client.get(url, headers=headers)).status_code

    key = str(next(entry.key for entry in a.manager.index if not entry.is_system))
    assert await get(key) == 200
    assert await get(key, client=a.client) == 403
    assert await get("00" * 16) == await get(key, part=1) == 404
    assert await get(key, part=-1) == await get("zz") == 422
    assert await get(key, fingerprint="other") == 409
    assert a.transfers.reads == 1
    a.cache.transfers = None
    assert await get(key) == 404


async def test_claims_of_one_document_and_not_of_the_system_segment_are_no_reason_to_ask(nodes):
    a, b = await nodes("a", "b")
    await a.registry.publish(a.id, {document_key(A): Holding(Tier.DEVICE, 30)})
    assert await b.ask(A) == FILLED
    assert a.transfers.reads == 0


async def test_a_replica_that_decodes_has_chunks_computed(nodes):
    """By the same replica that prefills, for all that decode, and once; also a system segment that was evicted."""
    (one,) = await nodes("p", role="prefill")
    a, b = await nodes("a", "b", role="decode")
    a.cache.costs.fetching[Tier.DEVICE].observe(100, 50)  # fetching is always right
    assert await a.ask(A, B) == [("fetched", "p")] * 2
    await one.tell()
    assert {status for status, _ in await b.ask(B, A)} == {"fetched"}
    assert set(one.llm.computed.values()) == {1}
    before = one.llm.computed.total()
    a.manager.detach(system_of(a), Removal.EVICTED)
    assert await a.ask(B) == [("hit", None)]
    assert one.llm.computed.total() == before
    assert not a.llm.computed
    assert not b.llm.computed


async def test_replicas_that_prefill_compute_for_themselves(nodes):
    """They answer where no others are."""
    one, two = await nodes("p", "q", role="prefill")
    assert await one.ask(A) == FILLED
    assert await two.ask(B) == FILLED


async def test_a_dead_replica_that_prefills_is_followed_by_the_next_and_then_by_the_own_engine(nodes):
    one, two = await nodes("p", "q", role="prefill")
    (a,) = await nodes("a", role="decode")
    one.llm.loses = two.llm.loses = lambda prompt: True  # their fills fail
    assert await a.ask(A) == FILLED
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
    assert await asking == FILLED
    stuck.set()
    await turns(50)


async def test_fills_are_for_peers_with_sense(nodes):
    (a,) = await nodes("p", role="prefill")
    url, own, other = "http://p/peer/fills", {FINGERPRINT_HEADER: "engine-1"}, {FINGERPRINT_HEADER: "other"}
    empty = {"prefix": "", "tokens": "", "is_system": False, "document": None}
    for segments in ([], [empty], [{**empty, "tokens": "01"}]):
        body = {"namespace": "x", "segments": segments}
        assert (await a.peers_client.post(url, json=body, headers=own)).status_code == 400
    assert (await a.peers_client.post(url, json={}, headers=own)).status_code == 400
    assert (await a.peers_client.post(url, json={}, headers=other)).status_code == 409
    assert (await a.client.post(url, json={}, headers=own)).status_code == 403
