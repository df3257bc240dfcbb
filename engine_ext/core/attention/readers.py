# SPDX-License-Identifier: Apache-2.0
"""Readers: what makes a worker's attention layers read other KV than the blocks of a step's requests.

The worker half registers them when it is prepared; a backend finds them there and has each plan its part of a step.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from engine_ext.core.attention.requests import AttendingRequests
from engine_ext.core.attention.rows import BatchRow
from engine_ext.wire.plan import TransferPlan


class Reader(Protocol):
    """One kind of requests or tokens that read other KV."""

    @property
    def is_idle(self) -> bool:
        """Whether no request under way may be of this kind."""

    def update(self, started: Mapping[str, TransferPlan], ended: Iterable[str]) -> None:
        """Take in new requests, and forget ended ones; called before each step."""

    def step(self, rows: list[BatchRow]) -> Any:
        """Plan a step with these rows; nothing (``None``, an empty list) if it has no part of this kind."""


_Kind = TypeVar("_Kind", bound=Reader)


class Readers:
    """The readers of one worker, by kind."""

    request_ids: Callable[[Sequence[int] | None], Sequence[str]]
    """The requests of a step's rows, given vLLM's ``req_idx``; set before any reader is registered."""

    def __init__(self) -> None:
        self._by_kind: dict[type[Reader], Reader] = {}

    def register(self, reader: Reader) -> None:
        """Have the attention layers serve this reader from now on."""
        self._by_kind[type(reader)] = reader

    def get(self, kind: type[_Kind]) -> _Kind | None:
        """The reader of this kind; ``None`` on servers without."""
        reader = self._by_kind.get(kind)
        return reader if isinstance(reader, kind) else None

    def __iter__(self) -> Iterator[Reader]:
        return iter(self._by_kind.values())

    @property
    def are_idle(self) -> bool:
        """Whether all requests under way read just their blocks."""
        return all(reader.is_idle for reader in self)

    def update(self, started: Mapping[str, TransferPlan], ended: Iterable[str]) -> None:
        """Take in new requests, and forget ended ones."""
        can_attend = AttendingRequests in self._by_kind or not any(plan.attends for plan in started.values())
        assert can_attend, "requests attend to the pool on a server that can't"
        for reader in self:
            reader.update(started, ended)
