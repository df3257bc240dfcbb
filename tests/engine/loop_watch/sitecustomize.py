# SPDX-License-Identifier: Apache-2.0
"""Watches a server's event loop: the most CPU time that anything keeps it from going on.

On the path of a server's processes. The longest of all stretches since SIGUSR1 goes to the file named by ``LOOP_WATCH``
at SIGUSR2: of the loop's thread between two of its turns, and of any other thread meanwhile.
Seconds of CPU time, so that a busy machine counts little.
"""

import asyncio
import json
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

_PAUSE_S = 0.002
_TOLD_S = 0.05
_MAIN = threading.main_thread()
_set_running_loop = asyncio._set_running_loop


class _Watch:
    """Ticks by the loop's own timer: a thread that waits for the interpreter says nothing about the loop.

    A thread of its own looks at stacks meanwhile.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._at_tick = _all_cpu_s()
        self._stacks: dict[threading.Thread, str] = {}
        self.begin()
        loop.call_soon(self._tick)

    def begin(self, *_: Any) -> None:
        self.longest: dict[str, Any] = {"turn_s": 0.0, "turn_at": "", "held_s": 0.0, "held_by": ""}

    def _tick(self) -> None:
        now = _all_cpu_s()
        for thread, seconds in now.items():
            spent = seconds - self._at_tick.get(thread, 0.0)
            name, at = ("turn_s", "turn_at") if thread is _MAIN else ("held_s", "held_by")
            if spent > self.longest[name]:
                self.longest.update({name: spent, at: self._stacks.get(thread, "")})
        self._at_tick = now
        self._stacks.clear()
        self.loop.call_later(_PAUSE_S, self._tick)

    def run(self) -> None:
        while not self.loop.is_closed():
            time.sleep(_PAUSE_S)
            before = self._at_tick
            for thread, seconds in _all_cpu_s().items():
                if seconds - before.get(thread, 0.0) > _TOLD_S:
                    self._stacks[thread] = _stack_of(thread)


def _all_cpu_s() -> dict[threading.Thread, float]:
    return {thread: _cpu_s(thread) for thread in threading.enumerate() if thread.is_alive()}


def _cpu_s(thread: threading.Thread) -> float:
    try:
        return time.clock_gettime(time.pthread_getcpuclockid(thread.ident or 0))
    except OSError:
        return 0.0


def _stack_of(thread: threading.Thread) -> str:
    frame = sys._current_frames().get(thread.ident or 0)
    return "".join(traceback.format_stack(frame)[-8:])


_watch: _Watch | None = None


def _found(loop: asyncio.AbstractEventLoop | None) -> None:
    """Watches the loop that the main thread runs: a server's, last of all."""
    global _watch
    _set_running_loop(loop)
    is_new = loop is not None and (_watch is None or _watch.loop is not loop)
    if loop is not None and is_new and threading.current_thread() is _MAIN:
        _watch = _Watch(loop)
        signal.signal(signal.SIGUSR1, _watch.begin)
        signal.signal(signal.SIGUSR2, _write)
        threading.Thread(target=_watch.run, daemon=True).start()


def _write(*_: Any) -> None:
    path = Path(os.environ["LOOP_WATCH"])
    path.with_suffix(".new").write_text(json.dumps(_watch and _watch.longest))
    path.with_suffix(".new").rename(path)


if "LOOP_WATCH" in os.environ and threading.current_thread() is _MAIN:
    asyncio._set_running_loop = asyncio.events._set_running_loop = _found
