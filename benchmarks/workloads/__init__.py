# SPDX-License-Identifier: Apache-2.0
"""The workloads of `tessera bench`, by name."""

from benchmarks.workloads.base import Workload
from benchmarks.workloads.chat import Chat
from benchmarks.workloads.context import Context
from benchmarks.workloads.links import Links
from benchmarks.workloads.load import Load
from benchmarks.workloads.long_output import LongOutput
from benchmarks.workloads.placement import Placement
from benchmarks.workloads.shuffled import Shuffled
from benchmarks.workloads.vllm_client import VllmClient

_ALL: tuple[type[Workload], ...] = (Context, Links, Shuffled, Chat, LongOutput, Load, VllmClient, Placement)
WORKLOADS: dict[str, type[Workload]] = {workload.name: workload for workload in _ALL}
