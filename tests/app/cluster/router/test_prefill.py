# SPDX-License-Identifier: Apache-2.0
"""Requests split between a replica that computes the prompt and one that answers."""

import asyncio
import hashlib
import json

import pytest

from replicas.signing import HEADER, PeerKey
from tests.app.cluster.router.stand_in import Cluster, StandIn, hand_over, say_busy, wait_for_disconnect
from tests.support.waiting import eventually

SECRET = "a secret of sixteen"
ASKED = {"system": "S", "chunks": ["one", "two"], "question": "?", "max_tokens": 9, "stream": True, "min_tokens": 3}
PATH = "/v1/rag/chat"


@pytest.fixture
def prefill():
    replica = StandIn("prefill", "prefill", hands_over=True)
    replica.answer, replica.signs = hand_over, PeerKey(SECRET)
    return replica


@pytest.fixture
def decode():
    return StandIn("decode", "decode", hands_over=True)


def received(stand_in):
    """Whether each request was signed, with its body."""
    return [(is_signed(scope, body), json.loads(body)) for scope, body in stand_in.requests]


def is_signed(scope, body):
    assert SECRET.encode() not in b"".join(value for _, value in scope["headers"])
    if (given := dict(scope["headers"]).get(HEADER.encode())) is None:
        return False
    signed = PeerKey(SECRET).signed_request(given.decode(), scope["method"], PATH)
    return signed.digest == hashlib.sha256(body).hexdigest()


async def ask(redis_server, *stand_ins, asked=ASKED, secret=SECRET):
    async with Cluster(redis_server, *stand_ins).running(peer_secret=secret) as cluster:
        response = await cluster.client.post(PATH, json=asked)
        outcomes = ("handed_over", "failed")
        return response, [await cluster.metric("tessera_router_prefills_total", outcome=name) for name in outcomes]


async def test_the_prompt_is_computed_first(redis_server, prefill, decode):
    response, counted = await ask(redis_server, prefill, decode)
    assert response.json() == {"from": "decode"}
    ((signed, first),) = received(prefill)
    assert signed
    assert first["kv_transfer_params"] == {"do_remote_decode": True, "do_remote_prefill": False}
    assert (first["max_tokens"], first["stream"], first.get("min_tokens")) == (1, False, None)
    ((signed, second),) = received(decode)
    assert signed
    assert second.pop("kv_transfer_params")["remote_host"] == "prefill"
    assert second == ASKED
    assert counted == [1, 0]


@pytest.mark.parametrize(
    "fields",
    [{"n": 2}, {"use_beam_search": True}, {"kv_transfer_params": {"own": 1}}],
)
async def test_requests_of_several_answers_stay_whole(redis_server, prefill, decode, fields):
    await ask(redis_server, prefill, decode, asked={**ASKED, **fields})
    assert received(prefill) == []
    assert received(decode) == [(False, {**ASKED, **fields})]


async def test_without_a_secret_nothing_is_handed_over(redis_server, prefill, decode):
    await ask(redis_server, prefill, decode, secret=None)
    assert (received(prefill), len(received(decode))) == ([], 1)


@pytest.mark.parametrize("of", ["prefill", "decode"])
async def test_both_must_be_able_to(redis_server, prefill, decode, of):
    {"prefill": prefill, "decode": decode}[of].hands_over = False
    await ask(redis_server, prefill, decode)
    assert received(prefill) == []
    assert received(decode) == [(False, ASKED)]


@pytest.mark.parametrize("answer", [say_busy, None], ids=["busy", "dead"])
async def test_a_prompt_that_was_not_computed_is_computed_where_it_is_answered(redis_server, prefill, decode, answer):
    async def break_off(stand_in, scope, receive, send):
        raise ConnectionResetError

    prefill.answer = answer or break_off
    response, counted = await ask(redis_server, prefill, decode)
    assert response.json() == {"from": "decode"}
    assert received(decode) == [(False, ASKED)]
    assert counted == [0, 1]


async def test_blocks_that_are_named_without_a_signature_are_not_read(redis_server, prefill, decode):
    """Whatever answers at a replica's address could name blocks of its own."""
    prefill.signs = None
    response, counted = await ask(redis_server, prefill, decode)
    assert response.json() == {"from": "decode"}
    assert received(decode) == [(False, ASKED)]
    assert counted == [0, 1]


async def test_a_signature_of_a_client_goes_no_further(redis_server, decode):
    async with Cluster(redis_server, decode).running(peer_secret=SECRET) as cluster:
        await cluster.client.post(PATH, json=ASKED, headers={HEADER: "of another request"})
    assert received(decode) == [(False, ASKED)]


async def test_a_client_that_leaves_ends_the_computation(redis_server, prefill, decode):
    prefill.answer = wait_for_disconnect
    async with Cluster(redis_server, prefill, decode).running(peer_secret=SECRET) as cluster:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await cluster.client.post(PATH, json=ASKED)
        await eventually(lambda: prefill.disconnects == 1)
    assert received(decode) == []


async def test_a_replica_that_vanishes_amid_a_prompt(redis_server, prefill, decode):
    """Its connections stay open, but its heartbeats end, and probes go unanswered."""
    prefill.answer = wait_for_disconnect
    async with Cluster(redis_server, prefill, decode).running(peer_secret=SECRET) as cluster:
        asking = asyncio.create_task(cluster.client.post(PATH, json=ASKED))
        await eventually(lambda: prefill.requests)
        prefill.is_healthy = False
        await cluster.registry.leave(cluster.replicas[0].id)
        assert (await asking).json() == {"from": "decode"}
