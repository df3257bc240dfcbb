# SPDX-License-Identifier: Apache-2.0
"""Collections on a real server: files in, passages out, KV reused, across restarts."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from machine.server_process import ROOT, ServerProcess
from tests.app.pdfs import make_pdf
from tests.engine.server import TesseraServer
from tests.support.exactness import assert_exact
from tests.support.tier_servers import FILES, STORING, archived, folder_of

pytestmark = pytest.mark.serve_with(*STORING)

FALCON = "# Falcon\n\nThe access code of Falcon is 7342.\n\n# Heron\n\nHeron lives near the lake, in the reeds.\n"
OWLS = "Owls hunt at night.\n\nThe barn owl has a white face.\n"


def put(server: TesseraServer, collection: str, files: dict[str, str | bytes], **fields: str) -> tuple[list[Any], Any]:
    """The lines of an ingestion, and its summary."""
    given = [("files", (name, content)) for name, content in files.items()]
    answer = server.client.post(f"/v1/rag/collections/{collection}", files=given, data=fields)
    assert answer.status_code == 200, answer.text
    *lines, last = map(json.loads, answer.text.splitlines())
    return lines, last["summary"]


def ask(server: TesseraServer, collection: str, question: str, top_k: int = 2) -> dict[str, Any]:
    asked = {"retrieve": {"collection": collection, "top_k": top_k}, "question": question, "cache": {"explain": True}}
    asked |= {"max_tokens": 8, "temperature": 0, "ignore_eos": True, "logprobs": True, "return_token_ids": True}
    return server.chat(**asked)


def test_files_become_passages_that_questions_find(server, oracle):
    files = {
        "birds/falcon.md": FALCON,
        "owls.txt": OWLS,
        "ibis.pdf": make_pdf(["The ibis wades in shallow water."], ["Its beak is curved."]),
    }
    lines, summary = put(server, "birds", files, system="You know birds.", max_tokens="48")
    about_files = [line for line in lines if "index" not in line]
    assert [(line["file"], line["status"]) for line in about_files] == [(name, "added") for name in files]
    assert summary["files"] == {"added": 3, "changed": 0, "unchanged": 0, "failed": 0}
    assert summary["filled"] == len(lines) - 3 == sum(line["passages"] for line in about_files)
    assert [line["index"] for line in lines if "index" in line] == list(range(summary["filled"]))
    answer = ask(server, "birds", "What is the access code of Falcon?")
    report = answer["cache"]
    best = report["retrieved"][0]
    assert (best["file"], best["title"], best["page"]) == ("birds/falcon.md", "Falcon", None)
    assert [chunk["id"] for chunk in report["chunks"]] == [each["id"] for each in report["retrieved"]]
    assert {chunk["status"] for chunk in report["chunks"]} == {"hit"}  # the system prompt is the collection's
    assert_exact(answer, oracle("tiny-llama"), "offset")
    assert ask(server, "birds", "A curved beak?")["cache"]["retrieved"][0]["page"] == 2


def test_openai_endpoints_and_follow_up_questions(server):
    put(server, "chats", {"falcon.md": FALCON, "owls.txt": OWLS}, system="You know birds.", max_tokens="48")
    turns = [
        {"role": "user", "content": "Where does Heron live?"},
        {"role": "assistant", "content": "Near the lake."},
        {"role": "user", "content": "And what else is there?"},
    ]
    asked = {"messages": turns, "max_tokens": 4, "retrieve": {"collection": "chats", "top_k": 1}}
    report = server.post("/v1/chat/completions", {"model": "tiny-llama", **asked})["kv_transfer_params"]["cache"]
    assert report["retrieved"][0]["title"] == "Heron"  # the last question alone doesn't say so
    assert report["chunks"][0]["status"] == "hit"


@pytest.mark.matrix
def test_a_restart_computes_nothing_and_a_changed_file_only_its_passages(server, start_with_tiers):
    files = {"falcon.md": FALCON, "owls.txt": OWLS}
    put(server, "lasting", files, system="You know birds.", max_tokens="48")
    (id,) = [each["id"] for each in ask(server, "lasting", "access code", 1)["cache"]["retrieved"]]
    archived(server)
    again = start_with_tiers(FILES.format(folder=folder_of(server)))
    report = ask(again, "lasting", "What is the access code of Falcon?")["cache"]
    assert report["tokens"]["fill_computed"] == 0
    named = again.chat(system="You know birds.", chunks=[{"id": id}], question="What?", max_tokens=1)["cache"]
    assert named["chunks"][0]["status"] in ("hit", "loaded")
    changed = OWLS.replace("white", "pale")
    lines, summary = put(again, "lasting", {**files, "owls.txt": changed})
    assert summary["files"] == {"added": 0, "changed": 1, "unchanged": 1, "failed": 0}
    assert [line["file"] for line in lines if line["status"] == "filled"] == ["owls.txt"]


def test_passages_computed_behind_those_before_them(server):
    """A question finds them computed; another text before one makes it another chunk."""
    files = {"owls.txt": f"{OWLS}\n\n" * 4}
    _, summary = put(server, "behind", files, max_tokens="32", context_tokens="128")
    assert summary["filled"] > 3
    kept = server.get("/v1/rag/collections/behind/passages", file="owls.txt")["data"]
    assert [each["context"] for each in kept][:3] == [0, 1, 2]
    report = ask(server, "behind", "barn owl", 2)["cache"]
    assert {chunk["status"] for chunk in report["chunks"]} == {"hit"}
    _, again = put(server, "behind", files)
    assert (again["files"]["unchanged"], again["filled"]) == (1, 0)
    _, changed = put(server, "behind", {"owls.txt": f"A new beginning.\n\n{files['owls.txt']}"})
    assert changed["failed"] == 0
    assert {chunk["status"] for chunk in ask(server, "behind", "barn owl", 2)["cache"]["chunks"]} == {"hit"}


def test_deleting_drops_texts_and_kv(server):
    put(server, "short", {"owls.txt": OWLS, "falcon.md": FALCON}, max_tokens="48")
    kept = [each["id"] for each in server.get("/v1/rag/collections/short/passages", file="owls.txt")["data"]]
    assert server.client.delete("/v1/rag/collections/short", params={"file": "falcon.md"}).json()["passages"] == 2
    assert [each["file"] for each in server.get("/v1/rag/collections/short")["data"]] == ["owls.txt"]
    assert server.get("/v1/rag/chunks", id=kept[0])["data"] != []
    assert server.client.delete("/v1/rag/collections/short").status_code == 200
    assert server.get("/v1/rag/chunks", id=kept[0])["data"] == []
    server.get("/v1/rag/collections/short", status=404)
    refused = server.post("/v1/rag/chat", {"retrieve": {"collection": "short"}, "question": "Which?"}, status=404)
    assert "no collection 'short'" in refused["error"]["message"]


def test_two_ingestions_of_one_collection_at_once(server):
    """Files of both are there; of a file in both, one version, whole, with its KV."""
    versions = [{"owls.txt": f"{OWLS}\nIt is {colour}.\n" * 9, f"{colour}.txt": colour} for colour in ("red", "blue")]
    with ThreadPoolExecutor(2) as threads:
        results = list(threads.map(lambda files: put(server, "busy", files, max_tokens="48"), versions))
    assert [summary["failed"] for _, summary in results] == [0, 0]
    kept = {each["file"] for each in server.get("/v1/rag/collections/busy")["data"]}
    assert kept == {"owls.txt", "red.txt", "blue.txt"}
    passages = server.get("/v1/rag/collections/busy/passages", file="owls.txt")["data"]
    colours = {colour for colour in ("red", "blue") if any(colour in each["text"] for each in passages)}
    assert len(colours) == 1
    _, summary = put(server, "busy", {"owls.txt": versions[colours == {"blue"}]["owls.txt"]})
    assert (summary["files"]["unchanged"], summary["filled"]) == (1, 0)


def test_a_folder_is_ingested_from_the_shell(server, tmp_path):
    """Files of other types and hidden ones stay out, and bad ones fail alone."""
    for name, content in {
        "a/falcon.md": FALCON,
        "owls.txt": OWLS,
        "x.bin": "x",
        ".git/y.txt": "y",
        "z.txt": "\0",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    code, said = ingest(server, tmp_path)
    assert (code, "files: 2 added" in said, "too small" in said) == (1, True, False), said
    assert "failed: z.txt: the file is not text" in said
    assert "left out: x.bin: its type can't be read" in said
    assert [each["file"] for each in server.get("/v1/rag/collections/shell")["data"]] == ["a/falcon.md", "owls.txt"]


@pytest.mark.matrix
def test_a_pool_that_is_too_small_for_a_folder_is_told(start_with_tiers, tmp_path):
    folder = tmp_path / "files"
    folder.mkdir()
    for number in range(40):
        (folder / f"{number}.txt").write_text(f"{number} owls hunt at night. Their faces are white. " * 8)
    server = start_with_tiers(FILES.format(folder=tmp_path / "kv"), "--chunk-cache-memory", "4MiB")
    code, said = ingest(server, folder)
    evicted = server.stats()["counters"]["removals"]["evicted"]
    assert (code, f"the pool was too small: {evicted} chunks left it" in said, evicted > 0) == (0, True, True), said


def ingest(server: TesseraServer, folder: Path) -> tuple[int, str]:
    """The exit code of `tessera ingest`, and its words on one line."""
    command = [sys.executable, "-m", "app.cli", "ingest", str(folder), "--collection", "shell", "--max-tokens", "48"]
    command += ["--server", str(server.client.base_url), "--system", "You know birds."]
    result = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    return result.returncode, " ".join(result.stderr.split())


# The retriever of embeddings against vLLM's own embeddings endpoint, and without it


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
def searching(serve, embedder, tmp_path_factory) -> TesseraServer:
    folder = str(tmp_path_factory.mktemp("collections"))
    url = f"{embedder.url}/v1?model=embedder"
    return serve("tiny-llama", "--retriever", url, "--collections", folder)


@pytest.mark.matrix
def test_passages_are_found_by_embeddings_and_without_them_by_words(searching, embedder):
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
