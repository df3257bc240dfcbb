# SPDX-License-Identifier: Apache-2.0
"""Eviction policies: LRU against a plain list, and invariants of each policy under any calls."""

import itertools
import time
from dataclasses import dataclass
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.eviction.policies import EvictionPolicyName, make_policy

ENTRIES = 8
POLICIES = get_args(EvictionPolicyName)

# Calls of a policy, each with its entry.
calls = st.lists(st.tuples(st.sampled_from(["added", "used", "evicted", "removed"]), st.integers(0, ENTRIES - 1)))
# Actions of a cache: request an entry; evict some, sparing some leased ones; look without evicting.
requests = st.lists(st.tuples(st.integers(0, ENTRIES - 1), st.integers(0, 3), st.integers(0, 2), st.booleans()))
deterministic = settings(derandomize=True, database=None, deadline=None)


@dataclass(eq=False)
class Entry:
    """A segment, small by default."""

    key: int
    num_pages: int = 1


def make_entries(count=ENTRIES):
    """Entries of several sizes."""
    return [Entry(key, 1 + key % 3) for key in range(count)]


def take(policy, count, leased=()):
    """Evicts ``count`` victims, sparing leased entries; returns the victims."""
    victims = list(itertools.islice((entry for entry in policy.victims() if entry not in leased), count))
    for entry in victims:
        policy.evicted(entry)
    return victims


@pytest.mark.parametrize("name", POLICIES)
@given(calls=calls)
@deterministic
def test_victims_are_exactly_what_is_held_once_each(name, calls):
    policy, entries, held = make_policy(name), make_entries(), set()
    for call, number in calls:
        entry = entries[number]
        getattr(policy, call)(entry)
        if call == "added":
            held.add(entry)
        elif call != "used":
            held.discard(entry)
        first, victims = next(policy.victims(), None), list(policy.victims())
        assert len(victims) == len(held)
        assert set(victims) == held
        assert list(policy.victims()) == victims, "looking changes nothing"
        assert first is (victims[0] if victims else None)


@pytest.mark.parametrize("name", POLICIES)
@given(requests=requests)
@deterministic
def test_a_cache_that_evicts_never_sees_what_is_gone(name, requests):
    """Segments return as new objects with the same key, as in the manager."""
    policy, held = make_policy(name), {}
    for number, evicted, leased, in_vain in requests:
        if number in held:
            policy.used(held[number])
        else:
            held[number] = make_entries()[number]
            policy.added(held[number])
        if in_vain:
            assert set(policy.victims()) == set(held.values())
        for entry in take(policy, evicted, leased=list(held.values())[:leased]):
            assert held.pop(entry.key) is entry
        assert sorted(entry.key for entry in policy.victims()) == sorted(held)


@given(calls=calls)
@deterministic
def test_lru_is_a_list_in_order_of_use(calls):
    policy, entries, model = make_policy("lru"), make_entries(), []
    for call, number in calls:
        entry = entries[number]
        getattr(policy, call)(entry)
        if call == "added" and entry not in model:
            model.append(entry)
        elif call == "used" and entry in model:
            model.append(model.pop(model.index(entry)))
        elif call in ("evicted", "removed") and entry in model:
            model.remove(entry)
        assert list(policy.victims()) == model


@pytest.mark.parametrize("name", POLICIES)
def test_time_grows_with_the_number_of_entries(name):
    """Four times as many take some four times as long; with a look at all entries for each victim, sixteen times."""

    def seconds(number):
        policy, entries = make_policy(name), make_entries(number)
        started = time.process_time()
        for entry in entries:
            policy.added(entry)
            policy.used(entry)
            policy.used(entry)
        for _ in range(number // 2):
            take(policy, 1)
        return time.process_time() - started

    assert any(seconds(10_000) / seconds(2_500) < 8 for _ in range(3))


@pytest.mark.parametrize(("name", "resists"), [("lru", False), ("s3fifo", True)])
def test_what_a_scan_leaves_of_the_entries_in_use(name, resists):
    policy = make_policy(name)
    hot = [Entry(key) for key in range(20)]
    for entry in hot:
        policy.added(entry)
    for entry in hot * 3:
        policy.used(entry)
    gone = []
    for key in range(100, 300):
        policy.added(Entry(key))
        if key >= 180:  # full
            gone += take(policy, 1)
    assert set(gone).isdisjoint(hot) == resists


class TestS3FIFO:
    @pytest.mark.parametrize("leaves", ["evicted", "removed"])
    def test_what_comes_back_soon_after_it_was_given_up_is_kept_longer_and_what_was_deleted_is_new(self, leaves):
        policy = make_policy("s3fifo")
        policy.added(gone := Entry(0))
        getattr(policy, leaves)(gone)
        policy.added(back := Entry(gone.key))
        policy.added(new := Entry(1))
        assert list(policy.victims()) == ([new, back] if leaves == "evicted" else [back, new])

    def test_uses_beyond_three_give_no_more_chances(self):
        policy = make_policy("s3fifo")
        hot, warm = Entry(0), Entry(1)
        for entry, uses in ((hot, 50), (warm, 2)):
            policy.added(entry)
            for _ in range(uses):
                policy.used(entry)
        policy.added(Entry(2))
        assert [entry.key for entry in take(policy, 3)] == [2, 0, 1]
