# SPDX-License-Identifier: Apache-2.0
"""One worker's KV of one segment as safetensors, with all that is needed to tell whether it may be used.

Layer ``i`` has ``i.key`` and ``i.value``, ``[tokens, heads, size]``, as they were computed: keys are rotated to the
positions behind the segment's prefix. The metadata says what they are, with a checksum over all of them.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

FORMAT = "tessera-kv-1"
_LENGTH_BYTES = 8
_LONGEST_HEADER = 16 << 20


class ChunkFileError(ValueError):
    """The bytes are not the KV that was wanted; the message says why. None of it was used."""


@dataclass(frozen=True, slots=True)
class ChunkFileLabel:
    """Which segment's KV a file has, of which engine, and of which worker of how many.

    ``prefix`` and ``tokens`` are packed token ids (:func:`cache.layout.pack`) in hexadecimal, ``key`` is the segment's.
    """

    fingerprint: str
    key: str
    prefix: str
    tokens: str
    rank: int
    ranks: int

    def to_metadata(self, checksum: str) -> dict[str, str]:
        """The metadata of a file."""
        return {"format": FORMAT, "checksum": checksum, **{name: str(value) for name, value in asdict(self).items()}}


def pack_file(label: ChunkFileLabel, tensors: Mapping[str, Tensor]) -> bytes:
    """A file of ``tensors``, which are contiguous and on the CPU."""
    return save(dict(tensors), label.to_metadata(_checksum(tensors)))


def unpack_file(data: bytes, label: ChunkFileLabel) -> dict[str, Tensor]:
    """The tensors of a file that has exactly the KV that ``label`` says; raises :class:`ChunkFileError`."""
    found = _metadata(data)
    try:
        tensors = load(data)
    except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise ChunkFileError(f"no safetensors: {error}") from error
    wanted = label.to_metadata(_checksum(tensors))
    for name, value in wanted.items():
        if found.get(name) != value:
            raise ChunkFileError(f"{name} is {_shown(found.get(name))}, not {_shown(value)}")
    return tensors


def _metadata(data: bytes) -> dict[str, str]:
    length = int.from_bytes(data[:_LENGTH_BYTES], "little")
    if length > min(len(data) - _LENGTH_BYTES, _LONGEST_HEADER):
        raise ChunkFileError(f"{len(data)} bytes are too few for a header of {length}")
    try:
        metadata = json.loads(data[_LENGTH_BYTES : _LENGTH_BYTES + length])["__metadata__"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ChunkFileError(f"no safetensors header with metadata: {error!r}") from error
    if not isinstance(metadata, dict):
        raise ChunkFileError("the metadata are no object")
    return metadata


def _checksum(tensors: Mapping[str, Tensor]) -> str:
    digest = xxhash.xxh3_128()
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _shown(value: object) -> str:
    return repr(value)[:80]
