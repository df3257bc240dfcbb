# SPDX-License-Identifier: Apache-2.0
"""Chunks behind LoRA adapters: separate per adapter, and never reused after its weights change."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine.server import TesseraServer
from tests.support.adapters import Adapter
from tests.support.exactness import STRATEGIES, ask, assert_exact, statuses
from tests.support.tier_servers import archived

pytestmark = pytest.mark.matrix


@pytest.fixture(scope="module")
def adapters(model_path: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Adapter]:
    folder, model = tmp_path_factory.mktemp("adapters"), model_path("tiny-llama")
    return {name: Adapter.make(name, seed, model, folder) for seed, name in enumerate("ab")}


@pytest.fixture
def server(serve: Any, adapters: dict[str, Adapter], tmp_path_factory: pytest.TempPathFactory) -> TesseraServer:
    modules = [f"{name}={adapter.folder}" for name, adapter in adapters.items()]
    flags = ("--enable-lora", "--max-lora-rank", "8", "--max-loras", "2", "--lora-modules", *modules)
    tier = f"file://{tmp_path_factory.getbasetemp()}/lora-tier?size=1GiB"
    environment = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    return serve("tiny-llama", *flags, "--chunk-cache-tiers", tier, environment=environment)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_each_adapter_has_its_own_chunks(strategy, server, adapters, oracle, text):
    system, a, b, c = text(20), text(150), text(60), text(40)
    references = {"a": adapters["a"].merged, "b": adapters["b"].merged, server.model: oracle("tiny-llama")}
    for chunks, expected in (([a, b], ["filled", "filled"]), ([b, a], ["hit", "hit"]), ([c, a], ["filled", "hit"])):
        for model, reference in references.items():
            response = ask(server, strategy, chunks, text(15), system=system, model=model)
            assert statuses(response) == expected
            assert response["model"] == model
            assert_exact(response, reference, strategy)


def load(server: TesseraServer, name: str, folder: Path, **fields: Any) -> None:
    body = {"lora_name": name, "lora_path": str(folder), **fields}
    answered = server.client.post("/v1/load_lora_adapter", json=body)
    assert answered.status_code == 200, answered.text


def copied(adapter: Adapter, folder: Path) -> None:
    shutil.copytree(adapter.folder, folder, dirs_exist_ok=True)


def test_an_adapter_loaded_over_another_finds_nothing_of_it(server, adapters, tmp_path, text):
    """Same name, number and path, with questions long enough for blocks in vLLM's prefix cache."""
    system, chunks, question, folder = text(20), [text(300), text(130)], text(200), tmp_path / "adapter"

    def check(adapter: Adapter, *expected: str) -> None:
        for status in expected:
            response = ask(server, "shared", chunks, question, system=system, model="changing")
            assert statuses(response) == [status] * 2
            assert_exact(response, adapter.merged, "shared")

    copied(adapters["a"], folder)
    load(server, "changing", folder)
    check(adapters["a"], "filled", "hit")
    copied(adapters["b"], folder)
    changed = ask(server, "shared", chunks, question, system=system, model="changing")["cache"]
    reason = "files of the adapter changing changed since it was loaded"
    assert (changed["mode"], changed["reason"]) == ("full", reason)
    plan = server.post("/v1/rag/plan", {"system": system, "chunks": chunks, "question": "?", "model": "changing"})
    assert (plan["mode"], plan["reason"]) == (changed["mode"], changed["reason"])
    load(server, "changing", folder, load_inplace=True)
    check(adapters["b"], "filled", "hit")
    copied(adapters["a"], folder)
    load(server, "changing", folder, load_inplace=True)
    check(adapters["a"], "filled", "hit")
    assert server.client.post("/v1/unload_lora_adapter", json={"lora_name": "changing"}).status_code == 200
    load(server, "changing", adapters["b"].folder)
    check(adapters["b"], "filled", "hit")


def test_chunks_behind_adapters_stay_in_the_pool(server, text):
    """Tiers skip adapters' chunks: another process would give the name another meaning."""
    before = archived(server)["counters"]["tiers"].get("file", {})
    body = {"chunks": [text(100)], "question": text(10), "max_tokens": 1}
    assert statuses(server.chat(**body, model="a")) == ["filled"]
    assert statuses(server.chat(**body)) == ["filled"]
    stored = archived(server)["counters"]["tiers"]["file"]["stored"]
    assert stored - before.get("stored", 0) == 2  # the system segment and the chunk of the base model


def test_ingested_chunks_are_the_adapters(server, adapters, text):
    system, chunk = text(20), text(150)
    lines, _ = server.ingest([chunk], system=system, model="b")
    assert [line["status"] for line in lines] == ["filled"]
    for model, status in (("b", "hit"), ("a", "filled")):
        response = ask(server, "offset", [chunk], text(15), system=system, model=model)
        assert statuses(response) == [status]
        assert_exact(response, adapters[model].merged, "offset")
