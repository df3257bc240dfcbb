# SPDX-License-Identifier: Apache-2.0
"""The example retriever of docs/integrations/embeddings.md, against vLLM's embeddings endpoint."""

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path

import pytest

from app.collections.retrievers import ENTRY_POINTS
from tests.engine.server import TesseraServer
from tests.support.collected import FALCON, OWLS, ask, put
from tools.server_process import ROOT, ServerProcess

pytestmark = pytest.mark.matrix

PAGE = (ROOT / "docs/integrations/embeddings.md").read_text(encoding="utf-8")


def block(language: str) -> str:
    (found,) = re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    return found


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for `PYTHONPATH`, with the page's module and its entry point as an installation leaves them."""
    folder = tmp_path_factory.mktemp("package")
    (folder / "by_embedding.py").write_text(block("python"), encoding="utf-8")
    about = folder / "by_embedding-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: by-embedding\nVersion: 1.0\n")
    (name,) = re.findall(r'^\[project\.entry-points\."(.*)"\]$', block("toml"), re.MULTILINE)
    assert name == ENTRY_POINTS
    (entry,) = re.findall(r'^(\w+) = "(.*)"$', block("toml"), re.MULTILINE)
    (about / "entry_points.txt").write_text(f"[{name}]\n{entry[0]} = {entry[1]}\n")
    return folder


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
def embedding_server(
    serve: Callable[..., TesseraServer], package: Path, embedder: ServerProcess, monkeypatch_module: pytest.MonkeyPatch
) -> TesseraServer:
    monkeypatch_module.setenv("PYTHONPATH", str(package))  # beside the checkout
    environment = {"EMBEDDINGS_URL": f"{embedder.url}/v1", "EMBEDDINGS_MODEL": "embedder"}
    folder = str(package / "collections")
    return serve("tiny-llama", "--retriever", "embeddings", "--collections", folder, environment=environment)


@pytest.fixture(scope="module")
def monkeypatch_module() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


def test_the_page_names_the_version_that_is_installed() -> None:
    (named,) = re.findall(r"^Tested with openai (\d+\.\d+)", PAGE, re.MULTILINE)
    assert named == ".".join(version("openai").split(".")[:2]), "change docs/integrations/embeddings.md to it"


def test_the_example_ranks_by_embeddings_and_its_failure_is_told(
    embedding_server: TesseraServer, embedder: ServerProcess
) -> None:
    put(embedding_server, "birds", {"falcon.md": FALCON, "owls.txt": OWLS}, max_tokens="48")
    passages = embedding_server.get("/v1/rag/collections/birds/passages", file="owls.txt")["data"]
    # The embedder's weights are random: only a passage's own text is surely the nearest.
    best, second = ask(embedding_server, "birds", passages[0]["text"])["cache"]["retrieved"]
    assert best["id"] == passages[0]["id"]
    assert second["score"] < best["score"] == pytest.approx(1, abs=1e-3)
    put(embedding_server, "birds", {"emu.txt": "The emu runs fast."})
    (best,) = ask(embedding_server, "birds", "The emu runs fast.", 1)["cache"]["retrieved"]
    assert best["file"] == "emu.txt"

    embedder.stop()
    asked = {"question": "Which bird?", "retrieve": {"collection": "birds"}}
    refused = embedding_server.post("/v1/rag/chat", asked, status=502)["error"]
    assert (refused["reason"], "the retriever failed" in refused["message"]) == ("retriever_failed", True)
    chat = {"model": embedding_server.model, "messages": [{"role": "user", "content": "Which?"}], **asked}
    del chat["question"]
    refused = embedding_server.post("/v1/chat/completions", chat, status=502)["error"]
    assert (refused["reason"], refused["param"]) == ("retriever_failed", "retrieve")
