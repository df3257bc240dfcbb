# SPDX-License-Identifier: Apache-2.0
"""How a measurement is ended from outside."""

import asyncio
import signal


def end_by_signals() -> None:
    """SIGTERM and SIGHUP end the running task as Ctrl-C does: servers have sessions of their own, and would live on."""
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # as nohup has it
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
