# SPDX-License-Identifier: Apache-2.0
"""Watches a server's event loop: the most CPU time that anything keeps it from going on.

On the path of a server's processes. The longest of all stretches since SIGUSR1 goes to the file named by ``LOOP_WATCH``
at SIGUSR2: of the loop's thread between two of its turns, and of any thread that kept all others from running.
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
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._ticked = threading.Event()
        self._at_tick = _cpu_s(_MAIN)
        self.begin()

    def begin(self, *_: Any) -> None:
        self.longest: dict[str, Any] = {"turn_s": 0.0, "turn_at": "", "held_s": 0.0, "held_by": ""}

    def _tick(self) -> None:
        now = _cpu_s(_MAIN)
        self.longest["turn_s"] = max(self.longest["turn_s"], now - self._at_tick)
        self._at_tick = now
        self._ticked.set()

    def run(self) -> None:
        before: dict[threading.Thread, float] = {}
        self._call()
        while not self.loop.is_closed():
            time.sleep(_PAUSE_S)
            now = {thread: _cpu_s(thread) for thread in threading.enumerate() if thread.is_alive()}
            for thread, seconds in now.items():
                if (held := seconds - before.get(thread, seconds)) > self.longest["held_s"]:
                    self.longest.update(held_s=held, held_by=_stack_of(thread) if held > _TOLD_S else "")
            before = now
            if self._ticked.is_set():
                self._call()
            elif now[_MAIN] - self._at_tick > max(_TOLD_S, self.longest["turn_s"]):
                self.longest["turn_at"] = _stack_of(_MAIN)

    def _call(self) -> None:
        self._ticked.clear()
        try:
            self.loop.call_soon_threadsafe(self._tick)
        except RuntimeError:
            return  # it is closed


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
