# SPDX-License-Identifier: Apache-2.0
"""Models whose KV can't be repositioned, and features of vLLM that turn the chunk cache off: served in full attention,
with the reason in every report.
"""

import json

import pytest
from transformers import MambaConfig, MambaForCausalLM, PreTrainedModel

from tests.engine.conftest import COMMON
from tests.support.exactness import assert_scored, full_attention
from tests.support.saved_models import alibi, saved


def mamba(vocab_size: int) -> PreTrainedModel:
    return MambaForCausalLM(MambaConfig(vocab_size=vocab_size, hidden_size=128, num_hidden_layers=2, state_size=16))


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("build", "words", "runs"),
    [
        (alibi, "ALiBi", True),
        # vLLM's CPU build lacks Mamba's kernels: it starts, but can't run a request.
        pytest.param(mamba, "Mamba", False),
    ],
)
def test_served_with_the_cache_off(build, words, runs, pool, model_path, tmp_path_factory):
    folder = saved(build, model_path("tiny-llama"), tmp_path_factory.mktemp(build.__name__))
    flags = [flag if flag != "8192" else "1024" for flag in COMMON]
    server = pool.get(str(folder), "--dtype", "float32", *flags)
    assert words in server.log.read_text()
    stats = server.client.get("/v1/cache/stats").json()
    assert stats["enabled"] is False
    assert words in stats["reason"]
    if not runs:
        return
    response = server.chat(chunks=["a chunk", "another"], question="?", max_tokens=3, ignore_eos=True)
    assert response["usage"]["completion_tokens"] == 3
    report = response["cache"]
    assert report["mode"] == "full"
    assert words in report["reason"]
    assert report["chunks"][1] == {"index": 1, "id": None, "key": None, "tokens": 9, "status": None}


# vLLM features that turn the chunk cache off: served in full attention, with the reason in each report


@pytest.mark.serve_with("--chunk-cache-memory", "9TiB")
@pytest.mark.matrix
def test_a_pool_larger_than_the_free_memory(server, text, oracle):
    reason = "the chunk pool's 9437184 MiB are more than the "
    assert_scored(full_attention(server, [text(100), text(40)], text(20), reason), oracle("tiny-llama"))


@pytest.mark.matrix
def test_a_split_into_prefill_and_decode(serve, oracle, text, tmp_path):
    """Two engines that pass on KV by token ids, and so never KV of chunks."""
    chunks, question = [text(200), text(150)], text(40)
    extra = {"shared_storage_path": str(tmp_path)}
    for role in ("kv_producer", "kv_consumer"):
        config = {"kv_connector": "ExampleConnector", "kv_role": role, "kv_connector_extra_config": extra}
        server = serve("tiny-llama", "--kv-transfer-config", json.dumps(config))
        reason = "--kv-transfer-config: ExampleConnector: it finds KV by token ids"
        assert_scored(full_attention(server, chunks, question, reason), oracle("tiny-llama"))
    assert server.metric("vllm:external_prefix_cache_hits_total") > 0
