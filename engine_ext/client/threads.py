# SPDX-License-Identifier: Apache-2.0
"""Work of requests in threads, of which no tenant has all."""

import asyncio
import os
from collections.abc import Callable
from functools import partial
from typing import Final, ParamSpec, TypeVar

from engine_ext.chunks.turns import FairTurns
from engine_ext.client.request import owner

P = ParamSpec("P")
Result = TypeVar("Result")

_THREADS: Final = min(32, (os.cpu_count() or 1) + 4) - 1
"""All that an event loop has but one, for what is no request's."""
_turns: Final = FairTurns(_THREADS, most_of_one=(_THREADS + 1) // 2)


async def in_thread(call: Callable[P, Result], *arguments: P.args, **fields: P.kwargs) -> Result:
    """As ``asyncio.to_thread``, when it is the caller's turn."""
    return await _turns.run(owner(), partial(asyncio.to_thread, call, *arguments, **fields))
