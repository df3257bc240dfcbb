# SPDX-License-Identifier: Apache-2.0
"""Documents and their chunks."""

from cache.segments.holdings import Holding, Holdings, Tier
from tests.cache.registries import entry_of, key

PAGE_BYTES = 100


def test_a_document_in_parts_is_held_as_far_as_they_are():
    holdings = Holdings(PAGE_BYTES)
    parts = [entry_of(1, tokens=10), entry_of(2, tokens=5)]
    for part in parts:
        holdings.add(key(1), part)
    pages = sum(part.num_pages for part in parts)
    assert holdings.holding(key(1)) == Holding(Tier.DEVICE, 15, pages * PAGE_BYTES)
    holdings.removed(parts[0].key)
    assert holdings.holding(key(1)).tokens == 5
    holdings.removed(parts[1].key)
    assert holdings.holding(key(1)) is None
    assert len(holdings) == 0


def test_a_chunk_may_be_part_of_several_documents():
    holdings, shared = Holdings(PAGE_BYTES), entry_of(1)
    holdings.add(key(1), shared)
    holdings.add(key(2), shared)
    assert holdings.take_changes(10) == {key(1): holdings.holding(key(1)), key(2): holdings.holding(key(2))}
    holdings.removed(shared.key)
    assert holdings.take_changes(10) == {key(1): None, key(2): None}


def test_changes_are_taken_once_oldest_first_and_as_they_are_now():
    holdings = Holdings(PAGE_BYTES)
    entries = [entry_of(number) for number in range(5)]
    for number, entry in enumerate(entries):
        holdings.add(key(number), entry)
    holdings.removed(entries[1].key)
    first = holdings.take_changes(3)
    assert list(first) == [key(0), key(1), key(2)]
    assert first[key(1)] is None
    assert list(holdings.take_changes(3)) == [key(3), key(4)]
    assert holdings.take_changes(3) == {}
    holdings.add(key(3), entries[3])
    assert holdings.take_changes(3) == {}


def test_everything_can_be_told_again():
    holdings = Holdings(PAGE_BYTES)
    holdings.add(key(1), entry_of(1))
    holdings.take_changes(10)
    holdings.tell_all()
    assert list(holdings.take_changes(10)) == [key(1)]


def test_chunks_that_nobody_named_are_nothing_to_tell():
    holdings = Holdings(PAGE_BYTES)
    holdings.removed(entry_of(1).key)
    assert holdings.take_changes(10) == {}
