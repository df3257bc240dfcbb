#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Create the web page's screenshots in docs/images (with the demo model, Redis, router, Chromium).

The cluster's second replica is the first under another address, so that one engine suffices. Run it with the project's
Python: .venv/bin/python scripts/screenshots.py
"""

import asyncio
import io
import shutil
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from PIL import Image
from playwright.sync_api import FilePayload, Page, expect, sync_playwright

from app.models.demo_model import DEMO_MODEL
from machine.redis_process import RedisProcess
from machine.server_process import ServerProcess
from measuring.quality.questions.demo_language import DEFAULT_SYSTEM
from replicas.redis_registry import RedisRegistry
from replicas.registry import Replica
from web.example import Example, example_file

EXAMPLE = Example.read(example_file(str(DEMO_MODEL)))

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
COLOURS = 256
ROUTE = ("app.cli", "route")


def main() -> None:
    """Starts all servers, captures every view in both themes, and stops the servers."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        redis = RedisProcess(folder)
        model = (str(DEMO_MODEL), "--served-model-name", "demo", "--chunk-cache-memory", "64MiB")
        server = ServerProcess(
            folder / "server.log",
            *model,
            "--registry",
            redis.url,
            "--replica-name",
            "a",
            "--collections",
            str(folder / "collections"),
        ).wait_ready()
        router = ServerProcess(folder / "router.log", "--registry", redis.url, serve=ROUTE)
        try:
            url = f"http://localhost:{server.port}"
            asyncio.run(_beat(redis.url, Replica("b" * 12, "b", url, ("demo",), "", 1, 416, 8192)))
            router.wait_ready()
            _take_all(server.url, router.url)
        finally:
            router.stop()
            server.stop()
            redis.stop()


async def _beat(url: str, replica: Replica) -> None:
    registry = RedisRegistry(url, lease_s=600)
    await registry.beat(replica)
    await registry.close()


def _take_all(server: str, router: str) -> None:
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1200, "height": 800})
        page.goto(server)
        _ask(page)
        _take(page, "ask")
        page.get_by_role("link", name="Collections").click()
        _use_collections(page)
        _take(page, "collections")
        page.get_by_role("link", name="Cache").click()
        _use_cache(page, server)
        _take(page, "cache")
        page.set_viewport_size({"width": 360, "height": 740})
        page.get_by_role("link", name="Ask").click()
        _take(page, "phone", is_whole=False)
        page.set_viewport_size({"width": 1200, "height": 560})
        page.goto(f"{router}/#cluster")
        _take_cluster(page)
        browser.close()


def _ask(page: Page) -> None:
    page.get_by_role("button", name="Load example and ask").click()
    expect(page.locator("#chunks .badge.hit")).to_have_count(len(EXAMPLE.documents))
    for _ in range(3):  # first requests are slow
        page.get_by_role("button", name="Shuffle").click()
        page.get_by_role("button", name="Compare with full attention").click()
        expect(page.locator("#ask-status")).to_contain_text("Full attention: first token")


def _use_collections(page: Page) -> None:
    """Makes a collection of a file for each three of the example's documents, and asks two questions."""
    page.locator("#collection option").first.wait_for(state="attached")
    page.get_by_label("Name", exact=True).fill("cities")
    starts = range(0, len(EXAMPLE.documents), 3)
    texts = ["\n\n".join(EXAMPLE.documents[start : start + 3]) for start in starts]
    files = [
        FilePayload(name=f"notes-{number}.txt", mimeType="text/plain", buffer=text.encode())
        for number, text in enumerate(texts, 1)
    ]
    page.locator("#collection-tokens").fill("16")
    page.locator("#upload-files").set_input_files(files)
    expect(page.locator("#upload-status")).to_contain_text("Passages")
    for number, question in enumerate(EXAMPLE.questions[:2], 1):
        page.locator("#turn-passages").evaluate("field => (field.value = 3)")
        page.locator("#turn-question").fill(question)
        page.get_by_role("button", name="Ask", exact=True).click()
        expect(page.locator("#turns .facts")).to_have_count(number)


def _use_cache(page: Page, server: str) -> None:
    """Creates activity for the plots: questions, a file, a pin."""
    body = {"system": DEFAULT_SYSTEM, "max_tokens": 16, "temperature": 0}
    page.locator("#ingest-system").fill(DEFAULT_SYSTEM)
    for step in range(12):
        chunks = [{"text": text} for text in EXAMPLE.documents[step % 5 :]]
        new = [{"text": f"The room number of Tivek is {100 + step}."}] if step % 4 == 1 else []
        fields = {**body, "chunks": [*chunks, *new], "question": EXAMPLE.questions[step % 5]}
        page.request.post(f"{server}/v1/rag/chat", data=fields)
        page.wait_for_timeout(1500)
    text = "\n\n".join(f"The phone number of Falcon is {number}." for number in range(300, 306))
    file = FilePayload(name="phones.txt", mimeType="text/plain", buffer=text.encode())
    page.locator("#ingest-files").set_input_files([file])
    page.locator("#ingest-tokens").fill("16")
    page.get_by_label("Pin: never evict").check()
    page.get_by_role("button", name="Compute ahead").click()
    expect(page.locator("#ingest-status")).to_contain_text("Done")
    page.wait_for_timeout(5000)


def _take_cluster(page: Page) -> None:
    page.get_by_text("Connected").wait_for()
    for step in range(6):
        chunks = list(EXAMPLE.documents[step : step + 6])
        page.request.post(
            f"{page.url.split('#')[0]}v1/rag/chat",
            data={"system": DEFAULT_SYSTEM, "chunks": chunks, "question": EXAMPLE.questions[0], "max_tokens": 4},
        )
        time.sleep(0.3)
    page.wait_for_timeout(4000)
    _take(page, "cluster")


def _take(page: Page, name: str, *, is_whole: bool = True) -> None:
    page.mouse.move(0, 0)
    page.evaluate("document.activeElement?.blur()")
    for theme in ("light", "dark"):
        page.emulate_media(color_scheme=theme)
        taken = Image.open(io.BytesIO(page.screenshot(full_page=is_whole)))
        path = IMAGES / f"web-{name}-{theme}.png"
        _with_few_colours(taken.convert("RGB")).save(path, optimize=True)
        print(f"{path.name}: {path.stat().st_size / 1000:.0f} KB")


def _with_few_colours(taken: Image.Image) -> Image.Image:
    """Reduces an image to its most frequent colours; others, at the edges of letters, become the nearest."""
    pixels, counts = np.unique(np.asarray(taken).reshape(-1, 3), axis=0, return_counts=True)
    palette = Image.new("P", (1, 1))
    palette.putpalette(pixels[counts.argsort()[::-1][:COLOURS]].flatten().tolist())
    return taken.quantize(palette=palette, dither=Image.Dither.NONE)


if __name__ == "__main__":
    main()
