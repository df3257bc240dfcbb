# SPDX-License-Identifier: Apache-2.0
"""A `tessera serve` of the evaluation's own."""

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from measuring.quality.client import TEMPLATE_ADVICE, SetupError
from tools.progress import progress
from tools.server_process import ServerProcess, ended_by_signals, last_words


@contextmanager
def started_server(model: str, arguments: Sequence[str], log: Path, port: int | None = None) -> Iterator[ServerProcess]:
    """A server of ``model`` that runs as long as the block; raises :class:`SetupError` if it won't start."""
    with ended_by_signals():
        server = ServerProcess(log, model, *arguments, port=port)
        try:
            with progress(f"starting tessera serve {model}"):
                _wait_ready(server, log)
            yield server
        finally:
            # Raised when it had to be killed; the answers are in, nothing hangs on how it ended.
            with suppress(subprocess.TimeoutExpired):
                server.stop()


def _wait_ready(server: ServerProcess, log: Path) -> None:
    try:
        server.wait_ready()
    except (RuntimeError, TimeoutError) as error:
        advice = f" ({TEMPLATE_ADVICE})" if "chat template" in str(error) else ""
        words = last_words(log).removeprefix("tessera: ")
        raise SetupError(f"the server didn't start: {words}{advice}; all it said is in {log}") from error
