# SPDX-License-Identifier: Apache-2.0
"""Pages of cached segments, and who sees which."""

from itertools import chain
from operator import attrgetter

import pytest

from app.catalog.segments import Catalog
from cache.errors import UnknownSegmentError
from cache.segments.chunk_ids import RegisteredText
from cache.segments.hashing import CacheScope
from engine_ext.client.request import Caller
from tests.app.helpers import refused
from tests.cache.helpers import fill, make_manager


@pytest.fixture
def manager():
    """Three chunks and a system segment of namespace a, one chunk and a system segment of b."""
    manager = make_manager(20)
    fill(manager, range(100, 104), range(200, 204), range(300, 304), scope=CacheScope("a"))
    fill(manager, range(400, 404), scope=CacheScope("b\0salt"))
    return manager


def keys(page):
    return [each["key"] for each in page["data"]]


def listed(manager, id=None, **wanted):
    return keys(Catalog(manager, None).page(None, 100, id, **wanted))


@pytest.mark.parametrize("limit", [1, 4, 5, 6, 1000])
def test_pages_of_any_length_cover_everything_oldest_first(manager, limit):
    catalog, cursor, pages = Catalog(manager, None), None, []
    while cursor is not None or not pages:
        page = catalog.page(cursor, limit, None)
        cursor = page["next_cursor"]
        pages.append(keys(page))
    oldest_first = sorted(manager.index, key=attrgetter("tag"))
    assert list(chain(*pages)) == [str(entry.key) for entry in oldest_first]
    assert {len(page) for page in pages[:-1]} <= {limit}


def test_what_stays_is_listed_once_while_others_come_and_go():
    manager = make_manager(100)
    fill(manager, *(range(first, first + 4) for first in range(100, 2100, 100)))
    catalog, before, cursor = Catalog(manager, None), listed(manager, kind="chunk"), None
    seen, gone, new = [], set(), set()
    while cursor is not None or not seen:
        page = catalog.page(cursor, 3, None, kind="chunk")
        cursor = page["next_cursor"]
        seen += keys(page)
        if len(gone) < 12:
            # The page's last entry (the cursor), another one of it, and one still to come; then there are new ones.
            later = next(key for key in reversed(before) if key not in seen and key not in gone)
            for key in (seen[-1], seen[-2], later):
                catalog.drop(key)
                gone.add(key)
            known = set(listed(manager, kind="chunk"))
            fill(manager, range(3000 + len(gone), 3004 + len(gone)))
            new |= set(listed(manager, kind="chunk")) - known
    assert len(seen) == len(set(seen))
    assert set(before) - gone <= set(seen)
    assert len(new) == 4
    assert new <= set(seen)


def test_pinned_ones_and_those_of_an_id(manager):
    one, other = (next(entry for entry in manager.index if entry.identity.token_ids[0] == n) for n in (100, 400))
    manager.retain(one, pinned=True, expires_at=None)
    for entry in (one, other):
        manager.ids.register(entry.identity.scope.owner, "p", RegisteredText("one"), entry.key)
    assert listed(manager, pinned=True) == [str(one.key)]
    assert len(listed(manager, pinned=False)) == 5
    assert listed(manager, "p") == [str(one.key), str(other.key)]
    assert listed(manager, "p", namespace="b") == [str(other.key)]
    assert listed(manager, "nobody") == []


@pytest.mark.parametrize(
    ("wanted", "number"),
    [
        ({"kind": "system"}, 2),
        ({"namespace": "b"}, 2),
        ({"namespace": "b", "kind": "chunk"}, 1),
        ({"pinned": False, "state": None}, 6),
        ({"pinned": True}, 0),
        ({"state": "filling"}, 0),
        ({"state": "ready"}, 6),
    ],
)
def test_filters(manager, wanted, number):
    assert len(listed(manager, **wanted)) == number


@pytest.mark.parametrize(
    ("caller", "number"),
    [(Caller("b"), 2), (Caller("b", frozenset({"a"})), 6), (Caller("c"), 0), (Caller("c", is_admin=True), 6)],
)
def test_callers_see_their_namespaces(manager, caller, number):
    catalog = Catalog(manager, caller)
    seen = keys(catalog.page(None, 100, None))
    assert len(seen) == number
    for key in set(keys(Catalog(manager, None).page(None, 100, None))) - set(seen):
        with pytest.raises(UnknownSegmentError):
            catalog.pin(key, pinned=True)


def test_a_foreign_cursor_is_refused(manager):
    with refused("cursor", "not a next_cursor"):
        Catalog(manager, None).page("x", 1, None)
