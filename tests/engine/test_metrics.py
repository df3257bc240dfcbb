# SPDX-License-Identifier: Apache-2.0
"""GET /metrics of running servers; docs/operations.md documents every metric."""

import re
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from app.http.refusals import RETRY_AFTER_S
from machine.server_process import ROOT
from tests.engine.server import TesseraServer
from tests.support.tier_servers import STORING

Text = Callable[[int], str]
REFUSING = ("--no-chunk-cache", "--max-num-queued-reqs", "0")


def families(server: TesseraServer) -> set[tuple[str, str, frozenset[str]]]:
    """Name (counters with _total), type and labels of every Tessera metric."""
    found = set()
    for family in text_string_to_metric_families(server.client.get("/metrics").text):
        if family.name.startswith("tessera_") and not family.name.endswith("_created"):
            name = family.name + ("_total" if family.type == "counter" else "")
            labels = {label for sample in family.samples for label in sample.labels}
            found.add((name, family.type, frozenset(labels - {"le", "engine", "model_name"})))
    return found


def documented() -> set[tuple[str, str, frozenset[str]]]:
    """The same, from the table of metrics."""
    text = (ROOT / "docs" / "operations.md").read_text()
    rows = re.findall(r"^\| `(tessera_\w+)(?:\{([\w,]+)\})?` \| (\w+) \| .+ \|$", text, re.MULTILINE)
    assert len(rows) == len(re.findall(r"^\| `tessera_", text, re.MULTILINE))
    return {(name, kind, frozenset(filter(None, labels.split(",")))) for name, labels, kind in rows}


def value(server: TesseraServer, name: str, **labels: str) -> float:
    """One sample; unspecified labels are ignored."""
    for family in text_string_to_metric_families(server.client.get("/metrics").text):
        for sample in family.samples:
            if sample.name == f"tessera_{name}" and labels.items() <= sample.labels.items():
                return sample.value
    raise AssertionError(f"no {name} with {labels}")


def settled(server: TesseraServer, *names: str) -> dict[str, float]:
    """Samples that no longer change: workers' samples arrive with the engine's next outputs."""
    before: dict[str, float] = {}
    for _ in range(20):
        now = {name: value(server, name) for name in names}
        if now == before:
            return now
        before = now
        time.sleep(0.2)
    raise AssertionError(f"{before} keep changing")


@pytest.mark.serve_with(*STORING)
def test_every_metric_is_documented_and_every_documented_one_exists(server: TesseraServer, text: Text) -> None:
    # Reasons appear once counted.
    server.chat(chunks=[text(50)], question="?", max_tokens=1, cache={"mode": "full"})
    assert families(server) == documented()


@pytest.mark.serve_with(*REFUSING)
@pytest.mark.matrix
def test_with_the_cache_off_only_its_state_is_shown(server: TesseraServer) -> None:
    shown = {"tessera_cache_state", "tessera_self_check_passed", "tessera_event_loop_tasks"}
    assert {name for name, _, _ in families(server)} == shown
    assert value(server, "cache_state", state="switched_off") == 1


@pytest.mark.matrix
def test_workers_count_what_they_move(server: TesseraServer, text: Text) -> None:
    names = [f"{verb}_{what}" for verb in ("load", "save") for what in ("tokens_total", "bytes_total", "seconds_count")]
    chunks = [text(300), text(200)]
    before = settled(server, *names)
    filled = server.chat(system=text(30), chunks=chunks, question="?", max_tokens=1)["cache"]
    after = settled(server, *names)
    grown = {name: after[name] - before[name] for name in names}
    assert [chunk["status"] for chunk in filled["chunks"]] == ["filled", "filled"]
    # The chunks, and the system segment with the first.
    assert grown["save_tokens_total"] > sum(chunk["tokens"] for chunk in filled["chunks"])
    assert grown["save_tokens_total"] < filled["tokens"]["prompt"]
    # Two fills, of which the second loads the system segment, and the request itself.
    assert (grown["save_seconds_count"], grown["load_seconds_count"]) == (2, 2)
    # The system segment may be in vLLM's prefix cache, which comes first.
    assert grown["load_tokens_total"] >= sum(chunk["tokens"] for chunk in filled["chunks"])
    page_tokens = server.stats()["occupancy"]["page_tokens"]
    token_bytes = value(server, "pool_bytes") / value(server, "pool_pages") / page_tokens
    for verb in ("load", "save"):
        assert grown[f"{verb}_bytes_total"] == grown[f"{verb}_tokens_total"] * token_bytes


def test_counters_are_those_of_the_stats_and_requests_are_not_logged(server: TesseraServer, text: Text) -> None:
    body = {"chunks": [text(50), text(60)], "question": "?", "max_tokens": 1}
    for _ in range(2):
        server.chat(**body)
    counters = server.wait_idle()["counters"]
    for result, count in counters["lookups"].items():
        assert value(server, "lookups_total", result=result, tier="pool") == count
    for kind, count in counters["tokens"].items():
        assert value(server, "tokens_total", kind=kind) == count
    assert value(server, "requests_total", mode="chunked") == counters["requests"]["chunked"]
    assert value(server, "leases") == value(server, "fills_running") == value(server, "fills_queued") == 0
    server.chat(chunks=[text(50)], question="?", max_tokens=1)
    assert " INFO request " not in server.log.read_text()


@pytest.mark.serve_with(*REFUSING)
@pytest.mark.matrix
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/rag/chat", {"chunks": ["a"], "question": "?"}),
        ("/v1/rag/chat", {"chunks": ["a"], "question": "?", "stream": True}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "?"}]}),
    ],
)
def test_a_full_queue_says_when_to_ask_again(path: str, body: dict[str, Any], server: TesseraServer) -> None:
    response: httpx.Response = server.client.post(path, json={**body, "max_tokens": 1})
    assert (response.status_code, response.headers.get("retry-after")) == (503, str(RETRY_AFTER_S)), response.text
