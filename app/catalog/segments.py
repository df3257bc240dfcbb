# SPDX-License-Identifier: Apache-2.0
"""Look-up, pinning and removal of cached segments by clients."""

from collections.abc import Iterable
from itertools import islice
from operator import attrgetter
from typing import Any

from app.documents.document import BadRequestError
from cache.errors import CapacityError, UnknownSegmentError
from cache.eviction.removal import Removal
from cache.manager import ChunkCacheManager
from cache.segments.chunk_ids import ChunkName
from cache.segments.hashing import ChunkHash
from cache.segments.index import ChunkKVCache, EntryState
from engine_ext.client.request import Caller


class Catalog:
    """The cached segments that one caller may see.

    Administrators, and everybody on a server without API keys (``caller`` is ``None``), see all of them; others see the
    segments of their own namespaces.
    """

    def __init__(self, manager: ChunkCacheManager, caller: Caller | None) -> None:
        self._manager = manager
        self._caller = caller

    def page(self, cursor: str | None, limit: int, id: str | None, **wanted: Any) -> dict[str, Any]:
        """One page of the segments behind ``cursor``, in pool and tiers, oldest first, as JSON.

        ``id`` and ``wanted`` (described fields, ``None`` for any value) filter. A page begins behind the entry at which
        the previous page ended, even if that entry is gone. Raises :class:`BadRequestError` for a bad cursor.
        """
        self._manager.expire()
        after = _parsed_cursor(cursor)
        filters = {name: value for name, value in wanted.items() if value is not None}
        matching = (
            (entry.tag, described)
            for entry in self._known()
            if entry.tag > after and self._may_see(entry)
            for described in (self.describe(entry),)
            if id in (None, *described["ids"]) and filters.items() <= described.items()
        )
        page = list(islice(matching, limit))
        last = page[-1][0] if page and next(matching, None) is not None else None
        next_cursor = None if last is None else f"{last:x}"
        return {"object": "list", "data": [described for _, described in page], "next_cursor": next_cursor}

    def find(self, key: str) -> ChunkKVCache:
        """The segment of a hexadecimal key.

        Raises :class:`BadRequestError` for anything else, :class:`UnknownSegmentError` if there is no such segment.
        """
        try:
            digest = bytes.fromhex(key)
        except ValueError as error:
            raise BadRequestError("a key is hexadecimal, as in reports and lists", "key") from error
        self._manager.expire()
        entry = self._manager.find(ChunkHash(digest))
        if entry is None or not self._may_see(entry):
            raise UnknownSegmentError(f"no cached segment has the key {key}")
        return entry

    def pin(self, key: str, *, pinned: bool) -> ChunkKVCache:
        """Pins or unpins a segment of the pool; its time to live stays.

        Raises as :meth:`find` does, and :class:`CapacityError` if it is elsewhere, or too little would be unpinned.
        """
        entry = self.find(key)
        if entry.state is EntryState.STORED:
            raise CapacityError(f"segment {key} is in a tier only, and the pool alone has pins: compute it first")
        self._manager.retain(entry, pinned=pinned, expires_at=entry.expires_at)
        return entry

    def drop(self, key: str) -> tuple[ChunkHash, str]:
        """Removes a segment; returns its key and namespace. Raises as :meth:`find` does."""
        entry = self.find(key)
        self._manager.detach(entry, Removal.DELETED)
        return entry.key, _owner(entry)

    def drop_ids(self, namespace: str, ids: Iterable[str]) -> list[ChunkHash]:
        """Removes the segments that only these ids have; returns their keys. Unknown ids are ignored."""
        known, wanted = self._manager.ids, set(ids)
        named = [found for id in wanted if (found := known.registration(ChunkName(namespace, id))) is not None]
        keys = [key for _, keys in named for key in keys if wanted.issuperset(known.ids(key))]
        dropped = [entry for key in set(keys) if (entry := self._manager.find(key)) is not None]
        for entry in dropped:
            self._manager.detach(entry, Removal.DELETED)
        return [entry.key for entry in dropped]

    def describe(self, entry: ChunkKVCache) -> dict[str, Any]:
        """A segment as JSON."""
        is_in_pool = entry.state is not EntryState.STORED
        return {
            "key": str(entry.key),
            "kind": "system" if entry.is_system else "chunk",
            "namespace": _owner(entry),
            "ids": self._manager.ids.ids(entry.key),
            "tokens": entry.identity.num_tokens,
            "pages": entry.num_pages,
            "bytes": entry.num_pages * self._manager.config.page_bytes,
            "state": entry.state.name.lower(),
            "tiers": [*(["pool"] if is_in_pool else []), *entry.tiers],
            "pinned": entry.pinned,
            "created_at": entry.created_at,
            "last_used_at": entry.last_used_at,
            "expires_at": entry.expires_at,
            "hits": entry.hits,
            "leases": entry.leases,
        }

    def _known(self) -> Iterable[ChunkKVCache]:
        """Entries of pool and tiers, oldest first; a segment that is being loaded is in the pool."""
        index, away = self._manager.index, self._manager.away
        elsewhere = [entry for entry in away if index.by_key(entry.key) is None]
        return sorted([*index, *elsewhere], key=attrgetter("tag")) if elsewhere else index

    def _may_see(self, entry: ChunkKVCache) -> bool:
        return self._caller is None or self._caller.is_admin or self._caller.may_use(_owner(entry))


def _owner(entry: ChunkKVCache) -> str:
    return entry.identity.scope.owner


def _parsed_cursor(cursor: str | None) -> int:
    try:
        return -1 if cursor is None else int(cursor, 16)
    except ValueError as error:
        raise BadRequestError("not a next_cursor of this server", "cursor") from error
