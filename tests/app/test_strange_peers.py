# SPDX-License-Identifier: Apache-2.0
"""Chunks are computed in the end, whatever answers at a replica's address."""

import asyncio

import httpx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from replicas.registry import InProcessRegistry
from tests.app.cluster.test_peers import A, Node
from tests.fuzzing import ends


class Stranger(httpx.AsyncBaseTransport):
    """Answers anything or nothing at a replica's address; ``sent`` counts accepted bytes."""

    def __init__(self, status, headers, parts, error):
        self.status, self.headers, self.parts, self.error = status, headers, parts, error
        self.sent = 0

    async def handle_async_request(self, request):
        if self.error is not None and not self.parts:
            raise self.error
        return httpx.Response(self.status, headers=self.headers, content=self.content())

    async def content(self):
        for part in self.parts:
            self.sent += len(part)
            yield part
        if self.error is not None:
            raise self.error


errors = st.sampled_from([httpx.ReadError("reset"), httpx.RemoteProtocolError("no HTTP"), httpx.ConnectTimeout("late")])
headers = st.dictionaries(
    st.sampled_from([b"content-length", b"content-encoding", b"content-type", b"location", b"x"]),
    st.sampled_from([b"0", b"-1", b"gzip", b"\xff", b"http://["]),
)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(
    st.integers(100, 999),
    headers,
    st.lists(st.binary(max_size=20) | st.sampled_from([b"[null, []]", b"[" * 5000, bytes(1 << 20)]), max_size=5),
    st.none() | errors,
)
def test_whatever_a_replica_answers_the_chunk_is_computed(status, headers, parts, error):
    stranger = Stranger(status, headers, parts, error)
    with ends():
        asyncio.run(ask_beside(stranger))
    assert stranger.sent < 4 << 20


async def ask_beside(stranger):
    """A replica with the chunk, and a replica whose requests to it reach ``stranger``."""
    registry = InProcessRegistry()
    a, b = Node("a", registry, {}), Node("b", registry, {"http://a": stranger})
    await a.join()
    await b.join()
    await a.ask(A)
    assert await b.ask(A) == [("filled", None)]
    assert sum(b.manager.metrics.fetches.values()) == 1
    for node in (a, b):
        node.check()
        await node.client.aclose()
        await node.peers_client.aclose()


async def test_no_more_is_taken_than_a_chunk_can_have():
    stranger = Stranger(200, {}, [bytes(1 << 20)] * 500, None)
    await ask_beside(stranger)
    assert stranger.sent <= 3 << 20
