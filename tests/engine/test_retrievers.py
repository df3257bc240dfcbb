# SPDX-License-Identifier: Apache-2.0
"""The retriever of embeddings against vLLM's own embeddings endpoint, and without it."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from machine.server_process import ServerProcess
from tests.engine.server import TesseraServer
from tests.support.collected import FALCON, OWLS, ask, put

pytestmark = pytest.mark.matrix


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory, model_path: Callable[[str], Path]) -> Iterator[ServerProcess]:
    flags = ["--runner", "pooling", "--convert", "embed", "--enforce-eager", "--served-model-name", "embedder"]
    flags += ["--max-model-len", "2048", "--kv-cache-memory-bytes", "64M", "--gpu-memory-utilization", "0.1"]
    log = tmp_path_factory.mktemp("embedder") / "server.log"
    vllm = ("vllm.entrypoints.openai.api_server", "--model")
    with ExitStack() as stack:
        server = ServerProcess(log, str(model_path("tiny-llama")), *flags, serve=vllm)
        stack.callback(server.stop)
        yield server.wait_ready()


@pytest.fixture(scope="module")
def searching(
    serve: Callable[..., TesseraServer], embedder: ServerProcess, tmp_path_factory: pytest.TempPathFactory
) -> TesseraServer:
    folder = str(tmp_path_factory.mktemp("collections"))
    url = f"{embedder.url}/v1?model=embedder"
    return serve("tiny-llama", "--retriever", url, "--collections", folder)


def test_passages_are_found_by_embeddings_and_without_them_by_words(
    searching: TesseraServer, embedder: ServerProcess
) -> None:
    _, summary = put(searching, "birds", {"falcon.md": FALCON, "owls.txt": OWLS}, max_tokens="48")
    assert "search" not in summary
    # The embedder's weights are random: only a passage's own text is surely the nearest.
    passages = searching.get("/v1/rag/collections/birds/passages", file="owls.txt")["data"]
    report = ask(searching, "birds", passages[0]["text"])["cache"]
    assert report["retrieved"][0]["id"] == passages[0]["id"]
    assert "retrieval_degraded" not in report

    embedder.stop()
    report = ask(searching, "birds", "What is the access code of Falcon?")["cache"]
    assert report["retrieved"][0]["file"] == "falcon.md"
    assert report["retrieval_degraded"].startswith("BM25 alone: http://127.0.0.1:")
    _, summary = put(searching, "birds", {"emu.txt": "The emu runs fast."})
    assert summary["search"].startswith("1 passages have no embeddings yet")
    assert ask(searching, "birds", "Does the emu run fast?", 1)["cache"]["retrieved"][0]["file"] == "emu.txt"
