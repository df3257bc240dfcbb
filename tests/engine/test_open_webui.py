# SPDX-License-Identifier: Apache-2.0
"""Open WebUI as its users have it: files uploaded on its page, and cited answers over reused chunks."""

import os
import re
import shlex
import subprocess
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Page, sync_playwright

from machine.server_process import ROOT, free_port
from tests.app.collections.endpoint import EndpointStandIn
from tests.engine.server import TesseraServer
from tests.processes import started
from tests.real_models import real_model
from tests.support.waiting import is_healthy, until
from tests.web.conftest import CHROMIUM

ENVIRONMENT = ROOT / ".venv-open-webui/bin"
pytestmark = [
    pytest.mark.matrix,
    pytest.mark.skipif(
        not (ENVIRONMENT / "open-webui").exists(), reason="Open WebUI is not installed (make test-integrations)"
    ),
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed (scripts/test_servers.sh)"),
]

TASKS = ("RETRIEVAL_QUERY", "TITLE", "TAGS", "FOLLOW_UP")
OFF = ("WEBUI_AUTH", "ENABLE_OLLAMA_API", *(f"ENABLE_{task}_GENERATION" for task in TASKS))
"""No login, and no requests but the user's own."""
LONGEST_S = 600
FILES = {
    "bridge.txt": "The Milton Bridge is 320 meters long. A car crosses it in twenty seconds. It was opened in 1931.",
    "mill.txt": "The Old Mill Museum shows farm tools and a cat of straw. Its house was built in 1802.",
}


@pytest.fixture(scope="module")
def tessera(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TesseraServer]:
    flags = shlex.split(
        "--dtype float32 --enforce-eager --kv-cache-memory-bytes 512M --documents auto --log-level INFO"
    )
    server = TesseraServer(tmp_path_factory.mktemp("tessera") / "log", str(real_model("smollm2")), *flags)
    yield server.wait_ready()
    server.stop()


@pytest.fixture(scope="module")
def open_webui(tessera: TesseraServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Its address. It knows the server from its environment, and asks an endpoint for embeddings."""
    folder, embeddings, port = tmp_path_factory.mktemp("open-webui"), EndpointStandIn(), free_port()
    with embeddings.serving(), (folder / "log").open("wb") as log:
        settings = {"DATA_DIR": str(folder), "OFFLINE_MODE": "true", **dict.fromkeys(OFF, "False")}
        settings |= {"OPENAI_API_BASE_URL": f"{tessera.url}/v1", "OPENAI_API_KEY": "none"}
        settings |= {"RAG_EMBEDDING_ENGINE": "openai", "RAG_OPENAI_API_BASE_URL": embeddings.url}
        settings["DEFAULT_MODEL_PARAMS"] = '{"function_calling": "legacy", "max_tokens": 16, "temperature": 0}'
        command = [str(ENVIRONMENT / "open-webui"), "serve", "--host", "127.0.0.1", "--port", str(port)]
        with started(command, cwd=folder, env={**os.environ, **settings}, stdout=log, stderr=log) as process:
            client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30)
            until(lambda: process.poll() is not None or is_healthy(client), LONGEST_S, "Open WebUI is not ready")
            assert process.poll() is None, (folder / "log").read_text()
            yield str(client.base_url)


@pytest.fixture
def page(open_webui: str) -> Iterator[Page]:
    with (
        sync_playwright() as playwright,
        playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"]) as browser,
    ):
        page = browser.new_page(base_url=open_webui)
        page.set_default_timeout(1000 * LONGEST_S)
        # A dialog about the latest version may come at any time.
        page.add_locator_handler(page.get_by_role("button", name="Let's Go"), lambda button: button.click())
        yield page


def ask(page: Page, files: Sequence[Path], question: str) -> None:
    """Uploads files in a new chat, asks, and waits for the answer's end."""
    page.goto("/")
    for file in files:
        with page.expect_event("requestfinished", lambda request: "/process/status" in request.url):
            page.locator("input[type=file]").first.set_input_files(file)
    page.locator("#chat-input").click()
    page.keyboard.type(question)
    until(partial(is_sent, page), LONGEST_S, "the question was not sent")
    page.get_by_text("2 Sources", exact=True).wait_for()
    page.locator(".copy-response-button").wait_for()  # below an answer that has ended


def is_sent(page: Page) -> bool:
    """Sends what was typed, unless a file still seems to be coming."""
    page.keyboard.press("Enter")
    page.wait_for_timeout(500)
    return not page.locator("#chat-input").inner_text().strip()


def test_the_second_answer_about_uploaded_files_reuses_them(tessera: TesseraServer, page: Page, tmp_path: Path) -> None:
    files = []
    for name, text in FILES.items():
        files.append(tmp_path / name)
        files[-1].write_text(text)
    ask(page, files, "How long is the Milton Bridge?")
    ask(page, files[::-1], "When was the Milton Bridge opened?")
    assert tessera.statuses() == ["2 filled", "2 hit"]
    page.get_by_text("2 Sources", exact=True).click()
    for place, file in enumerate(files[::-1], start=1):
        page.get_by_label(f"View source: {place} {file.name}", exact=True).wait_for()


def test_the_page_names_the_version_that_is_installed() -> None:
    code = "import importlib.metadata; print(importlib.metadata.version('open-webui'))"
    ran = subprocess.run([ENVIRONMENT / "python", "-c", code], capture_output=True, text=True, check=True)
    page = (ROOT / "docs/integrations/openwebui.md").read_text(encoding="utf-8")
    assert re.findall(r"open-webui ([\d.]*\d)", page) == [ran.stdout.strip()], "change docs/integrations/openwebui.md"
