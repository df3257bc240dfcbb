# SPDX-License-Identifier: Apache-2.0
"""Records of chunk ids in tiers: files between those of chunks, with text instead of KV."""

import hashlib
from typing import Final

import torch
from torch import Tensor

from cache.segments.hashing import framed
from engine_ext.wire.chunk_file import ChunkFileError
from engine_ext.wire.prefix import engine_digest

LARGEST_RECORD: Final = 64 << 20
"""Bytes of a record's file at most."""
_ID_BYTES: Final = 28


def record_key(fingerprint: str, namespace: str, id: str) -> bytes:
    """Key of an id's file: digests of the id and of the engine. Longer than any chunk's or block's."""
    name = b"".join(framed(text.encode(errors="surrogatepass")) for text in (namespace, id))
    return hashlib.sha256(name).digest()[:_ID_BYTES] + bytes.fromhex(engine_digest(fingerprint))


def is_record_of(found: str, fingerprint: str) -> bool:
    """Whether a file's key, in hexadecimal, is a :func:`record_key` of this engine."""
    engine = engine_digest(fingerprint)
    return len(found) == 2 * _ID_BYTES + len(engine) and found.endswith(engine)


def record_tensors(data: bytes) -> dict[str, Tensor]:
    """A record as the tensors of a file."""
    return {"record": torch.frombuffer(bytearray(data), dtype=torch.uint8)}


def record_of(tensors: dict[str, Tensor]) -> bytes:
    """The inverse of :func:`record_tensors`; raises :class:`ChunkFileError` for other tensors."""
    record = tensors.get("record")
    if len(tensors) != 1 or record is None or record.dtype != torch.uint8:
        raise ChunkFileError("no record of a chunk id")
    return record.numpy().tobytes()
