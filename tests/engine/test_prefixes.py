# SPDX-License-Identifier: Apache-2.0
"""Ordinary prompts in tiers: found after evictions and restarts, exactly, and by nobody else."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from app.cli import main as tessera
from engine_ext.wire.prefix import is_block
from tests.engine.server import TesseraServer, wait_until_gone
from tests.support.exactness import ask, assert_exact, statuses
from tests.support.prefixes import STEPS, complete, settle, tokens_of
from tests.support.tenants import key_of, tenants_file
from tests.support.waiting import until

pytestmark = pytest.mark.matrix

Text = Callable[[int], str]

LITTLE = ("--enforce-eager", "--max-model-len", "4096", "--num-gpu-blocks-override", "40")
LITTLE += ("--chunk-cache-memory", "16MiB")
"""Memory for two conversations."""


class TierFolder:
    """A directory that servers share as their tier."""

    def __init__(self, folder: Path, model_path: Callable[[str], Path]) -> None:
        self.path = folder / "kv"
        self._folder, self._model_path = folder, model_path
        self.stack = ExitStack()

    def start(self, preset: str = "tiny-llama", *flags: str, **kwargs: Any) -> TesseraServer:
        log = self._folder / f"server-{len(list(self._folder.glob('*.log')))}.log"
        model = (str(self._model_path(preset)), "--dtype", "float32", *LITTLE)
        tiers = ("--chunk-cache-tiers", f"file://{self.path}?size=1GiB&timeout=60")
        tiers += ("--shutdown-timeout", "20")
        server = TesseraServer(log, *model, *tiers, *flags, **kwargs)
        self.stack.callback(server.stop)
        return server.wait_ready()

    def blocks(self) -> set[Path]:
        """Files of blocks, not of chunks."""
        return {path for path in self.path.glob("??/*.safetensors") if is_block(path.name.split(".")[0])}


@pytest.fixture
def tier(tmp_path: Path, model_path: Callable[[str], Path]) -> Iterator[TierFolder]:
    tier = TierFolder(tmp_path, model_path)
    with tier.stack:
        yield tier


def evict(server: TesseraServer, text: Text) -> None:
    """Fills the engine's KV cache with other prompts."""
    for number in range(4):
        complete(server, tokens_of(server, text(2000)), max_tokens=1, cache_salt=f"another {number}")
    settle(server)


def test_a_conversation_continues_after_eviction_and_restart(tier, oracle, text):
    server = tier.start()
    conversation = tokens_of(server, text(2000))
    computed, answer, _ = complete(server, conversation)
    assert computed == 0
    settle(server)
    conversation += answer
    for turn in range(4):
        if turn % 2:
            assert server.stop() == 0
            server = tier.start()
        else:
            evict(server, text)
        conversation += tokens_of(server, text(40))
        cached, answer, logprobs = complete(server, conversation)
        assert cached >= 0.9 * len(conversation), turn
        expected = oracle("tiny-llama").full(conversation, STEPS)
        assert logprobs == pytest.approx(expected.logprobs, abs=1e-4)
        assert answer == expected.tokens
        conversation += answer
        settle(server)


def test_only_the_same_salt_tenant_and_model_find_a_prompt(tier, text, tmp_path):
    tenants = tenants_file(tmp_path)
    server = tier.start("tiny-llama", "--tenants", tenants)
    server.client.headers.update(key_of("root"))
    prompt = tokens_of(server, text(1000))
    wanted = [("acme", {}), ("acme", {"cache_salt": "mine"})]
    for name, fields in wanted:
        complete(server, prompt, headers=key_of(name), **fields)
    settle(server)
    server.stop()
    server = tier.start("tiny-llama", "--tenants", tenants)
    server.client.headers.update(key_of("root"))
    others = [("beta", {}), ("acme", {"cache_salt": "other"}), ("beta", {"cache_salt": "mine"}), ("root", {})]
    for name, fields in others:
        assert complete(server, prompt, headers=key_of(name), max_tokens=1, **fields)[0] == 0
    for name, fields in wanted:
        assert complete(server, prompt, headers=key_of(name), max_tokens=1, **fields)[0] >= 896
    # Dropped for one tenant, from the tier as well: evicted, nothing is found.
    settle(server)
    before = tier.blocks()
    server.post("/v1/cache/clear", {"namespace": "acme"})
    assert len(before) > len(tier.blocks()) > 0
    server.stop()
    server = tier.start("tiny-qwen3", "--tenants", tenants)
    server.client.headers.update(key_of("root"))
    assert complete(server, prompt, headers=key_of("beta"), max_tokens=1)[0] == 0


def test_two_servers_share_a_directory_and_kill_9_damages_nothing(tier, oracle, text):
    one, two = tier.start(), tier.start()
    prompts = [tokens_of(one, text(1500)) for _ in range(6)]
    with ThreadPoolExecutor(2) as pool:
        asked = pool.submit(lambda: [complete(one, prompt) for prompt in prompts[:2]])
        until(lambda: len(tier.blocks()) > 3)
        pool.submit(lambda: complete(two, prompts[2], max_tokens=200))
        asked.result()
        time.sleep(0.3)
        one.process.kill()
    wait_until_gone(one.process.pid)
    assert tessera(["cache", "verify", str(tier.path)]) == 0
    settle(two)
    found = 0
    for prompt in prompts:
        cached, tokens, logprobs = complete(two, prompt)
        found += cached > 0
        expected = oracle("tiny-llama").full(prompt, STEPS)
        assert (tokens, logprobs) == (expected.tokens, pytest.approx(expected.logprobs, abs=1e-4))
    assert found >= 2


@pytest.mark.parametrize("placement", ["copy", "in-place"])
def test_compositions_are_found_too_and_never_in_part(placement, tier, oracle, text):
    """A long question behind chunks is stored with them; a short one is not."""
    server = tier.start("tiny-llama", "--chunk-cache-placement", placement)
    chunks, system, question = [text(200), text(150)], text(30), text(700)
    for asked in (question, text(20)):
        assert statuses(ask(server, "shared", chunks, asked, system=system)) in (["filled"] * 2, ["hit"] * 2)
        settle(server)
    assert len(tier.blocks()) >= 8
    evict(server, text)
    before = server.metric("tessera_load_tokens_total")
    again = ask(server, "shared", chunks, question, system=system)
    assert again["cache"]["tokens"]["computed"] < 150
    assert server.metric("tessera_load_tokens_total") == before  # nothing came from the pool
    assert_exact(again, oracle("tiny-llama"), "shared")
    other = ask(server, "shared", chunks[::-1], question, system=system)
    assert other["cache"]["tokens"]["computed"] >= 700
    assert_exact(other, oracle("tiny-llama"), "shared")
    # The last files are gone: what is left does not hold all chunks.
    evict(server, text)
    for path in tier.blocks():
        if int(path.name[:2], 16) % 2:
            path.unlink()
    assert_exact(ask(server, "shared", chunks, question, system=system), oracle("tiny-llama"), "shared")


def test_requests_that_attend_are_exact_and_not_stored(tier, oracle, text):
    server = tier.start("tiny-llama", "--chunk-cache-placement", "attend")
    chunks, question = [text(200), text(150)], text(700)
    for _ in range(2):
        assert_exact(ask(server, "shared", chunks, question), oracle("tiny-llama"), "shared")
        settle(server)
        assert not tier.blocks()
    evict(server, text)
    assert tier.blocks()
    assert_exact(ask(server, "shared", chunks, question), oracle("tiny-llama"), "shared")
