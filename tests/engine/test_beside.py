# SPDX-License-Identifier: Apache-2.0
"""The chunk cache beside NIXL, in vLLM's MultiConnector: exact, and only peers may pass on KV."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from app.access.peer import SECRET_HEADER
from tests.engine.server import TesseraServer
from tests.engine.test_exactness import assert_filled_hit_and_mixed_are_exact
from tests.engine.test_in_place import IN_PLACE
from tests.engine.test_isolation import complete
from tools.server_process import free_port

Text = Callable[[int], str]

SECRET = "a secret of sixteen"
NIXL = ("--kv-transfer-config", json.dumps({"kv_connector": "NixlConnector", "kv_role": "kv_both"}))
REMOTE = {"do_remote_decode": True, "do_remote_prefill": False}


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    return {
        "UCX_TLS": "tcp",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
        "TESSERA_PEER_SECRET": SECRET,
    }


@pytest.fixture(params=[(), IN_PLACE], ids=["copy", "in-place"])
def server(request: pytest.FixtureRequest, serve: Any, environment: dict[str, str]) -> TesseraServer:
    pytest.importorskip("nixl")
    return serve("tiny-llama", *NIXL, *request.param, environment=environment)


def body(server: TesseraServer, text: str, **params: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"model": server.model, "messages": messages, "max_tokens": 1, "kv_transfer_params": params}


def test_chunks_are_exact(server: TesseraServer, oracle: Any, text: Text) -> None:
    assert server.stats()["enabled"]
    assert_filled_hit_and_mixed_are_exact(server, oracle("tiny-llama"), text)
    assert server.metric("tessera_load_tokens_total") > 0


def test_ordinary_requests_are_exact(server: TesseraServer, oracle: Any, text: Text) -> None:
    prompt = list(text(500).encode())
    tokens = server.post("/tokenize", {"prompt": text(500)})["tokens"]
    assert len(prompt) <= len(tokens)
    expected = oracle("tiny-llama").full(tokens, 8).logprobs
    for _ in range(2):
        assert complete(server, tokens) == pytest.approx(expected, abs=1e-4)


def test_only_peers_may_pass_on_kv(server: TesseraServer, text: Text) -> None:
    prompt = text(200)
    refused = server.post("/v1/chat/completions", body(server, prompt, **REMOTE), 403)["error"]
    assert refused["reason"] == "peers_only"
    headers = {SECRET_HEADER: "another secret"}
    assert server.client.post("/v1/chat/completions", json=body(server, prompt, **REMOTE), headers=headers).status_code == 403
    headers = {SECRET_HEADER: SECRET}
    answer = server.client.post("/v1/chat/completions", json=body(server, prompt, **REMOTE), headers=headers)
    assert answer.json()["kv_transfer_params"]["remote_block_ids"]
    forged = body(server, prompt, tessera={"loads": [[0, 8, 0, 1, [0]]], "saves": []})
    answer = server.client.post("/v1/chat/completions", json=forged, headers=headers)
    assert (answer.status_code, answer.json()["error"]["reason"]) == (400, "bad_request")
