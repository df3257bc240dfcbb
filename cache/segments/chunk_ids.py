# SPDX-License-Identifier: Apache-2.0
"""Ids of chunks, which later requests can send instead of the text."""

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from typing import NamedTuple

from cache.errors import ChunkCacheError
from cache.eviction.removal import FOR_GOOD, Removal
from cache.segments.hashing import ChunkHash

MAX_IDS = 256
"""Ids of one segment: each is a record in the tiers."""
MAX_GONE = 100_000
"""Ids remembered after their chunks have gone, with the reason; the oldest are forgotten first."""


class UnknownIdError(ChunkCacheError):
    """No chunk was registered under the id."""


class GoneIdError(ChunkCacheError):
    """The id's chunk is no longer cached; the message has the reason."""


class IdConflictError(ChunkCacheError):
    """The id is registered with another text."""


@dataclass(frozen=True, slots=True)
class RegisteredText:
    """The text and title that an id stands for, and the text that it is computed behind."""

    text: str
    title: str | None = None
    context: str | None = None


@dataclass(slots=True)
class _Registration:
    content: RegisteredText
    keys: set[ChunkHash] = field(default_factory=set)
    """Cached segments of the chunk, behind any system prompts; the registration ends with the last one."""


class ChunkName(NamedTuple):
    """An id in its namespace."""

    namespace: str
    id: str


class ChunkIds:
    """Maps ids to texts, per namespace, while a segment of the chunk is cached.

    ``on_change`` is called with each name that was registered, or whose chunk was removed for good.
    """

    def __init__(self, on_change: Callable[[ChunkName], None]) -> None:
        self._registered: dict[ChunkName, _Registration] = {}
        self._names: defaultdict[ChunkHash, set[ChunkName]] = defaultdict(set)
        self._gone: OrderedDict[ChunkName, str] = OrderedDict()
        self._on_change = on_change

    def __len__(self) -> int:
        return len(self._registered)

    def check(self, namespace: str, id: str, content: RegisteredText) -> None:
        """Raises :class:`IdConflictError` if the id is registered with another text."""
        known = self._registered.get(ChunkName(namespace, id))
        if known is not None and known.content != content:
            raise IdConflictError(f"chunk id {id!r} is registered with another text; use another id, or delete it")

    def register(self, namespace: str, id: str, content: RegisteredText, key: ChunkHash) -> None:
        """Registers an id whose segment ``key`` is cached; raises as :meth:`check` does."""
        self.check(namespace, id, content)
        name = ChunkName(namespace, id)
        if len(known := self._names.get(key, ())) >= MAX_IDS and name not in known:
            raise IdConflictError(f"its text has {MAX_IDS} chunk ids already: use one of them, or delete the chunk")
        self.restore(name, content, key)
        self._on_change(name)

    def restore(self, name: ChunkName, content: RegisteredText, key: ChunkHash) -> None:
        """Registers an id that another process had registered, unless it is registered with another text."""
        registration = self._registered.setdefault(name, _Registration(content))
        if registration.content == content:
            self._gone.pop(name, None)
            registration.keys.add(key)
            self._names[key].add(name)

    def registration(self, name: ChunkName) -> tuple[RegisteredText, Set[ChunkHash]] | None:
        """Text and segments of an id; ``None`` if it isn't registered."""
        known = self._registered.get(name)
        return None if known is None else (known.content, known.keys)

    def content(self, namespace: str, id: str) -> RegisteredText:
        """The id's text; raises :class:`UnknownIdError` or :class:`GoneIdError`."""
        name = ChunkName(namespace, id)
        if (known := self._registered.get(name)) is not None:
            return known.content
        if (why := self._gone.get(name)) is not None:
            raise GoneIdError(f"chunk id {id!r} is no longer cached ({why}): send its text again")
        raise UnknownIdError(f"unknown chunk id {id!r}: send its text")

    def ids(self, key: ChunkHash) -> list[str]:
        """The ids under which a segment is registered."""
        return sorted(name.id for name in self._names.get(key, ()))

    def removed(self, key: ChunkHash, why: Removal) -> None:
        """Records that a segment was removed; ids without another segment end."""
        for name in self._names.pop(key, ()):
            registration = self._registered[name]
            registration.keys.discard(key)
            if not registration.keys:
                del self._registered[name]
                self._gone[name] = why
            if why in FOR_GOOD:
                self._on_change(name)
        while len(self._gone) > MAX_GONE:
            self._gone.popitem(last=False)
