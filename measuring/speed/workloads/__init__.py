# SPDX-License-Identifier: Apache-2.0
"""The workloads of `tessera bench`, by name."""

from measuring.speed.workloads.base import Workload
from measuring.speed.workloads.chat import Chat
from measuring.speed.workloads.context import Context
from measuring.speed.workloads.links import Links
from measuring.speed.workloads.load import Load
from measuring.speed.workloads.long_output import LongOutput
from measuring.speed.workloads.placement import Placement
from measuring.speed.workloads.shuffled import Shuffled
from measuring.speed.workloads.vllm_client import VllmClient

_ALL: tuple[type[Workload], ...] = (Context, Links, Shuffled, Chat, LongOutput, Load, VllmClient, Placement)
WORKLOADS: dict[str, type[Workload]] = {workload.name: workload for workload in _ALL}
