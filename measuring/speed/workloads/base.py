# SPDX-License-Identifier: Apache-2.0
"""What a workload is, and what it is made with."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from measuring.kit.texts import Texts
from measuring.speed.rag import Answer
from measuring.speed.samples import Claim, Sample, System, Value
from measuring.speed.servers import Servers
from measuring.speed.traces import Trace

Record = Callable[[Sample], None]
Step = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Options:
    """What workloads are made with: ``is_long`` asks for the full sizes, ``trace`` replaces generated requests.

    ``model`` is the model's folder, ``flags`` are those of both servers, ``output`` is the folder of the run.
    """

    model: Path
    flags: tuple[str, ...]
    output: Path
    is_long: bool = False
    seed: int = 0
    trace: Trace | None = None
    characters_per_token: float = 1.0

    def texts(self, workload: str) -> Texts:
        """Texts that no other workload has: what one has sent would be in the other's prefix cache."""
        return Texts(f"{workload} {self.seed}", self.characters_per_token)


def sample(workload: str, point: str, system: System, number: int, answer: Answer, *values: Value) -> Sample:
    """These values of one answer, in the round ``number``."""
    measured: dict[Value, float] = {value: getattr(answer, value) for value in values}
    return Sample(workload=workload, point=point, system=system, round=number, values=measured)


class Workload(Protocol):
    """A series of measurements."""

    name: str
    title: str
    """One phrase for the report."""
    axis: str
    """What the points are, for example ``tokens of context``."""

    def __init__(self, options: Options) -> None: ...

    def claims(self) -> list[Claim]:
        """Those about points that this workload has."""

    def sizes(self) -> dict[str, Any]:
        """What was measured, as JSON: lengths in tokens, numbers of rounds and of requests."""

    def num_steps(self) -> int:
        """How often ``run`` calls ``step``, at about even times."""

    async def run(self, servers: Servers, record: Record, step: Step) -> None:
        """Measures. Samples are recorded once their answers are checked; raises :class:`BenchmarkError`."""
