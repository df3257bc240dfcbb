# SPDX-License-Identifier: Apache-2.0
"""Documents and their chunks."""

from dataclasses import replace

import pytest

from cache.segments.holdings import Holding, Holdings, Tier
from cache.segments.index import EntryState
from tests.cache.helpers import entry_of, key


def test_a_document_in_parts_is_held_as_far_as_they_are():
    holdings = Holdings()
    parts = [entry_of(1, tokens=10), entry_of(2, tokens=5)]
    for part in parts:
        holdings.add(key(1), part)
    assert holdings.held(key(1)) == Holding(Tier.DEVICE, 15)
    holdings.removed(parts[0].key)
    assert holdings.held(key(1)).tokens == 5
    holdings.removed(parts[1].key)
    assert holdings.held(key(1)) is None
    assert len(holdings) == 0


def test_a_chunk_may_be_part_of_several_documents():
    holdings, shared = Holdings(), entry_of(1)
    holdings.add(key(1), shared)
    holdings.add(key(2), shared)
    assert holdings.take_changes(10)[0] == {key(1): holdings.held(key(1)), key(2): holdings.held(key(2))}
    holdings.removed(shared.key)
    assert holdings.take_changes(10)[0] == {key(1): None, key(2): None}


def test_changes_are_taken_once_oldest_first_and_as_they_are_now():
    holdings = Holdings()
    entries = [entry_of(number) for number in range(5)]
    for number, entry in enumerate(entries):
        holdings.add(key(number), entry)
    holdings.removed(entries[1].key)
    first, _ = holdings.take_changes(3)
    assert list(first) == [key(0), key(1), key(2)]
    assert first[key(1)] is None
    assert list(holdings.take_changes(3)[0]) == [key(3), key(4)]
    assert holdings.take_changes(3) == ({}, {})
    holdings.add(key(3), entries[3])
    holdings.removed(entry_of(9).key)  # which nobody named
    assert holdings.take_changes(3) == ({}, {})
    holdings.tell_all()
    assert set(holdings.take_changes(10)[0]) == {key(0), key(2), key(3), key(4)}


def stored_as(entry, *tiers, state=EntryState.STORED):
    return replace(entry, tiers=tiers, state=state)


def test_a_document_is_where_the_slowest_of_its_parts_is():
    holdings, (a, b) = Holdings(), (entry_of(1), entry_of(2))
    for entry in (a, b):
        holdings.add(key(1), entry)
    holdings.take_changes(10)
    holdings.moved(stored_as(a, "file", state=EntryState.READY))
    assert holdings.take_changes(10) == ({key(1): Holding(Tier.DEVICE, 20)}, {})
    holdings.moved(stored_as(b, "host", "file"))
    held, stored = Holding(Tier.HOST, 20), Holding(Tier.DISK, 20)
    assert holdings.take_changes(10) == ({key(1): held}, {key(1): stored})
    holdings.moved(stored_as(a, "file"))
    assert holdings.take_changes(10) == ({key(1): None}, {key(1): stored})


@pytest.mark.parametrize(("for_good", "told"), [(False, {}), (True, {key(1): None})])
def test_storage_is_told_only_of_what_is_dropped_for_good(for_good, told):
    holdings = Holdings()
    holdings.add(key(1), stored_as(entry_of(1), "file"))
    holdings.take_changes(10)
    holdings.removed(entry_of(1).key, for_good=for_good)
    assert holdings.take_changes(10) == ({key(1): None}, told)
