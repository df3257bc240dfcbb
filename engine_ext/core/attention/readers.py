# SPDX-License-Identifier: Apache-2.0
"""Readers of this process's attention layers: requests that attend to the pool, probes, and the choice of blocks.

vLLM's attention layers have no access to the connector, so its worker half installs the readers here.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from engine_ext.core.attention.decoding import DecodingSelection
from engine_ext.core.attention.probes import Probes
from engine_ext.core.attention.requests import AttendingRequests
from engine_ext.wire.plan import TransferPlan


@dataclass(frozen=True, slots=True)
class Readers:
    """Requests that attend to the pool, probes, and the choice of blocks; each ``None`` on servers without."""

    attending: AttendingRequests | None = None
    probes: Probes | None = None
    decoding: DecodingSelection | None = None

    @property
    def are_idle(self) -> bool:
        """Whether all requests under way read just their blocks."""
        return self.decoding is None and all(each is None or each.is_idle for each in (self.attending, self.probes))

    def update(self, started: Mapping[str, TransferPlan], ended: Iterable[str]) -> None:
        """Takes in new requests, and forgets ended ones."""
        can_attend = self.attending is not None or not any(plan.attends for plan in started.values())
        assert can_attend, "requests attend to the pool on a server that can't"
        for each in (self.attending, self.probes):
            if each is not None:
                each.update(started, ended)


_readers = Readers()


def install(readers: Readers) -> None:
    """Makes this process's attention layers serve these readers."""
    global _readers  # the layers have no other access to them
    _readers = readers


def readers() -> Readers:
    """The readers of this process's worker."""
    return _readers
