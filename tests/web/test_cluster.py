# SPDX-License-Identifier: Apache-2.0
"""The view "Cluster", through a real router and directly at the replica."""

import asyncio
import time

import pytest
from playwright.sync_api import expect

from machine.server_process import ServerProcess
from replicas.redis_registry import RedisRegistry
from replicas.registry import Replica
from tests.support.accessibility import check


@pytest.fixture(scope="module")
def router(demo, tmp_path_factory):
    """A router of two replicas, which are one server under two addresses."""
    if demo.redis is None:
        pytest.skip("no Redis is installed (scripts/test_servers.sh)")
    url = f"http://localhost:{demo.process.port}"
    second = Replica("b" * 12, "b", url, ("demo",), "", load=1, held_tokens=64, capacity_tokens=1024)
    asyncio.run(beat(demo.redis.url, second))
    log = tmp_path_factory.mktemp("router") / "router.log"
    router = ServerProcess(log, "--registry", demo.redis.url, serve=("app.cli", "route")).wait_ready()
    try:
        while len(router.client.get("/v1/cluster").json()["replicas"]) < 2:
            time.sleep(0.1)
        yield router
    finally:
        router.stop()


async def beat(url: str, replica: Replica) -> None:
    registry = RedisRegistry(url, lease_s=600)
    await registry.beat(replica)
    await registry.close()


@pytest.fixture
def routed(router, server, browser):
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    page.goto(router.url)
    page.get_by_text("Connected").wait_for()
    yield page
    context.close()


def test_replicas_and_decisions(routed, router):
    routed.get_by_role("button", name="Load example and ask").click()
    expect(routed.locator(".facts")).to_contain_text("Replica")
    name = routed.locator(".facts dd").last.inner_text()
    routed.get_by_role("link", name="Cluster").click()
    expect(routed.locator("#cluster-status")).to_contain_text("The registry answers.")
    expect(routed.locator("#replicas tbody tr th")).to_have_text(["a", "b"])
    expect(routed.locator("#replicas")).to_contain_text("tokens of")
    decision = routed.locator("#decisions tbody tr").first
    expect(decision).to_contain_text("/v1/rag/chat")
    expect(decision.locator("td").nth(1)).to_have_text(name)
    expect(decision).to_contain_text("%")
    expect(decision).to_contain_text("ms")


@pytest.mark.parametrize(("theme", "width"), [("light", 1280), ("dark", 1280), ("light", 360)])
def test_is_accessible(routed, theme, width):
    routed.set_viewport_size({"width": width, "height": 800})
    routed.emulate_media(color_scheme=theme)
    routed.get_by_role("link", name="Cluster").click()
    expect(routed.locator("#replicas tbody tr")).to_have_count(2)
    check(routed)


def test_the_cache_shown_is_that_of_the_replica_chosen(routed):
    routed.get_by_role("link", name="Cache").click()
    expect(routed.locator("#replica")).to_have_value("a")
    with routed.expect_request(lambda request: request.headers.get("x-tessera-replica") == "b"):
        routed.locator("#replica").select_option("b")


def test_a_replica_by_itself_knows_the_others_and_no_decisions(router, page):
    page.get_by_role("link", name="Cluster").click()
    expect(page.locator("#replicas tbody tr th")).to_have_text(["a", "b"])
    expect(page.locator("#decisions-card")).to_be_hidden()


def test_without_a_registry_there_is_no_such_view(page):
    refusal = {"status": 404, "body": '{"error": {"message": "this server has no registry (--registry)"}}'}
    page.route("**/v1/cluster", lambda route: route.fulfill(**refusal))
    page.goto(page.url.split("#")[0] + "#cluster")
    page.reload()
    page.get_by_text("Connected").wait_for()
    expect(page.get_by_role("link", name="Cluster")).to_be_hidden()
    expect(page.locator("#view-ask")).to_be_visible()
