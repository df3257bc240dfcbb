# SPDX-License-Identifier: Apache-2.0
"""Files of chunk KV: whatever became of one, it is never taken for something else."""

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load, save

from engine_ext.chunk_file import FORMAT, ChunkFileError, ChunkFileLabel, label_of, pack_file, unpack_file

LABEL = ChunkFileLabel("engine", "0a" * 16, "01000000", "0200000003000000", rank=0, ranks=2)


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
        ("rank", 1),
        ("ranks", 1),
    ],
)
def test_another_segment_engine_or_worker_is_refused(field, value):
    data = pack_file(replace(LABEL, **{field: value}), tensors())
    with pytest.raises(ChunkFileError, match=field):
        unpack_file(data, LABEL)


def test_safetensors_own_library_reads_it():
    found = load(pack_file(LABEL, tensors()))
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors().items())


def test_a_file_says_what_it_is():
    assert label_of(pack_file(LABEL, tensors())) == LABEL
    for other in (b"", save(tensors()), save(tensors(), {"key": "x"})):
        with pytest.raises(ChunkFileError):
            label_of(other)


def test_another_format_is_refused():
    metadata = json.loads(json.dumps(LABEL.to_metadata("x")).replace(FORMAT, "tessera-kv-0"))
    with pytest.raises(ChunkFileError, match="format"):
        unpack_file(save(tensors(), metadata), LABEL)


def test_a_file_without_metadata_is_refused():
    with pytest.raises(ChunkFileError, match="metadata"):
        unpack_file(save(tensors()), LABEL)


@given(st.data())
def test_no_flipped_bit_goes_unnoticed(data):
    file = bytearray(pack_file(LABEL, tensors()))
    place = data.draw(st.integers(0, len(file) - 1))
    file[place] ^= 1 << data.draw(st.integers(0, 7))
    try:
        found = unpack_file(file, LABEL)
    except ChunkFileError:
        return
    # The header has bytes that mean nothing: blanks behind it, the order of its fields.
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors().items())


@given(st.integers(0, 10_000))
def test_no_missing_end_goes_unnoticed(length):
    file = pack_file(LABEL, tensors())
    if length < len(file):
        with pytest.raises(ChunkFileError):
            unpack_file(file[:length], LABEL)


@given(st.binary(max_size=200))
def test_anything_else_is_refused(data):
    with pytest.raises(ChunkFileError):
        unpack_file(data, LABEL)
