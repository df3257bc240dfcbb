# SPDX-License-Identifier: Apache-2.0
"""The protocol of a worker's file server: a message for each command, and the answer to all of them.

The app sends :data:`SegmentMessage` and :data:`BlockMessage` to two sockets of each worker, the engine core the latter.
A worker answers each message on the connection that it came by, in order.
"""

import os
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Literal

import msgspec

from cache.tiers.tier import Address, Buffer
from engine_ext.wire.chunk_file import ChunkFileLabel

Fetched = Literal["fetched", "absent", "failed"]
"""Outcome of a fetch from a replica that has the file, lacks it, or can't be asked."""


class _Message(msgspec.Struct, tag=True):
    """Travels with the name of its class."""

    def to_bytes(self) -> bytes:
        """The serialized message."""
        return msgspec.msgpack.encode(self)


class _OfPages(_Message):
    """Concerns the pages of a segment, which have this tag."""

    label: ChunkFileLabel
    pages: list[int]
    tag: int


class Read(_OfPages):
    """Send the pages as a file, which follows an answer without error."""


class ReadStored(_Message):
    """Send a segment's file from the first tier that has it, which the answer names; the file follows."""

    label: ChunkFileLabel


class Store(_OfPages):
    """Export the pages to every tier."""


class Load(_OfPages):
    """Import the pages from one of ``tiers``, each of which gets ``limit_s`` (0: no limit).

    ``others`` are numbers of parts to look for instead where the label's part is in none.
    """

    others: tuple[int, ...]
    tiers: tuple[str, ...]
    limit_s: float


class Fetch(_OfPages):
    """Fill the pages from a replica's file of this part at ``url``, signed with the peers' ``secret``.

    ``engine`` is the fingerprint of engines whose parts are this one's.
    """

    url: str
    engine: str
    secret: str
    limit_s: float


class Drop(_Message):
    """Remove files from every tier."""

    addresses: list[Address]


class KeepRecord(_Message):
    """Store the record of a chunk id (:mod:`engine_ext.wire.id_record`) in every tier, instead of an earlier one."""

    label: ChunkFileLabel
    file: bytes


class FindRecord(_Message):
    """Answer with the ``record``, a file, and the ``tier`` that has it."""

    label: ChunkFileLabel


class ListRecords(_Message):
    """Answer with the ``keys`` of an engine's records."""

    fingerprint: str


SegmentMessage = Read | ReadStored | Store | Load | Fetch | Drop | KeepRecord | FindRecord | ListRecords


class StageBlocks(_Message):
    """Read files from the tiers as stage ``name``, in the order of ``keys``, until one is missing; ``count`` them.

    ``keys`` are vLLM's (``OffloadKey``) in hexadecimal.
    """

    name: str
    namespace: str
    keys: list[str]


class ReleaseBlocks(_Message):
    """Forget the stage ``name``."""

    name: str


class DropBlocks(_Message):
    """Remove a namespace's files from the tiers, or everybody's without one."""

    namespace: str = ""


class StopBlocks(_Message):
    """Stage and store nothing from now on."""


class CountBlocks(_Message):
    """``count`` the blocks still to be stored, and one more while requests run."""


BlockMessage = StageBlocks | ReleaseBlocks | DropBlocks | StopBlocks | CountBlocks

_segment_messages: "msgspec.msgpack.Decoder[SegmentMessage]" = msgspec.msgpack.Decoder(SegmentMessage)
_block_messages: "msgspec.msgpack.Decoder[BlockMessage]" = msgspec.msgpack.Decoder(BlockMessage)


def segment_message(data: bytes) -> SegmentMessage:
    """The message in ``data``; raises ``msgspec.ValidationError`` for anything else."""
    return _segment_messages.decode(data)


def block_message(data: bytes) -> BlockMessage:
    """The message in ``data``; raises ``msgspec.ValidationError`` for anything else."""
    return _block_messages.decode(data)


@dataclass(slots=True)
class Answer:
    """An error, if any, and what the message asks for; ``tier`` is the one that had it, ``None`` if none had.

    ``num_bytes`` is the length of the file that follows, was loaded, stored or found. ``events`` and ``held`` are the
    tiers': what happened, and the bytes in each.
    """

    error: str = ""
    tier: str | None = None
    fetched: Fetched | None = None
    num_bytes: int = 0
    events: list[tuple[str, str]] = field(default_factory=list)
    held: dict[str, int] = field(default_factory=dict)
    count: int = 0
    keys: list[str] = field(default_factory=list)
    record: bytes = b""

    def to_bytes(self) -> bytes:
        """The serialized answer."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def from_bytes(cls, data: bytes) -> "Answer":
        """The inverse of :meth:`to_bytes`."""
        return msgspec.msgpack.decode(data, type=cls)


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
