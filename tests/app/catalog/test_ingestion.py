# SPDX-License-Identifier: Apache-2.0
"""Pins, ids and times to live of chunks computed ahead of time."""

from types import SimpleNamespace

import pytest

from app.access.limits import LIMITS, TenantLimits
from app.access.tenants import Tenant, hash_of
from app.catalog.ingestion import Keeper, _within_limits
from app.documents.document import Document
from cache.errors import CapacityError
from cache.eviction.removal import Removal
from cache.positions.layout import Chunk, pack
from cache.segments.chunk_ids import MAX_IDS, IdConflictError, RegisteredText
from cache.segments.holdings import DocumentKey
from engine_ext.client.background import Ingested, Ingestion
from replicas.document_keys import id_key
from tests.cache.helpers import Clock, fill, make_manager
from tests.support.variables import having

TEXT = DocumentKey(b"t" * 16)


@pytest.fixture
def manager():
    manager = make_manager(10, clock=Clock())
    fill(manager, range(100, 104))
    return manager


@pytest.fixture
def entry(manager):
    return next(entry for entry in manager.index if not entry.is_system)


def keeper(manager, *documents, pinned=False, ttl_s=None):
    return Keeper(manager, "n", documents, [TEXT] * len(documents), pinned=pinned, ttl_s=ttl_s)


def chunk(id=None):
    return SimpleNamespace(document=0, id=id)


def test_a_chunk_is_pinned_named_and_registered_under_its_id_if_it_has_one(manager, entry):
    keeper(manager, Document("one")).keep(chunk(), entry)
    assert (entry.pinned, entry.expires_at, len(manager.ids)) == (False, None, 0)
    keeper(manager, Document("one", "d1", "T"), pinned=True, ttl_s=60).keep(chunk("d1"), entry)
    assert (entry.pinned, entry.expires_at) == (True, 1060.0)
    assert manager.ids.content("n", "d1") == RegisteredText("one", "T")
    assert {TEXT, id_key("n", "d1")} <= manager.holdings.take_changes(100)[0].keys()


def test_an_id_with_two_texts_is_refused_before_anything_is_computed(manager, entry):
    with pytest.raises(IdConflictError, match="chunk id 'd1' is given with two texts"):
        keeper(manager, Document("one", "d1"), Document("two", "d1"))
    manager.ids.register("n", "d1", RegisteredText("one"), entry.key)
    keeper(manager, Document("one", "d1"))
    for conflicting in (Document("two", "d1"), Document("one", "d1", "T"), Document("one", "d1", context="before")):
        with pytest.raises(IdConflictError, match="registered with another text; use another id, or delete it"):
            keeper(manager, Document("x"), conflicting)
    manager.detach(entry, Removal.DELETED)
    keeper(manager, Document("two", "d1"))


def test_what_another_call_has_named_meanwhile_is_not_pinned(manager, entry):
    late = keeper(manager, Document("two", "d1"), pinned=True)
    keeper(manager, Document("one", "d1")).keep(chunk("d1"), entry)
    with pytest.raises(IdConflictError):
        late.keep(chunk("d1"), entry)
    assert not entry.pinned


def test_what_can_not_be_pinned_is_not_registered():
    manager = make_manager(2)
    fill(manager, range(100, 104))
    system, entry = sorted(manager.index, key=lambda entry: not entry.is_system)
    manager.retain(system, pinned=True, expires_at=None)
    with pytest.raises(CapacityError):
        keeper(manager, Document("one", "d1"), pinned=True).keep(chunk("d1"), entry)
    assert len(manager.ids) == 0
    assert keeper(manager).num_cached({str(entry.key), "00ff"}) == 1


class FakeBackground:
    """Computes everything at once."""

    is_stopping = False
    ingestion = Ingestion(SimpleNamespace(prompt=SimpleNamespace(chunk_prefix=(1,) * 50)), None)

    async def run(self, ingestion, chunks):
        for each in chunks:
            yield Ingested(each, "key", "filled")


@pytest.mark.parametrize(("per_minute", "of_contexts", "minutes"), [(500, 0, 84), (500, 100, 168), (None, 0, 0)])
async def test_chunks_are_charged_and_computed_at_the_pace_of_the_tokens_per_minute(
    monkeypatch, per_minute, of_contexts, minutes
):
    """As prompts are: what is left when one begins may be exceeded by it."""
    clock = Clock()
    began = clock.now

    async def sleep(seconds):
        clock.now += max(seconds, 0.001)  # a clock goes on

    monkeypatch.setattr("app.catalog.ingestion.asyncio.sleep", sleep)
    limits = TenantLimits(Tenant(name="t", keys=(hash_of("k"),), tokens_per_minute=per_minute), clock=clock)
    chunks = [Chunk(pack((1,) * 100), context=pack((2,) * of_contexts))] * 421
    with having(LIMITS, limits):
        results = [each async for each in _within_limits(FakeBackground(), FakeBackground.ingestion, chunks)]
    assert [each.status for each in results] == ["filled"] * 421
    assert (clock.now - began) / 60 == pytest.approx(minutes, abs=2)


async def test_a_server_that_stops_waits_for_nobodys_tokens():
    limits = TenantLimits(Tenant(name="t", keys=(hash_of("k"),), tokens_per_minute=1), clock=Clock())
    background = FakeBackground()
    background.is_stopping = True
    chunks = [Chunk(pack((1,) * 1000))] * 3
    with having(LIMITS, limits):
        results = [each async for each in _within_limits(background, background.ingestion, chunks)]
    assert len(results) == 3


def test_one_text_has_a_bounded_number_of_ids(manager, entry):
    for number in range(MAX_IDS):
        keeper(manager, Document("one", f"d{number}")).keep(chunk(f"d{number}"), entry)
    keeper(manager, Document("one", "d0")).keep(chunk("d0"), entry)
    with pytest.raises(IdConflictError, match=f"{MAX_IDS} chunk ids already"):
        keeper(manager, Document("one", "more")).keep(chunk("more"), entry)
