# SPDX-License-Identifier: Apache-2.0
"""Lists the project's files that a process enters between SIGUSR1 and SIGUSR2.

On the path of a server's processes; the list goes to the file named by ``ENTERED_FILES``.
"""

import json
import os
import signal
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

_ROOT = f"{Path(__file__).parents[3]}/"
_entered: list[str] = []
_is_on = False


def _profile(frame: FrameType, event: str, _: Any) -> None:
    if not _is_on or event != "call":
        return
    name = frame.f_code.co_filename
    if name.startswith(_ROOT) and "/.venv" not in name and "/tests/" not in name:
        file = name.removeprefix(_ROOT)
        if not _entered or _entered[-1] != file:
            _entered.append(file)


def _start(*_: Any) -> None:
    global _is_on
    _is_on = True
    sys.setprofile(_profile)


def _stop(*_: Any) -> None:
    global _is_on
    _is_on = False
    sys.setprofile(None)
    Path(os.environ["ENTERED_FILES"]).write_text(json.dumps(_entered))


if "ENTERED_FILES" in os.environ and threading.current_thread() is threading.main_thread():
    threading.setprofile(_profile)
    signal.signal(signal.SIGUSR1, _start)
    signal.signal(signal.SIGUSR2, _stop)
