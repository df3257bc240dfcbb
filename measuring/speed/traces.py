# SPDX-License-Identifier: Apache-2.0
"""Traces of RAG requests: the chunks that each request retrieves, from a file or generated."""

import bisect
import itertools
import json
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CHUNKS_PER_REQUEST = 5


class TraceFileError(ValueError):
    """A trace file can't be used. The message names the file and the line."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests, each a tuple of distinct chunk ids; chunk ``i`` is ``chunk_tokens[i]`` tokens long.

    ``at_s`` are the requests' times of arrival in seconds since any moment, in order; empty if they aren't known.
    """

    name: str
    seed: int
    chunk_tokens: tuple[int, ...]
    requests: tuple[tuple[int, ...], ...]
    at_s: tuple[float, ...] = ()

    def write(self, path: Path) -> None:
        """Writes JSON lines: a header, then each request: a list, or an object with its time of arrival."""
        header = {"trace": self.name, "seed": self.seed, "chunk_tokens": self.chunk_tokens}
        timed = ({"at_s": at, "chunks": chunks} for at, chunks in zip(self.at_s, self.requests, strict=False))
        with path.open("w", encoding="utf-8") as file:
            for line in (header, *(timed if self.at_s else self.requests)):
                file.write(json.dumps(line) + "\n")


def read_trace(path: Path) -> Trace:
    """The trace that :meth:`Trace.write` wrote; raises :class:`TraceFileError`."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise TraceFileError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise TraceFileError(f"{path}: is not UTF-8") from error
    if not lines:
        raise TraceFileError(f"{path}, line 1: no header")
    name, seed, chunk_tokens = _header(lines[0], f"{path}, line 1")
    if len(lines) == 1:
        raise TraceFileError(f"{path}, line 2: no request")
    places = [f"{path}, line {number}" for number in range(2, len(lines) + 1)]
    parsed = [_request(line, len(chunk_tokens), place) for line, place in zip(lines[1:], places, strict=True)]
    times = [at for at, _ in parsed]
    _check_times(times, places)
    known = tuple(at for at in times if at is not None)
    return Trace(name, seed, chunk_tokens, tuple(chunks for _, chunks in parsed), known)


def zipf_trace(seed: int, chunks: int, tokens: int, requests: int) -> Trace:
    """Requests over ``chunks`` chunks of ``tokens`` tokens each, popular as in Zipf's law with exponent 1."""
    source = random.Random(f"equal chunks {seed}")
    sums = list(itertools.accumulate(1 / rank for rank in range(1, chunks + 1)))
    chosen = tuple(_popular(source, sums) for _ in range(requests))
    return Trace("zipf, equal chunks", seed, (tokens,) * chunks, chosen)


def _popular(source: random.Random, sums: list[float]) -> tuple[int, ...]:
    """Draws distinct chunks; ``sums`` are cumulative weights by rank."""
    chosen: dict[int, None] = {}
    while len(chosen) < CHUNKS_PER_REQUEST:
        chosen[bisect.bisect_left(sums, source.random() * sums[-1])] = None
    return tuple(chosen)


def _parse(line: str, place: str) -> Any:
    try:
        return json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise TraceFileError(f"{place}: invalid JSON") from error


def _header(line: str, place: str) -> tuple[str, int, tuple[int, ...]]:
    match _parse(line, place):
        case {"trace": str(name), "seed": int(seed), "chunk_tokens": [*tokens]} if _are_ints(tokens, 1):
            return name, seed, tuple(tokens)
    raise TraceFileError(f"{place}: the header must be an object with trace, seed and chunk_tokens")


def _request(line: str, chunks: int, place: str) -> tuple[float | None, tuple[int, ...]]:
    """Time of arrival, ``None`` if the line has none, and chunk ids."""
    request = _parse(line, place)
    if not isinstance(request, dict):
        return None, _chunk_ids(request, chunks, place)
    match request:
        case {"at_s": int() | float() as at, "chunks": ids, **others} if not others and _is_time(at):
            return float(at), _chunk_ids(ids, chunks, place)
    raise TraceFileError(f"{place}: an object must have at_s, seconds from 0, and chunks, and nothing else")


def _chunk_ids(ids: Any, chunks: int, place: str) -> tuple[int, ...]:
    match ids:
        case [*ids] if ids and _are_ints(ids, 0) and max(ids) < chunks and len(set(ids)) == len(ids):
            return tuple(ids)
    raise TraceFileError(f"{place}: must be a list of distinct chunk ids, from 0 to {chunks - 1}")


def _is_time(value: float) -> bool:
    return type(value) is not bool and 0 <= value <= sys.float_info.max


def _check_times(times: list[float | None], places: list[str]) -> None:
    """Raises :class:`TraceFileError` unless all requests have times, in order, or none has one."""
    for (before, at), place in zip(itertools.pairwise(times), places[1:], strict=True):
        if (before is None) != (at is None):
            raise TraceFileError(f"{place}: either all requests have at_s or none")
        if before is not None and at is not None and at < before:
            raise TraceFileError(f"{place}: at_s is before that of the line above")


def _are_ints(values: list[Any], least: int) -> bool:
    return all(type(value) is int and value >= least for value in values)
