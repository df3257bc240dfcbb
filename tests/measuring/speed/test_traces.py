# SPDX-License-Identifier: Apache-2.0
"""Generated traces, and trace files that are read back or refused."""

import itertools
from collections import Counter

import pytest

from measuring.speed.traces import CHUNKS_PER_REQUEST, Trace, TraceFileError, read_trace, zipf_trace

HEADER = '{"trace": "own", "seed": 0, "chunk_tokens": [64, 128]}'


def test_chunks_of_equal_length():
    trace = zipf_trace(seed=5, chunks=200, tokens=256, requests=2000)
    assert trace == zipf_trace(5, 200, 256, 2000)
    assert trace.requests != zipf_trace(6, 200, 256, 2000).requests
    assert trace.chunk_tokens == (256,) * 200
    assert all(len(set(request)) == len(request) == CHUNKS_PER_REQUEST for request in trace.requests)
    seen = Counter(itertools.chain.from_iterable(trace.requests))
    assert set(seen) == set(range(200))
    assert seen[0] > 2 * seen[9] > 4 * seen[99] > 0


def test_a_file_by_hand_and_one_that_was_written(tmp_path):
    path, trace = tmp_path / "trace.jsonl", Trace("own", 0, (64, 128), ((0,), (1, 0)))
    path.write_text(f"{HEADER}\n[0]\n[1, 0]\n")
    assert read_trace(path) == trace
    trace.write(path)
    assert read_trace(path) == trace


@pytest.mark.parametrize(
    ("text", "line", "fault"),
    [
        ("", 1, "no header"),
        ("[0]", 1, "the header must be"),
        ('{"trace": "own", "seed": 0, "chunk_tokens": [0]}', 1, "the header must be"),
        ("\xff", 1, "the header must be"),
        (f"{HEADER}\n[0]\n[0, 1", 3, "must be a list"),
        (f"{HEADER}\n[0, 2]", 2, "distinct chunk ids, from 0 to 1"),
        (f"{HEADER}\n[-1]", 2, "distinct chunk ids"),
        (f"{HEADER}\n[0, 0]", 2, "distinct chunk ids"),
        (f"{HEADER}\n[true]", 2, "distinct chunk ids"),
        (f"{HEADER}\n[]", 2, "distinct chunk ids"),
        (HEADER, 2, "no request"),
    ],
)
def test_a_bad_line_is_named(tmp_path, text, line, fault):
    path = tmp_path / "trace.jsonl"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(TraceFileError, match=f"trace.jsonl, line {line}: .*{fault}"):
        read_trace(path)
