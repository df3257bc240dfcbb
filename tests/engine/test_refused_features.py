# SPDX-License-Identifier: Apache-2.0
"""vLLM features that turn the chunk cache off: served in full attention, with the reason in each report."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine.server import TesseraServer
from tests.support.exactness import assert_scored, full_attention

Text = Callable[[int], str]


@pytest.mark.serve_with("--chunk-cache-memory", "9TiB")
@pytest.mark.matrix
def test_a_pool_larger_than_the_free_memory(server: TesseraServer, text: Text, oracle: Any) -> None:
    reason = "the chunk pool's 9437184 MiB are more than the "
    assert_scored(full_attention(server, [text(100), text(40)], text(20), reason), oracle("tiny-llama"))


@pytest.mark.matrix
def test_a_split_into_prefill_and_decode(serve: Any, oracle: Any, text: Text, tmp_path: Path) -> None:
    """Two engines that pass on KV by token ids, and so never KV of chunks."""
    chunks, question = [text(200), text(150)], text(40)
    extra = {"shared_storage_path": str(tmp_path)}
    for role in ("kv_producer", "kv_consumer"):
        config = {"kv_connector": "ExampleConnector", "kv_role": role, "kv_connector_extra_config": extra}
        server = serve("tiny-llama", "--kv-transfer-config", json.dumps(config))
        reason = "--kv-transfer-config: ExampleConnector: it finds KV by token ids"
        assert_scored(full_attention(server, chunks, question, reason), oracle("tiny-llama"))
    assert server.metric("vllm:external_prefix_cache_hits_total") > 0
