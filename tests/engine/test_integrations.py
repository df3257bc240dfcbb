# SPDX-License-Identifier: Apache-2.0
"""The pages of docs/integrations, and clients and frameworks as their users call them, on a real server."""

import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from machine.server_process import ROOT, free_port
from tests.engine.server import TesseraServer
from tests.processes import started
from tests.support.waiting import is_healthy, until

pytestmark = pytest.mark.matrix

PAGES = ROOT / "docs/integrations"
CLIENTS = ROOT / ".venv-integrations/bin"
FRAMEWORKS = ("openai", "langchain", "llamaindex", "haystack")
URL, MODEL = "http://localhost:8000/v1", "Qwen/Qwen3-0.6B"
"""Server and model of the pages."""

CHAT = "/v1/chat/completions"
DOCUMENTS = [
    {"text": "The Milton Bridge is 320 meters long."},
    {"title": "Museums", "text": "The Old Mill Museum shows farm tools."},
]
QUESTION: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": "Answer from the documents."},
        {"role": "user", "content": "How long is the Milton Bridge?"},
    ],
    "temperature": 0,
    "max_tokens": 24,
}
"""The pages' request without its documents."""


@pytest.fixture(scope="module")
def clients() -> Path:
    if not (CLIENTS / "python").exists():
        pytest.skip("the clients are not installed (make test-integrations)")
    return CLIENTS


@pytest.fixture
def emptied(server: TesseraServer) -> TesseraServer:
    """The server without chunks of other tests: all pages have the same documents."""
    server.post("/v1/cache/clear", {})
    return server


def page(name: str) -> str:
    return (PAGES / f"{name}.md").read_text(encoding="utf-8")


def run_page(name: str, server: TesseraServer, clients: Path) -> list[tuple[str, int]]:
    """Answers and numbers of reused tokens that a page's code prints."""
    code = "\n".join(re.findall(r"^```python\n(.*?)^```$", page(name), re.MULTILINE | re.DOTALL))
    assert URL in code
    assert MODEL in code
    code = code.replace(URL, f"{server.url}/v1").replace(MODEL, server.model)
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8", "HAYSTACK_TELEMETRY_ENABLED": "False"}
    ran = subprocess.run([clients / "python", "-c", code], env=environment, capture_output=True, timeout=300)
    assert ran.returncode == 0, ran.stderr.decode()
    printed = re.findall(r"(.*?)\n(\d+) tokens reused\n", ran.stdout.decode(), re.DOTALL)
    return [(answer, int(reused)) for answer, reused in printed]


def statuses(report: dict[str, Any]) -> list[str]:
    return [chunk["status"] for chunk in report["chunks"]]


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_page_reuses_its_documents_in_another_order(name, emptied, clients):
    first, second = run_page(name, emptied, clients)
    for (answer, _), documents in ((first, DOCUMENTS), (second, DOCUMENTS[::-1])):
        plain = emptied.post(CHAT, {**QUESTION, "documents": documents})
        report = plain["kv_transfer_params"]["cache"]
        assert statuses(report) == ["hit", "hit"]
        assert answer == plain["choices"][0]["message"]["content"]
    assert first[1] < second[1] == report["tokens"]["reused"]


@pytest.mark.parametrize("name", [*FRAMEWORKS, "routers"])
def test_a_page_names_the_versions_that_are_installed(name, clients):
    found = re.search(r"^Tested with (.*)\.$", page(name), re.MULTILINE)
    assert found is not None
    named = dict(re.findall(r"([\w-]+) (\d+\.\d+)", found[1]))
    code = "import importlib.metadata as m, json, sys; print(json.dumps([m.version(name) for name in sys.argv[1:]]))"
    ran = subprocess.run([clients / "python", "-c", code, *named], capture_output=True, check=True)
    installed = [".".join(version.split(".")[:2]) for version in json.loads(ran.stdout)]
    assert named == dict(zip(named, installed, strict=True)), f"change docs/integrations/{name}.md to what is installed"


# Programs in tests/engine/clients, each with the server's address, a model's name and what to ask

PROGRAMS = Path(__file__).parent / "clients"


def run_client(name: str, server: TesseraServer, asked: dict[str, Any]) -> list[Any]:
    """A program's output, a JSON value a line."""
    program = PROGRAMS / name
    interpreter: Path | str = CLIENTS / "python"
    if program.suffix == ".mjs":
        if not (modules := CLIENTS.parent / "node_modules").exists():
            pytest.skip("Vercel's AI SDK is not installed (make test-integrations)")
        program = shutil.copy(program, modules.parent)  # Node looks for modules beside the program
        interpreter = "node"
    command = [interpreter, program, f"{server.url}/v1", server.model, json.dumps(asked)]
    environment = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}  # LiteLLM asks nobody for prices
    ran = subprocess.run(list(map(str, command)), env=environment, capture_output=True, timeout=300)
    assert ran.returncode == 0, ran.stderr.decode()
    return list(map(json.loads, ran.stdout.splitlines()))


