# SPDX-License-Identifier: Apache-2.0
"""Hash collisions cause no wrong hit, and no page is lost or used twice."""

from contextlib import suppress

import pytest

from cache.errors import CapacityError
from cache.lease import ChunkStatus
from cache.segments.hashing import CacheScope
from tests.cache.helpers import (
    SYSTEM,
    ChunkCollidingHasher,
    CollidingHasher,
    acquire,
    fill,
    make_manager,
    tokens,
)

A, B = tokens(100, 4), tokens(200, 6)


def test_an_equal_key_of_other_tokens_is_a_miss_that_displaces_the_older():
    manager = make_manager(hasher=CollidingHasher("engine"))
    fill(manager, A, system=())
    lease = acquire(manager, B, system=())
    assert lease.chunks[0].status is ChunkStatus.FILLED
    assert [entry.identity.token_ids for entry in manager.index] == [B]
    assert manager.pool.num_free == 10  # A's page is free again
    manager.check_integrity()


def test_the_same_tokens_still_hit():
    manager = make_manager(hasher=CollidingHasher("engine"))
    fill(manager, A, system=())
    assert acquire(manager, A, system=()).chunks[0].status is ChunkStatus.HIT


def test_colliding_scopes_never_share():
    manager = make_manager(hasher=CollidingHasher("engine"))
    fill(manager, A, system=())
    assert acquire(manager, A, system=(), scope=CacheScope("tenant")).chunks[0].status is ChunkStatus.FILLED
    assert acquire(manager, A, system=(), scope=CacheScope(adapter="x")).chunks[0].status is ChunkStatus.FILLED


def test_colliding_chunks_behind_other_systems_never_share():
    manager = make_manager(hasher=ChunkCollidingHasher("engine"))
    fill(manager, A)
    assert acquire(manager, A, system=(7, 7)).chunks[0].status is ChunkStatus.FILLED


def test_displacing_a_leased_entry_keeps_its_pages_until_it_is_released():
    manager = make_manager(hasher=CollidingHasher("engine"))
    fill(manager, A, system=())
    held = acquire(manager, A, system=())
    other = acquire(manager, B, system=())
    old, new = held.chunks[0].entry, other.chunks[0].entry
    assert old.detached
    assert set(old.pages).isdisjoint(new.pages)
    assert set(old.pages).isdisjoint(manager.pool.free_pages())
    manager.check_integrity()
    manager.release(held)
    assert set(old.pages) <= manager.pool.free_pages()
    manager.check_integrity()


def test_displacing_an_entry_that_is_being_written_keeps_its_pages_until_the_fill_ended():
    manager = make_manager(hasher=CollidingHasher("engine"))
    held = acquire(manager, A, system=())
    other = acquire(manager, B, system=())
    old = held.chunks[0].entry
    manager.release(held)
    assert set(old.pages).isdisjoint(manager.pool.free_pages())
    manager.fill_succeeded(held.fills[0])
    assert old.detached
    assert set(old.pages) <= manager.pool.free_pages()
    manager.fill_succeeded(other.fills[0])
    manager.release(other)
    assert manager.is_idle
    assert [entry.identity.token_ids for entry in manager.index] == [B]


def test_a_failed_fill_does_not_remove_what_displaced_it():
    manager = make_manager(hasher=CollidingHasher("engine"))
    held = acquire(manager, A, system=())
    fill(manager, B, system=())
    manager.fill_failed(held.fills[0])
    manager.release(held)
    assert [entry.identity.token_ids for entry in manager.index] == [B]
    assert manager.is_idle
    manager.check_integrity()


@pytest.mark.parametrize("cached", [(), (A,), (B,), (A, B)])
def test_colliding_chunks_of_one_request_never_get_each_others_tokens(cached):
    """Refused (and run in full attention) or stored separately; no page is lost or used twice."""
    manager = make_manager(hasher=ChunkCollidingHasher("engine"))
    for chunk in cached:
        fill(manager, chunk)
    with suppress(CapacityError):
        lease = acquire(manager, A, B)
        assert [segment.entry.identity.token_ids for segment in lease.segments] == [SYSTEM, A, B]
        pages = [page for segment in lease.segments for page in segment.entry.pages]
        assert len(pages) == len(set(pages))
        assert manager.pool.free_pages().isdisjoint(pages)
    manager.check_integrity()
