# SPDX-License-Identifier: Apache-2.0
"""Cost of an open page, in the browser and on the server."""

import os
from pathlib import Path

import pytest
from playwright.sync_api import CDPSession, Page, expect

from machine.server_process import group_members

HOUR_MS = 3_600_000
EVERY_MS = 2000
MOST_SAMPLES = 600
SPAN_S = 20


@pytest.fixture
def opened(server, page):
    """The view "Cache" with some chunks and a frozen clock."""
    server.ingest([f"This is chunk {i}." for i in range(20)])
    page.clock.install()
    page.reload()
    page.get_by_text("Connected").wait_for()
    page.get_by_role("link", name="Cache").click()
    expect(page.locator(".plot").first).to_be_visible()
    page.clock.pause_at(page.evaluate("Date.now()") + 1000)
    return page


def answer_at_once(page: Page) -> None:
    """Replaces polling by immediate statistics with growing counters; records kept and added samples."""
    page.evaluate("""async () => {
        const chunks = await (await fetch("v1/rag/chunks")).json();
        const stats = await (await fetch("v1/cache/stats")).json();
        window.fetch = async (path) => {
            if (path.startsWith("v1/rag/chunks")) return new Response(JSON.stringify(chunks));
            if (window.added % 10 === 0) stats.counters.lookups.hit = (stats.counters.lookups.hit ?? 0) + 3;
            stats.counters.tokens.reused = (stats.counters.tokens.reused ?? 0) + 500;
            return new Response(JSON.stringify(stats));
        };
        const { History } = await import("/web/series.js");
        const add = History.prototype.add;
        window.kept = window.added = 0;
        History.prototype.add = function (...given) {
            add.apply(this, given);
            window.kept = Math.max(window.kept, this.samples.length);
            window.added++;
        };
    }""")


def poll(page: Page, times: int) -> None:
    """Runs this many polls."""
    until = page.evaluate("window.added") + times
    while page.evaluate("window.added") < until:
        page.clock.run_for(30 * EVERY_MS)


def memory(session: CDPSession) -> tuple[float, float]:
    """JavaScript heap bytes and DOM nodes, after garbage collection."""
    session.send("HeapProfiler.collectGarbage")
    metrics = {each["name"]: each["value"] for each in session.send("Performance.getMetrics")["metrics"]}
    return metrics["JSHeapUsedSize"], metrics["Nodes"]


@pytest.mark.matrix
def test_memory_stays_bounded_over_an_hour(opened):
    session = opened.context.new_cdp_session(opened)
    session.send("Performance.enable")
    answer_at_once(opened)
    polls = HOUR_MS // EVERY_MS
    poll(opened, MOST_SAMPLES)
    heap, nodes = memory(session)
    poll(opened, polls - MOST_SAMPLES)
    heap_later, nodes_later = memory(session)
    assert opened.evaluate("window.kept") == MOST_SAMPLES
    assert heap_later < heap + 1_000_000
    assert nodes_later < nodes + 100


def test_nothing_is_asked_while_the_tab_is_hidden(opened):
    hide = """hidden => {
        Object.defineProperty(document, "hidden", {value: hidden, configurable: true});
        document.dispatchEvent(new Event("visibilitychange"));
    }"""
    opened.evaluate(hide, True)
    opened.wait_for_load_state("networkidle")
    asked = []
    opened.on("request", lambda request: asked.append(request.url))
    opened.clock.run_for(60_000)
    assert asked == []
    with opened.expect_response("**/v1/cache/stats*"):
        opened.evaluate(hide, False)


def test_a_server_that_is_away_is_asked_less_often(opened):
    asked = []
    opened.on("request", lambda request: asked.append(request.url))
    opened.route("**/v1/**", lambda route: route.abort())
    for _ in range(60):
        opened.clock.run_for(1000)
        opened.wait_for_load_state("networkidle")
    assert 4 <= len(asked) <= 10
    expect(opened.locator("#trouble")).to_contain_text("Retrying every 15 s")
    opened.unroute("**/v1/**")
    opened.clock.run_for(15_000)
    expect(opened.locator("#trouble")).to_be_hidden()


@pytest.mark.matrix
def test_polling_costs_the_server_under_a_hundredth_of_a_core(server, page):
    page.get_by_role("link", name="Cache").click()
    expect(page.locator(".plot").first).to_be_visible()
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    with_page = cpu_seconds_of(server, page)
    assert len(asked) >= SPAN_S // 3
    page.goto("about:blank")
    without = cpu_seconds_of(server, page)
    share = (with_page - without) / SPAN_S
    print(f"polling took {100 * share:.2f} % of a core")
    assert share < 0.01


def cpu_seconds_of(server, page: Page) -> float:
    """CPU time of all server processes over a period."""
    before = cpu_seconds(server)
    page.wait_for_timeout(1000 * SPAN_S)
    return cpu_seconds(server) - before


def cpu_seconds(server) -> float:
    ticks = 0
    for member in group_members(os.getpgid(server.process.pid)):
        fields = Path(f"/proc/{member}/stat").read_text().rsplit(")", 1)[1].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")
