# SPDX-License-Identifier: Apache-2.0
"""The chunk cache beside NIXL, in vLLM's MultiConnector: exact, and only peers may pass on KV."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from machine.server_process import free_port
from replicas.signing import PeerAuth, PeerKey
from tests.engine.server import ServerPool, TesseraServer
from tests.support.completions import complete
from tests.support.exactness import assert_filled_hit_and_mixed_are_exact
from tests.support.nixl import NIXL, PLACEMENTS, REMOTE

pytestmark = pytest.mark.matrix

Text = Callable[[int], str]

SECRET = "a secret of sixteen"


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerPool]:
    """One server at a time: NIXL's worker polls, and another one beside it takes minutes to start."""
    servers = ServerPool(tmp_path_factory.mktemp("servers"), keep=1)
    yield servers
    servers.close()


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    port = str(free_port())
    return {"UCX_TLS": "tcp", "VLLM_NIXL_SIDE_CHANNEL_PORT": port, "TESSERA_PEER_SECRET": SECRET}


@pytest.fixture
def server(placement: str, serve: Callable[..., TesseraServer], environment: dict[str, str]) -> TesseraServer:
    pytest.importorskip("nixl", reason="NIXL is not installed (docs/connectors.md)")
    return serve("tiny-llama", *NIXL, *PLACEMENTS[placement], environment=environment)


def body(server: TesseraServer, text: str, **params: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"model": server.model, "messages": messages, "max_tokens": 1, "kv_transfer_params": params}


@pytest.mark.parametrize("placement", ["copy"])
def test_only_peers_may_pass_on_kv(server: TesseraServer, text: Text) -> None:
    prompt = text(200)
    refused = server.post("/v1/chat/completions", body(server, prompt, **REMOTE), 403)["error"]
    assert refused["reason"] == "peers_only"
    wrong, right = PeerAuth(PeerKey("another secret")), PeerAuth(PeerKey(SECRET))
    answer = server.client.post("/v1/chat/completions", json=body(server, prompt, **REMOTE), auth=wrong)
    assert answer.status_code == 403
    answer = server.client.post("/v1/chat/completions", json=body(server, prompt, **REMOTE), auth=right)
    assert answer.json()["kv_transfer_params"]["remote_block_ids"]
    forged = body(server, prompt, tessera={"loads": [[0, 8, 0, 1, [0]]], "saves": []})
    answer = server.client.post("/v1/chat/completions", json=forged, auth=right)
    assert (answer.status_code, answer.json()["error"]["reason"]) == (400, "bad_request")


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_answers_are_exact(placement: str, server: TesseraServer, oracle: Any, text: Text) -> None:
    assert server.stats()["placement"] == placement
    assert_filled_hit_and_mixed_are_exact(server, oracle("tiny-llama"), text)
    tokens = server.post("/tokenize", {"prompt": text(500)})["tokens"]
    expected = oracle("tiny-llama").full(tokens, 8).logprobs
    for _ in range(2):
        assert complete(server, tokens) == pytest.approx(expected, abs=1e-4)
