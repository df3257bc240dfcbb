# SPDX-License-Identifier: Apache-2.0
"""A part of one segment's KV (:mod:`engine_ext.wire.parts`) as safetensors, with a label and a checksum.

Layer ``i`` has ``i.key`` and ``i.value``, ``[tokens, heads, size]``, as computed: keys are rotated to the positions
behind the segment's prefix. The metadata has the label, and a checksum over all tensors.
"""

import json
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
import xxhash
from torch import Tensor

from cache.tiers.tier import Buffer

FORMAT = "tessera-kv-2"
Forms = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape and dtype of each tensor, by name."""
warnings.filterwarnings("ignore", "The given buffer is not writable")  # nobody writes to a file's tensors
_DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "U8": torch.uint8,
    "I8": torch.int8,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_LENGTH_BYTES = 8
_NO_CHECKSUM = "-" * 32
LONGEST_HEADER = 16 << 20
_MOST_VALUES = 1 << 16
"""Of a header: a few for each layer."""


class ChunkFileError(ValueError):
    """The bytes are not the requested KV; the message says why. None of them was used."""


@dataclass(frozen=True, slots=True)
class ChunkFileLabel:
    """The engine, the segment, and the part of its KV that a file has.

    ``prefix`` and ``tokens`` are packed token ids (:func:`cache.positions.layout.pack`) in hexadecimal; ``key`` is the
    segment's.
    """

    fingerprint: str
    key: str
    prefix: str
    tokens: str
    part: int
    parts: int

    def to_metadata(self, checksum: str) -> dict[str, str]:
        """The metadata of a file."""
        return {"format": FORMAT, "checksum": checksum, **{name: str(value) for name, value in asdict(self).items()}}


class BlankFile:
    """A file with room for tensors: fill ``tensors``, then :meth:`seal`. Nothing is copied, unlike by safetensors."""

    def __init__(
        self, label: ChunkFileLabel, forms: Forms, allocate: Callable[[int], bytearray | memoryview] = bytearray
    ) -> None:
        """``allocate`` gives writable memory, which need not be zero."""
        header: dict[str, Any] = {"__metadata__": label.to_metadata(_NO_CHECKSUM)}
        end = 0
        for name, (shape, dtype) in forms.items():
            start, end = end, end + math.prod(shape) * dtype.itemsize
            header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
        words = json.dumps(header).encode()
        words += b" " * (-len(words) % _LENGTH_BYTES)  # aligns the tensors
        start = _LENGTH_BYTES + len(words)
        self.data = memoryview(allocate(start + end))
        self.data[:start] = len(words).to_bytes(_LENGTH_BYTES, "little") + words
        self.tensors = {name: _view(self.data, start, **header[name]) for name in forms}
        self._checksum_at = _LENGTH_BYTES + words.index(_NO_CHECKSUM.encode())

    def seal(self) -> memoryview:
        """Adds the checksum; returns the file."""
        checksum = _checksum(self.tensors).encode()
        self.data[self._checksum_at : self._checksum_at + len(checksum)] = checksum
        return self.data


def pack_file(label: ChunkFileLabel, tensors: Mapping[str, Tensor]) -> bytes:
    """A file of ``tensors``, which are on the CPU."""
    file = BlankFile(label, {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()})
    for name, tensor in tensors.items():
        file.tensors[name].copy_(tensor)
    return bytes(file.seal())


def unpack_file(data: Buffer, label: ChunkFileLabel) -> dict[str, Tensor]:
    """The tensors of a file whose label is ``label``; raises :class:`ChunkFileError`.

    They are views of ``data``, and not to be written to.
    """
    header, start = _header(data)
    found = header.pop("__metadata__", None)
    if not isinstance(found, dict):
        raise ChunkFileError("no metadata")
    try:
        _check_extent(header, len(data) - start)
        tensors = {name: _view(data, start, **fields) for name, fields in header.items()}
        checksum = _checksum(tensors)
    except (ValueError, KeyError, TypeError, RuntimeError, OverflowError) as error:
        raise ChunkFileError(f"no safetensors: {error!r}"[:200]) from error
    for name, value in label.to_metadata(checksum).items():
        if found.get(name) != value:
            raise ChunkFileError(f"{name} is {_shown(found.get(name))}, not {_shown(value)}")
    return tensors


def label_of(data: Buffer) -> ChunkFileLabel:
    """A file's label; raises :class:`ChunkFileError` if it has none."""
    header, _ = _header(data)
    found: Any = header.get("__metadata__")
    try:
        texts = {name: found[name] for name in ChunkFileLabel.__slots__}
        if not all(isinstance(text, str) for text in texts.values()):
            raise TypeError("it has something else than text")
        bytes.fromhex(texts["prefix"]), bytes.fromhex(texts["tokens"])
        return ChunkFileLabel(**{**texts, "part": int(texts["part"]), "parts": int(texts["parts"])})
    except (ValueError, KeyError, TypeError) as error:
        raise ChunkFileError(f"no label: {error!r}"[:200]) from error


def _header(data: Buffer) -> tuple[dict[str, Any], int]:
    """The header, and the offset of the tensors."""
    view = memoryview(data)
    length = int.from_bytes(view[:_LENGTH_BYTES], "little")
    if len(view) < _LENGTH_BYTES or length > min(len(view) - _LENGTH_BYTES, LONGEST_HEADER):
        raise ChunkFileError(f"{len(view)} bytes are too few for a header of {length}")
    words = bytes(view[_LENGTH_BYTES : _LENGTH_BYTES + length])
    if sum(map(words.count, (b"{", b"[", b","))) > _MOST_VALUES:  # parsed, each takes a hundred times its bytes
        raise ChunkFileError(f"the header has more than {_MOST_VALUES} values")
    try:
        header = json.loads(words)
    except (ValueError, RecursionError) as error:
        raise ChunkFileError(f"no safetensors header: {error!r}") from error
    if not isinstance(header, dict):
        raise ChunkFileError("the header is no object")
    return header, _LENGTH_BYTES + length


def _check_extent(header: dict[str, Any], num_bytes: int) -> None:
    """Checks that the tensors fill the file, so that none is read and hashed twice."""
    extents = (fields["data_offsets"] for fields in header.values())
    if sum(end - begin for begin, end in extents) != num_bytes:
        raise ValueError(f"tensors of another length than the {num_bytes} bytes behind the header")


def _view(data: Buffer, start: int, dtype: str, shape: list[int], data_offsets: list[int]) -> Tensor:
    """A tensor without a copy, unlike safetensors' own ``load``."""
    begin, end = data_offsets
    kind, count = _DTYPES[dtype], math.prod(shape)
    if begin < 0 or any(size < 0 for size in shape) or end - begin != count * kind.itemsize:
        raise ValueError(f"{shape} of {dtype} at {data_offsets}")
    if count == 0:
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(data, dtype=kind, count=count, offset=start + begin).view(shape)


def _checksum(tensors: Mapping[str, Tensor]) -> str:
    digest = xxhash.xxh3_128()
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _shown(value: object) -> str:
    return repr(value)[:80]
