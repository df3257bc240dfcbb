# SPDX-License-Identifier: Apache-2.0
"""Pages of cached segments, and who sees which."""

import pytest

from app.catalog.segments import Catalog
from cache.errors import UnknownSegmentError
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


def test_pages_follow_one_another_and_name_each_segment_once(manager):
    """A page begins behind an entry that is gone, too."""
    catalog = Catalog(manager, None)
    everything = catalog.page(None, 100, None)
    assert (len(everything["data"]), everything["next_cursor"]) == (6, None)
    first = catalog.page(None, 4, None)
    second = catalog.page(first["next_cursor"], 4, None)
    assert (len(keys(first)), second["next_cursor"]) == (4, None)
    assert keys(first) + keys(second) == keys(everything)
    dropped, _ = catalog.drop(keys(first)[-1])
    assert str(dropped) == keys(first)[-1]
    assert catalog.page(first["next_cursor"], 4, None) == second
    with pytest.raises(UnknownSegmentError, match=f"no cached segment has the key {dropped}"):
        catalog.find(str(dropped))


@pytest.mark.parametrize(
    ("wanted", "number"),
    [
        ({"kind": "system"}, 2),
        ({"namespace": "b"}, 2),
        ({"namespace": "b", "kind": "chunk"}, 1),
        ({"pinned": False, "state": None}, 6),
        ({"pinned": True}, 0),
        ({"state": "filling"}, 0),
    ],
)
def test_filters(manager, wanted, number):
    assert len(Catalog(manager, None).page(None, 100, None, **wanted)["data"]) == number


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
