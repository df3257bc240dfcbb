# SPDX-License-Identifier: Apache-2.0
"""The workloads of `tessera bench`, by name."""

from measuring.speed.workloads.base import Workload
from measuring.speed.workloads.chat import Chat
from measuring.speed.workloads.context import Context
from measuring.speed.workloads.load import Load
from measuring.speed.workloads.placement import Decoding, Placement

_ALL: tuple[type[Workload], ...] = (Context, Chat, Load, Placement, Decoding)
WORKLOADS: dict[str, type[Workload]] = {workload.name: workload for workload in _ALL}
