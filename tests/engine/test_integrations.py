# SPDX-License-Identifier: Apache-2.0
"""The pages of docs/integrations: their code, settings and versions, on a real server."""

import json
import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from machine.server_process import ROOT, free_port
from tests.engine.server import TesseraServer, stream_events
from tests.processes import started
from tests.support.waiting import until

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
def test_a_page_reuses_its_documents_in_another_order(name: str, emptied: TesseraServer, clients: Path) -> None:
    first, second = run_page(name, emptied, clients)
    for (answer, _), documents in ((first, DOCUMENTS), (second, DOCUMENTS[::-1])):
        plain = emptied.post(CHAT, {**QUESTION, "documents": documents})
        report = plain["kv_transfer_params"]["cache"]
        assert statuses(report) == ["hit", "hit"]
        assert answer == plain["choices"][0]["message"]["content"]
    assert first[1] < second[1] == report["tokens"]["reused"]


@pytest.mark.parametrize("name", [*FRAMEWORKS, "routers"])
def test_a_page_names_the_versions_that_are_installed(name: str, clients: Path) -> None:
    found = re.search(r"^Tested with (.*)\.$", page(name), re.MULTILINE)
    assert found is not None
    named = dict(re.findall(r"([\w-]+) (\d+\.\d+)", found[1]))
    code = "import importlib.metadata as m, json, sys; print(json.dumps([m.version(name) for name in sys.argv[1:]]))"
    ran = subprocess.run([clients / "python", "-c", code, *named], capture_output=True, check=True)
    installed = [".".join(version.split(".")[:2]) for version in json.loads(ran.stdout)]
    assert named == dict(zip(named, installed, strict=True)), f"change docs/integrations/{name}.md to what is installed"


# Open WebUI: what `get_source_context`, `rag_template` and `add_or_update_user_message` of 0.12.4 build

BRIDGE, OPENED = ("bridges.md", "The Milton Bridge is 320 meters long."), ("bridges.md", "It was opened in 1931.")
MUSEUM = ("museums.md", "The Old Mill Museum shows farm tools.")


def open_webui_settings() -> dict[str, str]:
    """The table of settings on the page."""
    return dict(re.findall(r"^\| (.*?) \| `(.*)` \|$", page("openwebui"), re.MULTILINE))


def open_webui_sources(sources: list[tuple[str, str]]) -> list[str]:
    """The sources (name and text) as Open WebUI writes them, numbered by file."""
    files = list(dict.fromkeys(name for name, _ in sources))
    return [
        f'<source id="{files.index(name) + 1}" name="{name}" resource-type="file" resource-id="{name}">{text}</source>'
        for name, text in sources
    ]


def open_webui_body(question: str, sources: list[tuple[str, str]], *turns: dict[str, str]) -> dict[str, Any]:
    context = "\n".join(open_webui_sources(sources))
    template = f"### Task:\nAnswer, and cite sources by their id.\n\n<context>\n{context}\n</context>\n\n{question}"
    messages = [*turns, {"role": "user", "content": template}]
    cache = json.loads(open_webui_settings()["without the server's flag, the model's custom parameter `cache`"])
    return {"messages": messages, "cache": cache, "temperature": 0, "max_tokens": 8}


def open_webui_ask(server: TesseraServer, *asked: Any) -> tuple[str, dict[str, Any]]:
    """Answer and report of a streamed request, as Open WebUI sends it."""
    events = stream_events(server, CHAT, {"model": server.model, **open_webui_body(*asked)})
    answer = "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])
    return answer, events[-1]["kv_transfer_params"]["cache"]


def test_sources_of_open_webui_are_chunks(emptied: TesseraServer) -> None:
    sources, question = [BRIDGE, OPENED, MUSEUM], "How long is the Milton Bridge?"
    _, cold = open_webui_ask(emptied, question, sources)
    assert statuses(cold) == ["filled"] * 3
    _, warm = open_webui_ask(emptied, question, sources)
    assert statuses(warm) == ["hit"] * 3
    given = emptied.chat(
        chunks=[text for _, text in sources], question=question, max_tokens=1, cache={"scope": "isolated"}
    )
    assert [chunk["key"] for chunk in warm["chunks"]] == [chunk["key"] for chunk in given["cache"]["chunks"]]


def test_sources_of_open_webui_are_reused_in_later_turns(emptied: TesseraServer) -> None:
    open_webui_ask(emptied, "How long is the Milton Bridge?", [BRIDGE, OPENED, MUSEUM])
    turns = [
        {"role": "user", "content": "How long is the Milton Bridge?"},
        {"role": "assistant", "content": "320 meters [1]."},
    ]
    _, later = open_webui_ask(emptied, "When was it opened?", [OPENED, BRIDGE, MUSEUM], *turns)
    assert statuses(later) == ["hit"] * 3
    _, renumbered = open_webui_ask(emptied, "When was it opened?", [MUSEUM, OPENED], *turns)
    assert statuses(renumbered) == ["hit"] * 2


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


def is_healthy(client: httpx.Client) -> bool:
    try:
        return client.get("/health").is_success
    except httpx.TransportError:
        return False


def test_vllms_router_passes_documents_and_reports_on(router: httpx.Client, emptied: TesseraServer) -> None:
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
