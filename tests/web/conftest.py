# SPDX-License-Identifier: Apache-2.0
"""A real Chromium, and a real server with the demo model."""

import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, Request, sync_playwright

from app.models.demo_model import DEMO_MODEL
from machine.redis_process import NoRedisError, RedisProcess
from tests.engine.server import TesseraServer
from web.example import Example, example_file

EXAMPLE = Example.read(example_file(str(DEMO_MODEL)))
MEMORY = ("--chunk-cache-memory", "64MiB", "--kv-cache-memory-bytes", "256M")
FLAGS = ("--served-model-name", "demo", "--enforce-eager", *MEMORY)
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def pytest_itemcollected(item: pytest.Item) -> None:
    if "demo" in getattr(item, "fixturenames", ()):
        item.add_marker(pytest.mark.engine)
        item.add_marker(pytest.mark.xdist_group("demo"))


class DemoServer:
    """The demo model's server, restartable at the same address."""

    def __init__(self, folder: Path, redis: RedisProcess | None) -> None:
        self.redis = redis
        self._folder = folder
        self._flags = [*FLAGS, "--collections", str(folder / "collections")]
        self._flags += ["--registry", redis.url, "--replica-name", "a"] if redis else []
        self.process = self.start()

    def start(self, *flags: str, port: int | None = None) -> TesseraServer:
        self.has_other_flags = bool(flags)
        log = self._folder / f"web-{len(list(self._folder.glob('web-*.log')))}.log"
        self.process = TesseraServer(log, str(DEMO_MODEL), *self._flags, *flags, port=port)
        return self.process.wait_ready()

    @property
    def url(self) -> str:
        return self.process.url


@pytest.fixture(scope="package")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DemoServer]:
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed (scripts/test_servers.sh)")
    folder = tmp_path_factory.mktemp("web")
    try:
        redis = RedisProcess(folder)
    except NoRedisError:
        redis = None  # the tests of the cluster's view are skipped
    with ExitStack() as stack:
        if redis is not None:
            stack.callback(redis.stop)
        server = DemoServer(folder, redis)
        stack.callback(lambda: server.process.stop())  # the latest process
        yield server


@pytest.fixture
def server(demo: DemoServer) -> Iterator[TesseraServer]:
    """The running server with an empty cache; after the test, idle with consistent books."""
    if demo.has_other_flags:  # left by another test
        demo.process.stop()
        demo.start()
    demo.process.post("/v1/cache/clear", {})
    yield demo.process
    demo.process.wait_idle()


@pytest.fixture(scope="module")
def browser(demo: DemoServer) -> Iterator[Browser]:
    """Module-scoped: while Playwright runs, no test can have its own event loop."""
    with (
        sync_playwright() as playwright,
        playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"]) as browser,
    ):
        yield browser


class Watched:
    """Records a page's errors (including the Content-Security-Policy's) and requests to other hosts."""

    def __init__(self, page: Page, url: str) -> None:
        self.errors: list[str] = []
        self.requests: list[Request] = []
        self._url = url
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", lambda said: self.errors.append(said.text) if said.type == "error" else None)
        page.on("request", self._note)

    def _note(self, request: Request) -> None:
        self.requests.append(request)
        if not request.url.startswith(self._url):
            self.errors.append(f"a request to {request.url}")


@pytest.fixture
def page(server: TesseraServer, browser: Browser) -> Iterator[Page]:
    """The loaded page; fails the test on page errors, except error responses."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    context.set_default_timeout(20_000)
    page = context.new_page()
    page.watched = Watched(page, server.url)
    page.goto(server.url)
    page.get_by_text("Connected").wait_for()
    yield page
    context.close()
    assert [error for error in page.watched.errors if not error.startswith("Failed to load resource")] == []
