# SPDX-License-Identifier: Apache-2.0
"""Chunks are computed in the end, whatever answers at a replica's address."""

import asyncio
import socket
import struct

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzzing import ends
from tests.support.nodes import LARGEST, A, Node
from tests.support.peer_files import peer
from tests.support.registries import InProcessRegistry

BUFFERED = 16 << 20
"""Bytes that sockets take without a reader, at most."""


class Stranger:
    """Answers anything or nothing at a replica's address; ``sent`` counts accepted bytes."""

    def __init__(self, head, parts, *, resets):
        self.head, self.parts, self.resets = head, parts, resets
        self.sent = 0

    def answer(self, connection, _):
        connection.sendall(self.head)
        for part in self.parts:
            connection.sendall(part)
            self.sent += len(part)
        if self.resets:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


headers = st.dictionaries(
    st.sampled_from([b"content-length", b"content-encoding", b"transfer-encoding", b"location", b"x"]),
    st.sampled_from([b"0", b"-1", b"7", b"999999999999", b"chunked", b"gzip", b"\xff", b"http://["]),
)


@st.composite
def heads(draw):
    status = b"HTTP/1.1 %d What\r\n" % draw(st.sampled_from([100, 200, 200, 200, 204, 302, 404, 500, 999]))
    lines = b"".join(b"%s: %s\r\n" % each for each in draw(headers).items())
    return draw(st.sampled_from([status + lines + b"\r\n"] * 4 + [b"", b"HTTP/1.1 200", b"\x00" * 9, b"\r\n\r\n"]))


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(
    heads(),
    st.lists(st.binary(max_size=20) | st.sampled_from([b"[null, []]", b"[" * 5000, bytes(1 << 20)]), max_size=5),
    st.booleans(),
)
def test_whatever_a_replica_answers_the_chunk_is_computed(head, parts, resets):
    with ends():
        asyncio.run(ask_beside(Stranger(head, parts, resets=resets)))


async def ask_beside(stranger):
    """A replica with the chunk, and a replica whose requests to it reach ``stranger``."""
    registry = InProcessRegistry()
    a, b = Node("a", registry, {}), Node("b", registry, {})
    with peer(stranger.answer) as url:
        b.transfers.strangers["http://a"] = url
        await a.join()
        await b.join()
        await a.ask(A)
        assert await b.ask(A) == [("filled", None)]
    assert sum(b.manager.metrics.fetches.values()) == 1
    for node in (a, b):
        await node.close()


async def test_no_more_is_taken_than_a_chunk_can_have():
    for head in (b"content-length: %d\r\n" % (500 << 20), b"", b"transfer-encoding: chunked\r\n"):
        stranger = Stranger(b"HTTP/1.1 200 OK\r\n" + head + b"\r\n", [bytes(LARGEST)] * 500, resets=False)
        await ask_beside(stranger)
        assert stranger.sent <= BUFFERED
