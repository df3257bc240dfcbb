# SPDX-License-Identifier: Apache-2.0
"""Traces of RAG requests: the chunks that each request retrieves, from a file or generated."""

import bisect
import itertools
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

CHUNKS_PER_REQUEST = 5


class TraceFileError(ValueError):
    """A trace file can't be used. The message names the file and the line."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests, each a tuple of distinct chunk ids; chunk ``i`` is ``chunk_tokens[i]`` tokens long."""

    name: str
    seed: int
    chunk_tokens: tuple[int, ...]
    requests: tuple[tuple[int, ...], ...]

    def write(self, path: Path) -> None:
        """Writes JSON lines: a header, then the list of each request."""
        header = {"trace": self.name, "seed": self.seed, "chunk_tokens": self.chunk_tokens}
        path.write_text("".join(json.dumps(line) + "\n" for line in (header, *self.requests)), encoding="utf-8")


class _Header(BaseModel):
    trace: str
    seed: int
    chunk_tokens: list[Annotated[int, Field(ge=1)]]


_HEADER = TypeAdapter(_Header)
_REQUEST: TypeAdapter[list[int]] = TypeAdapter(Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)])


def read_trace(path: Path) -> Trace:
    """The trace that :meth:`Trace.write` wrote; raises :class:`TraceFileError`."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise TraceFileError(f"{path}: {error.strerror}") from error
    if not lines:
        raise TraceFileError(f"{path}, line 1: no header")
    fault = f"{path}, line 1: the header must be an object with trace, seed and chunk_tokens"
    header: _Header = _parse(_HEADER, lines[0], fault)
    if len(lines) == 1:
        raise TraceFileError(f"{path}, line 2: no request")
    chunks = len(header.chunk_tokens)
    requests = [_request(line, chunks, f"{path}, line {number}") for number, line in enumerate(lines[1:], start=2)]
    return Trace(header.trace, header.seed, tuple(header.chunk_tokens), tuple(requests))


def zipf_trace(seed: int, chunks: int, tokens: int, requests: int) -> Trace:
    """Requests over equally long chunks, popular by Zipf's law with exponent 1."""
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


def _request(line: bytes, chunks: int, place: str) -> tuple[int, ...]:
    fault = f"{place}: must be a list of distinct chunk ids, from 0 to {chunks - 1}"
    ids: list[int] = _parse(_REQUEST, line, fault)
    if max(ids) >= chunks or len(set(ids)) < len(ids):
        raise TraceFileError(fault)
    return tuple(ids)


def _parse(kind: TypeAdapter[Any], line: bytes, fault: str) -> Any:
    try:
        return kind.validate_json(line, strict=True)
    except ValidationError as error:
        raise TraceFileError(fault) from error
