# SPDX-License-Identifier: Apache-2.0
"""A worker's thread that reads and writes the pool for the app, beside the engine's steps.

The app is responsible for what it names: pages that it reads are leased, and pages that it writes belong to an entry
that nobody can load yet.
"""

import json
import logging
import threading
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, Listener

from cache.layout import packed_length
from engine_ext.chunk_file import ChunkFileError, ChunkFileLabel, pack_file, unpack_file
from engine_ext.worker import WorkerHalf, WrongPagesError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Transfer:
    """What to read, or, if ``is_write``, to write: then the file follows in a message of its own.

    The answer is an error, or empty and, for a read, followed by the file.
    """

    label: ChunkFileLabel
    pages: list[int]
    tag: int
    is_write: bool

    def to_bytes(self) -> bytes:
        """As it is sent."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> "Transfer":
        """What :meth:`to_bytes` made."""
        fields = json.loads(data)
        return cls(ChunkFileLabel(**fields.pop("label")), **fields)


def serve_transfers(half: WorkerHalf, address: str) -> None:
    """Serves one client at the Unix socket ``address``, in a thread, until the process ends."""
    listener = Listener(address, "AF_UNIX")
    threading.Thread(target=_serve, args=(half, listener), name="chunk-transfers", daemon=True).start()


def _serve(half: WorkerHalf, listener: Listener) -> None:
    with listener, listener.accept() as connection:
        while True:
            try:
                transfer = Transfer.from_bytes(connection.recv_bytes())
                for part in _carried_out(half, transfer, connection):
                    connection.send_bytes(part)
            except (EOFError, OSError):
                return


def _carried_out(half: WorkerHalf, transfer: Transfer, connection: Connection) -> list[bytes]:
    """The answer."""
    file = connection.recv_bytes() if transfer.is_write else b""
    num_tokens = packed_length(bytes.fromhex(transfer.label.tokens))
    try:
        if transfer.is_write:
            half.write(transfer.pages, transfer.tag, num_tokens, unpack_file(file, transfer.label))
            return [b""]
        return [b"", pack_file(transfer.label, half.read(transfer.pages, transfer.tag, num_tokens))]
    except (WrongPagesError, ChunkFileError) as error:
        return [str(error).encode()]
    except Exception as error:
        logger.exception("a transfer failed")
        return [repr(error).encode()]
