# SPDX-License-Identifier: Apache-2.0
"""The traces that benchmarks replay: each has what its name says, and files of them are read back or refused."""

import itertools
from collections import Counter

import pytest

from measuring.speed.traces import (
    BURST_CHUNKS,
    BURST_REQUESTS,
    CHUNKS_PER_REQUEST,
    POPULAR_CHUNKS,
    SCAN_PERIOD,
    SCAN_REQUESTS,
    TRACE_NAMES,
    Trace,
    TraceFileError,
    make_trace,
    read_trace,
    zipf_trace,
)

REQUESTS = 2000
HEADER = '{"trace": "own", "seed": 0, "chunk_tokens": [64, 128]}'


def counts(requests):
    return Counter(itertools.chain.from_iterable(requests))


@pytest.mark.parametrize("name", TRACE_NAMES)
def test_a_trace_is_its_seeds(name):
    trace = make_trace(name, 1, 100)
    assert trace == make_trace(name, 1, 100)
    assert trace.requests != make_trace(name, 2, 100).requests


@pytest.mark.parametrize("name", TRACE_NAMES)
def test_requests_are_of_distinct_chunks_of_known_length(name):
    trace = make_trace(name, 0, REQUESTS)
    assert (trace.name, trace.seed, len(trace.requests)) == (name, 0, REQUESTS)
    for request in trace.requests:
        assert len(set(request)) == len(request) == CHUNKS_PER_REQUEST
    assert max(map(max, trace.requests)) < len(trace.chunk_tokens)
    assert 64 <= min(trace.chunk_tokens) < 200
    assert 1000 < max(trace.chunk_tokens) <= 2048


def test_zipf_has_few_popular_chunks():
    seen = counts(make_trace("zipf", 0, REQUESTS).requests)
    top = sum(seen[chunk] for chunk in range(POPULAR_CHUNKS // 100))
    assert 0.3 < top / seen.total() < 0.5
    assert seen[0] > seen[9] > seen[99]


def test_chunks_of_equal_length():
    trace = zipf_trace(seed=5, chunks=200, tokens=256, requests=REQUESTS)
    assert trace == zipf_trace(5, 200, 256, REQUESTS)
    assert trace.requests != zipf_trace(6, 200, 256, REQUESTS).requests
    assert trace.chunk_tokens == (256,) * 200
    assert all(len(set(request)) == len(request) == CHUNKS_PER_REQUEST for request in trace.requests)
    seen = counts(trace.requests)
    assert set(seen) == set(range(200))
    assert seen[0] > 2 * seen[9] > 4 * seen[99] > 0


def test_a_scan_goes_through_cold_chunks_in_order():
    requests = make_trace("scan", 0, SCAN_PERIOD).requests
    scanned = [chunk for request in requests for chunk in request if chunk >= POPULAR_CHUNKS]
    assert scanned == list(range(POPULAR_CHUNKS, POPULAR_CHUNKS + CHUNKS_PER_REQUEST * SCAN_REQUESTS // 2))
    assert max(map(max, requests[: SCAN_PERIOD - SCAN_REQUESTS])) < POPULAR_CHUNKS


def test_popularity_drifts():
    requests = make_trace("drift", 0, 10_000).requests
    first, second, last = (
        {chunk for chunk, _ in counts(requests[n : n + 1000]).most_common(10)} for n in (0, 1000, 9000)
    )
    assert len(first & second) > 3
    assert len(first & last) < 3


def test_a_document_is_hot_once():
    requests = make_trace("bursts", 0, 3 * BURST_REQUESTS).requests
    for burst in range(3):
        chunks = range(POPULAR_CHUNKS + burst * BURST_CHUNKS, POPULAR_CHUNKS + (burst + 1) * BURST_CHUNKS)
        numbers = [number for number, request in enumerate(requests) if not set(request).isdisjoint(chunks)]
        assert {number // BURST_REQUESTS for number in numbers} == {burst}
        assert len(numbers) > BURST_REQUESTS // 4


def test_a_trace_is_read_as_it_was_written(tmp_path):
    trace = make_trace("bursts", 3, 50)
    trace.write(tmp_path / "trace.jsonl")
    assert read_trace(tmp_path / "trace.jsonl") == trace


def test_a_file_by_hand(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text(f"{HEADER}\n[0]\n[1, 0]\n")
    assert read_trace(path) == Trace("own", 0, (64, 128), ((0,), (1, 0)))


def test_times_of_arrival_are_read_as_they_were_written(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text(f'{HEADER}\n{{"at_s": 1.5, "chunks": [0]}}\n{{"at_s": 3, "chunks": [1, 0]}}\n')
    trace = read_trace(path)
    assert trace == Trace("own", 0, (64, 128), ((0,), (1, 0)), (1.5, 3.0))
    trace.write(path)
    assert read_trace(path) == trace


@pytest.mark.parametrize(
    ("text", "line", "fault"),
    [
        ("", 1, "no header"),
        ("[0]", 1, "the header must be"),
        ('{"trace": "own", "seed": 0, "chunk_tokens": [0]}', 1, "the header must be"),
        ('{"trace": "own", "chunk_tokens": [64]}', 1, "the header must be"),
        (f"{HEADER}\n[0]\n[0, 1", 3, "invalid JSON"),
        (f"{HEADER}\n[0, 2]", 2, "distinct chunk ids, from 0 to 1"),
        (f"{HEADER}\n[-1]", 2, "distinct chunk ids"),
        (f"{HEADER}\n[0, 0]", 2, "distinct chunk ids"),
        (f"{HEADER}\n[true]", 2, "distinct chunk ids"),
        (f"{HEADER}\n[]", 2, "distinct chunk ids"),
        (f"{HEADER}\n\n[0]", 2, "invalid JSON"),
        (HEADER, 2, "no request"),
        (f'{HEADER}\n{{"chunks": [0]}}', 2, "an object must have at_s"),
        (f'{HEADER}\n{{"at_s": 1}}', 2, "an object must have at_s"),
        (f'{HEADER}\n{{"at_s": -1, "chunks": [0]}}', 2, "an object must have at_s"),
        (f'{HEADER}\n{{"at_s": true, "chunks": [0]}}', 2, "an object must have at_s"),
        (f'{HEADER}\n{{"at_s": NaN, "chunks": [0]}}', 2, "an object must have at_s"),
        (f'{HEADER}\n{{"at_s": 1e999, "chunks": [0]}}', 2, "an object must have at_s"),
        (f'{HEADER}\n{{"at_s": 1, "chunks": [0], "at_ms": 1}}', 2, "an object must have at_s"),
        (f'{HEADER}\n{{"at_s": 1, "chunks": [2]}}', 2, "distinct chunk ids, from 0 to 1"),
        (f'{HEADER}\n{{"at_s": 1, "chunks": [0]}}\n[1]', 3, "either all requests have at_s or none"),
        (f'{HEADER}\n{{"at_s": 1, "chunks": [0]}}\n{{"at_s": 0.5, "chunks": [0]}}', 3, "at_s is before"),
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
    with pytest.raises(TraceFileError, match="binary: is not UTF-8"):
        read_trace(tmp_path / "binary")
