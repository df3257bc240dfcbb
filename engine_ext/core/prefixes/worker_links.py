# SPDX-License-Identifier: Apache-2.0
"""The scheduler's connections to the block files of all workers."""

import logging
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Client, Connection
from typing import Final

from engine_ext.wire.prefix import blocks_address
from engine_ext.wire.worker_messages import Answer, BlockMessage

logger = logging.getLogger(__name__)

_THREADS: Final = 4


class WorkerLinks:
    """Asks all workers at once, in threads: a tier may hang, and the scheduler must not."""

    def __init__(self, folder: str, num_workers: int) -> None:
        self._addresses = [blocks_address(f"{folder}/{rank}") for rank in range(num_workers)]
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="prefixes")
        self._of_thread = threading.local()

    def ask(self, message: BlockMessage) -> "Future[int]":
        """The least count in the workers' answers; 0 if one does not answer."""
        return self._threads.submit(self._ask, message)

    def _ask(self, message: BlockMessage) -> int:
        try:
            connections = self._connections()
            for connection in connections:
                connection.send_bytes(message.to_bytes())
            return min(Answer.from_bytes(connection.recv_bytes()).count for connection in connections)
        except (EOFError, OSError) as error:
            logger.warning("a worker's tiers can't be asked: %r", error)
            self._of_thread.connections = None
            return 0

    def _connections(self) -> list[Connection]:
        """This thread's own: answers come in the order of commands."""
        found: list[Connection] | None = getattr(self._of_thread, "connections", None)
        if found is None:
            found = self._of_thread.connections = [Client(address, "AF_UNIX") for address in self._addresses]
        return found
