# SPDX-License-Identifier: Apache-2.0
"""Servers that run for the time of a measurement."""

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from machine.followed import echoed
from machine.progress import progress
from machine.server_process import ServerProcess, ended_by_signals, last_words
from measuring.kit.client import SetupError

TEMPLATE_ADVICE: Final = "start the server with --chat-template FILE"


@contextmanager
def started_server(model: str, arguments: Sequence[str], log: Path, port: int | None = None) -> Iterator[ServerProcess]:
    """A `tessera serve` of ``model`` for the time of the block, which signals end.

    Raises :class:`SetupError` if it does not start.
    """
    with ended_by_signals():
        server = ServerProcess(log, model, *arguments, port=port)
        try:
            with progress(f"starting tessera serve {model}"), echoed(log):
                wait_ready(server, "the server")
            yield server
        finally:
            stop(server)


def wait_ready(server: ServerProcess, name: str) -> None:
    """Waits until the server answers; raises :class:`SetupError` if it does not start."""
    try:
        server.wait_ready()
    except (RuntimeError, TimeoutError) as error:
        advice = f" ({TEMPLATE_ADVICE})" if "chat template" in str(error) else ""
        words = last_words(server.log).removeprefix("tessera: ")
        raise SetupError(f"{name} didn't start: {words}{advice}; its log is {server.log}") from error


def stop(server: ServerProcess) -> None:
    """Stops the server, by force if need be: nothing hangs on how it ended."""
    with suppress(subprocess.TimeoutExpired):
        server.stop()
