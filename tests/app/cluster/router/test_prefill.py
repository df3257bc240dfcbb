# SPDX-License-Identifier: Apache-2.0
"""Requests split between a replica that computes the prompt and one that answers."""

import asyncio
import hashlib
import json

import pytest
from starlette.responses import JSONResponse

from replicas.signing import HEADER, PeerKey
from tests.app.cluster.router.stand_in import Cluster, StandIn, break_off, busy, wait_for_disconnect
from tests.support.waiting import eventually

SECRET = "a secret of sixteen"
ASKED = {"system": "S", "chunks": ["one", "two"], "question": "?", "max_tokens": 9, "stream": True, "min_tokens": 3}
PATH = "/v1/rag/chat"
ADDRESS = {"do_remote_prefill": True, "remote_host": "prefill", "tessera_handover": {"version": 1}}


@pytest.fixture
def prefill():
    replica = StandIn("prefill", "prefill", hands_over=True)
    replica.answer, replica.signs = JSONResponse({"kv_transfer_params": ADDRESS}), PeerKey(SECRET)
    return replica


@pytest.fixture
def decode():
    return StandIn("decode", "decode", hands_over=True)


@pytest.fixture
async def cluster(redis_server, prefill, decode):
    async with Cluster(redis_server, prefill, decode).running(peer_secret=SECRET) as cluster:
        yield cluster


def received(stand_in):
    """Whether each request was signed, with its body."""
    return [(is_signed(scope, body), json.loads(body)) for scope, body in stand_in.requests]


def is_signed(scope, body):
    assert SECRET.encode() not in b"".join(value for _, value in scope["headers"])
    if (given := dict(scope["headers"]).get(HEADER.encode())) is None:
        return False
    signed = PeerKey(SECRET).signed_request(given.decode(), scope["method"], PATH)
    return signed.digest == hashlib.sha256(body).hexdigest()


async def prefills(cluster):
    outcomes = ("handed_over", "failed")
    return [await cluster.metric("tessera_router_prefills_total", outcome=name) for name in outcomes]


async def test_the_prompt_is_computed_first(cluster, prefill, decode):
    assert (await cluster.client.post(PATH, json=ASKED)).json() == {"from": "decode"}
    ((signed, first),) = received(prefill)
    assert signed
    assert first["kv_transfer_params"] == {"do_remote_decode": True, "do_remote_prefill": False}
    assert (first["max_tokens"], first["stream"], first.get("min_tokens")) == (1, False, None)
    ((signed, second),) = received(decode)
    assert signed
    assert second.pop("kv_transfer_params") == ADDRESS
    assert second == ASKED
    assert await prefills(cluster) == [1, 0]


@pytest.mark.parametrize("fields", [{"n": 2}, {"use_beam_search": True}, {"kv_transfer_params": {"own": 1}}])
async def test_requests_of_several_answers_stay_whole(cluster, prefill, decode, fields):
    await cluster.client.post(PATH, json={**ASKED, **fields}, headers={HEADER: "a client's own"})
    assert received(prefill) == []
    assert received(decode) == [(False, {**ASKED, **fields})]


@pytest.mark.parametrize("lacks", ["secret", "prefill", "decode"])
async def test_both_must_be_able_to_and_have_a_secret(redis_server, prefill, decode, lacks):
    prefill.hands_over, decode.hands_over = lacks != "prefill", lacks != "decode"
    secret = SECRET if lacks != "secret" else None
    async with Cluster(redis_server, prefill, decode).running(peer_secret=secret) as cluster:
        await cluster.client.post(PATH, json=ASKED)
    assert received(prefill) == []
    assert received(decode) == [(False, ASKED)]


@pytest.mark.parametrize("why", ["busy", "dead", "unsigned"])
async def test_a_prompt_that_was_not_computed_is_computed_where_it_is_answered(cluster, prefill, decode, why):
    """Whatever answers at a replica's address could name blocks of its own: they count with a signature only."""
    if why == "unsigned":
        prefill.signs = None
    else:
        prefill.answer = busy("prefill") if why == "busy" else break_off
    assert (await cluster.client.post(PATH, json=ASKED)).json() == {"from": "decode"}
    assert received(decode) == [(False, ASKED)]
    assert await prefills(cluster) == [0, 1]


async def test_a_client_that_leaves_ends_the_computation(cluster, prefill, decode):
    prefill.answer = wait_for_disconnect
    asking = asyncio.create_task(cluster.client.post(PATH, json=ASKED))
    await eventually(lambda: prefill.requests)
    asking.cancel()
    await eventually(lambda: prefill.disconnects == 1)
    assert received(decode) == []


async def test_a_replica_that_vanishes_amid_a_prompt(cluster, prefill):
    """Its connections stay open, but its heartbeats end, and probes go unanswered."""
    prefill.answer = wait_for_disconnect
    asking = asyncio.create_task(cluster.client.post(PATH, json=ASKED))
    await eventually(lambda: prefill.requests)
    prefill.health = wait_for_disconnect
    await cluster.registry.leave(cluster.replicas[0].id)
    assert (await asking).json() == {"from": "decode"}
