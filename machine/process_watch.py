# SPDX-License-Identifier: Apache-2.0
"""Ends processes whose parent has ended, however the parent ended.

A server that stops ends its engine; a killed server can't, and the engine's processes would run on. The vLLM plugin
(:mod:`engine_ext.start.plugin`) therefore calls :func:`end_with_parent` at the start of each engine process.
"""

import asyncio
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

PLUGIN: Final = "tessera"
GRACE_S: Final = 5.0
"""Time for an orderly end of an orphan."""
_POLL_S: Final = 1.0
_ENGINE, _STARTER = "_TESSERA_ENGINE", "_TESSERA_STARTER"


def end_by_signals() -> None:
    """Makes SIGTERM and SIGHUP cancel the running task, which stops servers in their own sessions."""
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # as nohup has it
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)


def mark_engine() -> None:
    """Marks processes started from now on as Tessera's engine; other engines load the plugin too."""
    os.environ[_ENGINE] = "1"
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and PLUGIN not in allowed.split(","):
        os.environ["VLLM_PLUGINS"] = f"{allowed},{PLUGIN}"


def is_engine() -> bool:
    """Whether this process belongs to Tessera's engine."""
    return multiprocessing.parent_process() is not None and _ENGINE in os.environ


def end_with_parent() -> None:
    """Watches an engine process's parent in a thread; does nothing in other processes."""
    parent = multiprocessing.parent_process()
    if parent is not None and is_engine():
        _end_after(parent.join)


def unlink_shared_memory() -> None:
    """Removes the names of the CPU workers' shared memory; call when all workers have opened it.

    vLLM removes them in a worker's orderly end, which a killed or slow worker has not. Memory without a name goes
    with its last process.
    """
    identity = os.environ.get("VLLM_DIST_IDENT")  # set by CPU workers alone
    if identity is not None:
        for path in Path("/dev/shm").glob(f"{identity}-*-cpushm_*"):
            path.unlink(missing_ok=True)  # another worker may be quicker


def starter_environment() -> dict[str, str]:
    """Environment for a child that calls :func:`end_with_starter`."""
    return {_STARTER: str(os.getpid())}


def end_with_starter() -> None:
    """Watches the process that started this one, if that process set :func:`starter_environment`."""
    starter = os.environ.pop(_STARTER, None)
    if starter is not None:
        _end_after(partial(_wait_for_other_parent, int(starter)))


def _wait_for_other_parent(pid: int) -> None:
    while os.getppid() == pid:
        time.sleep(_POLL_S)


def _end_after(wait: Callable[[], None]) -> None:
    threading.Thread(target=_end, args=(wait,), name="orphan", daemon=True).start()


def _end(wait: Callable[[], None]) -> None:
    wait()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    for child in multiprocessing.active_children():  # a child that is still importing has no watch yet
        child.terminate()
    os._exit(1)