@pytest.mark.parametrize("name", ["stream_openai.py", "stream_litellm.py", "stream_langchain.py", "stream_vercel.mjs"])
def test_streams_are_what_clients_expect(name, emptied, clients):
    body = {**QUESTION, "documents": DOCUMENTS}
    emptied.post(CHAT, body)
    whole = emptied.post(CHAT, body)
    plain, answer, reused, *responded = run_client(
        name, emptied, {**body, "options": {"temperature": 0, "max_tokens": QUESTION["max_tokens"]}}
    )
    assert plain == content_of(emptied.post(CHAT, QUESTION))
    assert [answer, *responded] == [content_of(whole)] * (1 + len(responded))
    assert reused == whole["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def content_of(answer: dict[str, Any]) -> str:
    content: str = answer["choices"][0]["message"]["content"]
    return content


PASSAGES = [
    "The Milton Bridge is 320 meters long.",
    "The Old Mill Museum shows farm tools and an oven.",
    "The bakery on Quay Street was founded in 1987.\n\nIt is closed on Mondays, and in August.",
]


@pytest.mark.serve_with("--documents", "auto", "--log-level", "info")
@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("rag_llamaindex.py", "query"),
        ("rag_llamaindex.py", "chat"),
        ("rag_llamaindex.py", "citations"),
        ("rag_langchain.py", "chat"),
        ("rag_langchain.py", "completion"),
    ],
)
def test_passages_in_frameworks_own_prompts_are_found(name, way, emptied, clients):
    asked = {"way": way, "question": "How long is the bridge?", "options": {"temperature": 0, "max_tokens": 2}}
    run_client(name, emptied, {**asked, "documents": PASSAGES})
    run_client(name, emptied, {**asked, "documents": PASSAGES[::-1]})
    number, status = emptied.statuses()[-1].split()
    assert (int(number) >= len(PASSAGES), status) == (True, "hit")


# vLLM's router


@pytest.fixture
def router(emptied: TesseraServer, clients: Path, tmp_path: Path) -> Iterator[httpx.Client]:
    """A client of the page's router, with the server as its only worker."""
    found = re.search(r"^\$ vllm-router --port 8000 --worker-urls ((?:http\S+ )+)(.*)$", page("routers"), re.MULTILINE)
    assert found is not None
    port, metrics = free_port(), free_port()
    command = [clients / "vllm-router", "--host", "127.0.0.1", "--port", port, "--prometheus-port", metrics]
    command += ["--worker-urls", emptied.url, *shlex.split(found[2])]
    with (
        (tmp_path / "router.log").open("wb") as log,
        started(list(map(str, command)), stdout=log, stderr=log) as process,
    ):
        client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=300)
        until(lambda: process.poll() is not None or is_healthy(client), why="the router is not ready")
        assert process.poll() is None, (tmp_path / "router.log").read_text()
        yield client


def test_vllms_router_passes_documents_and_reports_on(router, emptied):
    body = {**QUESTION, "model": emptied.model, "documents": DOCUMENTS}
    assert statuses(router.post(CHAT, json=body).json()["kv_transfer_params"]["cache"]) == ["filled"] * 2
    streamed = router.post(CHAT, json={**body, "documents": DOCUMENTS[::-1], "stream": True}).text
    *_, last = (line.removeprefix("data: ") for line in streamed.splitlines() if line.startswith("data: {"))
    assert statuses(json.loads(last)["kv_transfer_params"]["cache"]) == ["hit"] * 2
    system, question = (message["content"] for message in QUESTION["messages"])
    chunks = {"system": system, "chunks": DOCUMENTS, "question": question, "max_tokens": 2}
    assert statuses(router.post("/v1/rag/chat", json=chunks).json()["cache"]) == ["hit"] * 2
    response = {
        "model": emptied.model,
        "instructions": system,
        "input": question,
        "documents": DOCUMENTS,
        "max_output_tokens": 2,
    }
    for path, other in (("/v1/responses", response), ("/v1/messages", anthropic(emptied.model))):
        report = router.post(path, json=other).json()["kv_transfer_params"]["cache"]
        assert statuses(report) == ["hit"] * 2
    assert router.get("/v1/cache/stats").json()["occupancy"]["segments"] == emptied.occupancy()["segments"]


def anthropic(model: str) -> dict[str, Any]:
    """The pages' request to `/v1/messages`."""
    system, question = (message["content"] for message in QUESTION["messages"])
    blocks = [
        {"type": "document", "title": each.get("title"), "source": {"type": "text", "data": each["text"]}}
        for each in DOCUMENTS
    ]
    messages = [{"role": "user", "content": [*blocks, {"type": "text", "text": question}]}]
    return {"model": model, "system": system, "messages": messages, "max_tokens": 2}
