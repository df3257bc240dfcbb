# SPDX-License-Identifier: Apache-2.0
"""Files of chunk KV: no damaged or foreign file is accepted as another chunk."""

import json
import math
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load, save

from engine_ext.wire.chunk_file import ChunkFileError, ChunkFileLabel, label_of, pack_file, unpack_file
from tests.fuzzing import ends, json_values, objects, perhaps

LABEL = ChunkFileLabel("engine", "0a" * 16, "01000000", "0200000003000000", part=0, parts=2)


def tensors(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return {f"0.{name}": torch.randn(2, 3, 4, generator=generator).to(dtype) for name in ("key", "value")}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_what_was_packed_comes_back_bit_for_bit(dtype):
    found = unpack_file(bytearray(pack_file(LABEL, tensors(dtype))), LABEL)
    assert found.keys() == tensors().keys()
    for name, tensor in tensors(dtype).items():
        assert found[name].dtype == dtype
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("fingerprint", "other engine"),
        ("key", "0b" * 16),
        ("prefix", ""),
        ("tokens", "0200000004000000"),
        ("part", 1),
        ("parts", 1),
    ],
)
def test_another_segment_engine_or_worker_is_refused(field, value):
    data = pack_file(replace(LABEL, **{field: value}), tensors())
    with pytest.raises(ChunkFileError, match=field):
        unpack_file(data, LABEL)


def test_a_file_says_what_it_is_and_safetensors_own_library_reads_it():
    found = load(pack_file(LABEL, tensors()))
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors().items())
    assert label_of(pack_file(LABEL, tensors())) == LABEL
    for other in (b"", save(tensors()), save(tensors(), {"key": "x"})):
        with pytest.raises(ChunkFileError):
            label_of(other)


@pytest.mark.parametrize(
    ("metadata", "why"),
    [({**LABEL.to_metadata("x"), "format": "tessera-kv-0"}, "format"), (None, "metadata")],
    ids=["another format", "none"],
)
def test_other_metadata_is_refused(metadata, why):
    with pytest.raises(ChunkFileError, match=why):
        unpack_file(save(tensors(), metadata), LABEL)


@given(st.integers(0, 10_000))
def test_no_missing_end_goes_unnoticed(length):
    file = pack_file(LABEL, tensors())
    if length < len(file):
        with pytest.raises(ChunkFileError):
            unpack_file(file[:length], LABEL)


def file_of(header: object, content: bytes) -> bytes:
    encoded = json.dumps(header).encode()
    return len(encoded).to_bytes(8, "little") + encoded + content


def read(file: bytes) -> None:
    """All readers of files; they may refuse a file, but not fail otherwise."""
    with ends():
        for data in (file, bytearray(file), memoryview(bytearray(file))):
            for reads in (lambda data=data: unpack_file(data, LABEL), lambda data=data: label_of(data)):
                with suppress(ChunkFileError):
                    reads()


numbers = st.integers(0, 9) | st.sampled_from([-1, 2**31, 2**62, 2**63, 2**70, 10**400, 0.5, 1e400])
wrong_fields = objects(
    dtype=perhaps(st.sampled_from(["F32", "BF16", "U8", "F64"])),
    shape=perhaps(st.lists(numbers, max_size=4)),
    data_offsets=perhaps(st.lists(numbers, min_size=2, max_size=2)),
)
wrong_labels = objects(
    prefix=perhaps(st.just("0")), tokens=perhaps(st.just("0x")), part=perhaps(st.just("1e9")), parts=json_values
)


@st.composite
def headers(draw):
    """A header, valid or wrong in a few places, with its payload."""
    header, end = {}, 0
    for name in draw(st.lists(st.sampled_from(["0.key", "0.value", "", "\ud800"]), unique=True, max_size=3)):
        dtype, size = draw(st.sampled_from([("F32", 4), ("BF16", 2), ("U8", 1)]))
        shape = draw(st.lists(st.integers(0, 3), max_size=4))
        begin, end = end, end + size * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
        header[name] |= draw(st.just({}) | wrong_fields)
    header["__metadata__"] = LABEL.to_metadata("") | draw(st.just({}) | wrong_labels)
    changes = st.just({}) | st.dictionaries(st.sampled_from(["0.key", "__metadata__"]), json_values)
    return header | draw(changes), bytes(end) + draw(st.just(b"") | st.binary(max_size=9))


@given(headers() | st.tuples(json_values, st.binary(max_size=9)))
def test_whatever_a_header_says_it_is_refused_in_words(header):
    read(file_of(*header))


@given(st.integers(0, 2**64 - 1) | st.integers(0, 300), st.binary(max_size=300))
def test_whatever_length_a_header_says_to_have_it_is_refused(length, content):
    file = length.to_bytes(8, "little") + content
    for data in (file, content):
        read(data)
        with pytest.raises(ChunkFileError):
            unpack_file(data, LABEL)


@given(st.data())
def test_a_file_with_other_bytes_anywhere_is_refused_in_words(data):
    """Or has the same KV: the header has redundant bytes, such as trailing blanks, and an order of its fields."""
    file = bytearray(pack_file(LABEL, tensors()))
    for start in data.draw(st.lists(st.integers(0, len(file) - 1), min_size=1, max_size=3)):
        flipped = st.integers(0, 7).map(lambda bit, start=start: bytes([file[start] ^ 1 << bit]))
        other = data.draw(flipped | st.binary(min_size=1, max_size=8))
        file[start : start + len(other)] = other
    read(bytes(file))
    with suppress(ChunkFileError):
        found = unpack_file(file, LABEL)
        assert all(torch.equal(found[name], tensor) for name, tensor in tensors().items())


@pytest.mark.parametrize(
    ("shape", "offsets"),
    [
        ([], [0, 4]),  # a tensor without dimensions
        ([2**63, 0], [0, 0]),
        ([2**70], [0, 2**72]),
        ([1] * 10_000, [0, 4]),
        ([0.5, 2], [0, 4]),
    ],
)
def test_shapes_that_no_library_takes_are_refused(shape, offsets):
    fields = {"dtype": "F32", "shape": shape, "data_offsets": offsets}
    with pytest.raises(ChunkFileError, match="no safetensors"):
        unpack_file(file_of({"__metadata__": {}, "0.key": fields}, bytes(4)), LABEL)


def test_tensors_that_share_their_bytes_are_refused_before_they_are_read():
    """Otherwise a header of a few hundred kilobytes could cause thousands of hashes of the same megabytes."""
    size = 4 << 20
    fields = {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}
    header = {"__metadata__": {}, **{f"{i}.key": fields for i in range(5000)}}
    with ends(), pytest.raises(ChunkFileError, match="another length than the 4194304 bytes"):
        unpack_file(file_of(header, bytes(size)), LABEL)


@pytest.mark.parametrize(
    ("field", "value"), [("tokens", "xy"), ("tokens", None), ("key", 5), ("part", 1.5), ("part", float("inf"))]
)
def test_a_label_that_is_none_is_refused(field, value):
    with pytest.raises(ChunkFileError, match="no label"):
        label_of(file_of({"__metadata__": {**LABEL.to_metadata(""), field: value}}, b""))


def test_a_header_of_many_values_is_not_parsed():
    """14 MB of them would take gigabytes."""
    words = b'{"a": [' + b"{}," * (1 << 22) + b"{}]}"
    with pytest.raises(ChunkFileError, match="more than 65536 values"):
        label_of(len(words).to_bytes(8, "little") + words)
