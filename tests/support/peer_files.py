# SPDX-License-Identifier: Apache-2.0
"""A replica that sends files."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress


@contextmanager
def peer(answer: Callable[[socket.socket, bytes], None]) -> Iterator[str]:
    """A server whose every connection is handled by `answer`, with the request's bytes; yields its URL."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with connection, suppress(OSError):
                        answer(connection, connection.recv(65536))

        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
