# SPDX-License-Identifier: Apache-2.0
"""Generated traces, and trace files that are read back or refused."""

import itertools
from collections import Counter

import pytest

from measuring.speed.traces import CHUNKS_PER_REQUEST, Trace, TraceFileError, read_trace, zipf_trace

REQUESTS = 2000
HEADER = '{"trace": "own", "seed": 0, "chunk_tokens": [64, 128]}'


def counts(requests):
    return Counter(itertools.chain.from_iterable(requests))


def test_chunks_of_equal_length():
    trace = zipf_trace(seed=5, chunks=200, tokens=256, requests=REQUESTS)
    assert trace == zipf_trace(5, 200, 256, REQUESTS)
    assert trace.requests != zipf_trace(6, 200, 256, REQUESTS).requests
    assert trace.chunk_tokens == (256,) * 200
    assert all(len(set(request)) == len(request) == CHUNKS_PER_REQUEST for request in trace.requests)
    seen = counts(trace.requests)
    assert set(seen) == set(range(200))
    assert seen[0] > 2 * seen[9] > 4 * seen[99] > 0


def test_a_trace_is_read_as_it_was_written(tmp_path):
    trace = zipf_trace(3, 200, 256, 50)
    trace.write(tmp_path / "trace.jsonl")
    assert read_trace(tmp_path / "trace.jsonl") == trace


def test_a_file_by_hand(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text(f"{HEADER}\n[0]\n[1, 0]\n")
    assert read_trace(path) == Trace("own", 0, (64, 128), ((0,), (1, 0)))


@pytest.mark.parametrize(
    ("text", "line", "fault"),
    [
        ("", 1, "no header"),
        ("[0]", 1, "the header must be"),
        ('{"trace": "own", "seed": 0, "chunk_tokens": [0]}', 1, "the header must be"),
        ('{"trace": "own", "chunk_tokens": [64]}', 1, "the header must be"),
        (f"{HEADER}\n[0]\n[0, 1", 3, "must be a list"),
        (f"{HEADER}\n[0, 2]", 2, "distinct chunk ids, from 0 to 1"),
        (f"{HEADER}\n[-1]", 2, "distinct chunk ids"),
        (f"{HEADER}\n[0, 0]", 2, "distinct chunk ids"),
        (f"{HEADER}\n[true]", 2, "distinct chunk ids"),
        (f"{HEADER}\n[]", 2, "distinct chunk ids"),
        (f"{HEADER}\n\n[0]", 2, "must be a list"),
        (HEADER, 2, "no request"),
    ],
)
def test_a_bad_line_is_named(tmp_path, text, line, fault):
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(TraceFileError, match=f"trace.jsonl, line {line}: .*{fault}"):
        read_trace(path)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(TraceFileError, match=r"none.jsonl: No such file"):
        read_trace(tmp_path / "none.jsonl")
    (tmp_path / "binary").write_bytes(b"\xff")
    with pytest.raises(TraceFileError, match="binary, line 1: the header must be"):
        read_trace(tmp_path / "binary")
