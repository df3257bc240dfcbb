# SPDX-License-Identifier: Apache-2.0
"""The interface of a workload: rounds, sizes and claims."""

from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from measuring.kit.client import Answer
from measuring.kit.texts import Texts
from measuring.speed.samples import Claim, Sample, System, Value
from measuring.speed.servers import Servers
from measuring.speed.traces import Trace


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a run: ``is_long`` asks for the full sizes, ``trace`` replaces generated requests.

    ``model`` is the model's folder, ``flags`` are those of both servers, ``output`` is the folder of the run.
    ``context_tokens`` are those that `context` measures; by default its own.
    """

    model: Path
    flags: tuple[str, ...]
    output: Path
    is_long: bool = False
    seed: int = 0
    trace: Trace | None = None
    characters_per_token: float = 1.0
    context_tokens: tuple[int, ...] = ()

    def texts(self, workload: str) -> Texts:
        """Texts that no other workload has: they would be in the other's prefix cache."""
        return Texts(f"{workload} {self.seed}", self.characters_per_token)


class Workload(Protocol):
    """A series of rounds. All methods that ask servers raise :class:`measuring.kit.client.ServerError`."""

    name: str
    title: str
    """One phrase for the report."""
    axis: str
    """Name of the points, for example ``tokens of context``."""

    @abstractmethod
    def __init__(self, options: Options) -> None: ...

    @abstractmethod
    def claims(self) -> list[Claim]:
        """Claims about points that this workload has."""

    @abstractmethod
    def sizes(self) -> dict[str, Any]:
        """Sizes of the requests, as JSON: lengths in tokens, numbers of requests."""

    async def prepare(self, servers: Servers) -> None:
        """Warms the servers up, by a round that is not recorded."""
        await self.round(servers, 0)

    @abstractmethod
    async def round(self, servers: Servers, number: int) -> list[Sample]:
        """Measures all systems at all points once; the answers are checked."""

    async def finish(self, servers: Servers) -> None:
        """Cleans up after the last round."""


def sample(workload: str, point: str, system: System, number: int, answer: Answer, *values: Value) -> Sample:
    """These values of one answer, in the round ``number``."""
    measured: dict[Value, float] = {value: getattr(answer, value) for value in values}
    return Sample(workload=workload, point=point, system=system, round=number, values=measured)
