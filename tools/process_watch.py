# SPDX-License-Identifier: Apache-2.0
"""Processes that end when the one that started them has ended, however it did.

A server that stops ends its engine; one that is killed can't, and the engine's processes would run on for nobody. Our
plugin (:mod:`engine_ext.start.plugin`) calls :func:`end_with_parent` in each of them, as soon as it has started.
"""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Final

PLUGIN: Final = "tessera"
GRACE_S: Final = 5.0
"""How long an orphan may take to end in order."""
_POLL_S: Final = 1.0
_ENGINE, _STARTER = "_TESSERA_ENGINE", "_TESSERA_STARTER"


def mark_engine() -> None:
    """Says to the processes of an engine that is started next whose they are: other engines' have the plugin too."""
    os.environ[_ENGINE] = "1"
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and PLUGIN not in allowed.split(","):
        os.environ["VLLM_PLUGINS"] = f"{allowed},{PLUGIN}"


def end_with_parent() -> None:
    """Watches over the parent of an engine's process from a thread; does nothing in any other."""
    parent = multiprocessing.parent_process()
    if parent is not None and _ENGINE in os.environ:
        _end_after(parent.join)


def starter_environment() -> dict[str, str]:
    """For a child that calls :func:`end_with_starter`."""
    return {_STARTER: str(os.getpid())}


def end_with_starter() -> None:
    """Watches over the process that started this one, if it asked for that."""
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
    for child in multiprocessing.active_children():  # one that still imports doesn't watch over its parent yet
        child.terminate()
    os._exit(1)
