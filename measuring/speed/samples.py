# SPDX-License-Identifier: Apache-2.0
"""Samples, and claims about them."""

from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict

System = Literal["stock", "prefix hit", "empty", "warm", "in place", "attend", "quarter", "tessera"]
"""Stock vLLM, and a new question behind its last request's documents. Tessera with chunks missing, cached and copied,
cached in place, cached and attended to, cached in a pool for a quarter of them. Tessera asked without chunks."""

Value = Literal["ttft_s", "tpot_s", "latency_s", "requests_per_s"]
"""Times to first token, per further output token, to the last token; a round's throughput."""


class Sample(BaseModel):
    """One measurement. Those of the same ``round`` were taken in turn, so that noise of the machine met all of them.

    ``point`` says where on the workload's axis it was taken, for example ``4096`` tokens or ``concurrency 8``.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    workload: str
    point: str
    system: System
    round: int
    values: dict[Value, float]


@dataclass(frozen=True, slots=True)
class Ratio:
    """``over`` divided by ``under``, of the same rounds of one workload."""

    workload: str
    point: str
    value: Value
    over: System
    under: System
    at_least: float | None = None
    at_most: float | None = None


@dataclass(frozen=True, slots=True)
class Growth:
    """Growth of a system's value from one point of a workload to another."""

    workload: str
    first: str
    last: str
    value: Value
    system: System
    at_least: float | None = None
    at_most: float | None = None


Claim = Ratio | Growth
"""A statement about samples; with bounds, it is judged."""
