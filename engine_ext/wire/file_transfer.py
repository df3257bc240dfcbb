# SPDX-License-Identifier: Apache-2.0
"""Messages between the app and a worker's file server."""

import json
import os
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from typing import Literal

from cache.tiers.tier import Buffer
from engine_ext.wire.chunk_file import ChunkFileLabel

Verb = Literal["read", "fetch", "load", "store", "drop", "keep", "find", "list"]

Fetched = Literal["fetched", "absent", "failed"]
"""Outcome of a fetch from a replica that has the file, lacks it, or can't be asked."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """A command for the pages of a segment.

    ``read``: send them as a file, which follows the answer. ``fetch``: fill them from the replica's file at ``url``
    and the worker's rank, signed with the peers' ``secret``, within ``limit_s``. ``load``: import them from one of
    ``tiers``, each of which gets ``limit_s`` (0: no limit). ``store``: export them to every tier. ``drop``: remove
    them from every tier. Of records of ids (:mod:`engine_ext.wire.id_record`), which have no pages: ``keep``: store
    the file that follows in every tier, instead of an earlier one. ``find``: send the file, which is empty if no
    tier has one. ``list``: the answer's ``keys`` are those of the engine's records.
    """

    verb: Verb
    label: ChunkFileLabel
    pages: list[int]
    tag: int
    tiers: tuple[str, ...] = ()
    limit_s: float = 0.0
    url: str = ""
    secret: str = field(default="", repr=False)

    @property
    def takes_file(self) -> bool:
        """Whether a file follows the message."""
        return self.verb == "keep"

    @property
    def sends_file(self) -> bool:
        """Whether a file follows an answer without error."""
        return self.verb in ("read", "find")

    def to_bytes(self) -> bytes:
        """The serialized message."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> "Transfer":
        """The inverse of :meth:`to_bytes`."""
        fields = json.loads(data)
        return cls(label=ChunkFileLabel(**fields.pop("label")), **fields)


@dataclass(slots=True)
class Answer:
    """Result of a transfer: an error, if any; the ``tier`` of a load, or ``None``; ``fetched``; the tiers' events.

    ``num_bytes`` is the length of a file that follows, or of one that was loaded or stored. ``held`` has the bytes in
    each tier, ``count`` the result of a command for blocks (:class:`engine_ext.wire.prefix.BlockCommand`).
    """

    error: str = ""
    tier: str | None = None
    fetched: Fetched | None = None
    num_bytes: int = 0
    events: list[tuple[str, str]] = field(default_factory=list)
    held: dict[str, int] = field(default_factory=dict)
    count: int = 0
    keys: list[str] = field(default_factory=list)

    def to_bytes(self) -> bytes:
        """The serialized message."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> "Answer":
        """The inverse of :meth:`to_bytes`."""
        return cls(**json.loads(data))


def send_file(connection: Connection, file: Buffer) -> None:
    """Sends a file's bytes; the other side knows how many there are."""
    left = memoryview(file)
    while left:
        left = left[os.write(connection.fileno(), left) :]


def receive_file(connection: Connection, into: memoryview) -> None:
    """Fills memory with the bytes of a file; raises ``EOFError``."""
    while into:
        if not (count := os.readv(connection.fileno(), [into])):
            raise EOFError
        into = into[count:]
