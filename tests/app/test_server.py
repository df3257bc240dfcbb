# SPDX-License-Identifier: Apache-2.0
"""The last lines of a start."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from app import server
from app.advice import off_message
from app.settings import Settings
from cache.positions.strategy import UNKNOWN
from engine_ext.chunks.cache_off import CacheOff

REASON = "self-check failed: rotation: loaded KV differs from computed KV by 0.5"


def told(cache: Any, use: Any, capsys: pytest.CaptureFixture[str]) -> list[str]:
    engine: Any = SimpleNamespace(cache=cache, strategy=UNKNOWN)
    server._tell_ready(engine, "http://0.0.0.0:8000", 0, Settings(chunk_cache=use))
    return capsys.readouterr().err.splitlines()


def test_a_cache_that_is_off_though_nobody_asked_has_the_last_word(capsys: pytest.CaptureFixture[str]) -> None:
    ready, last = told(CacheOff(REASON), "on", capsys)
    assert ready.startswith("tessera: ready at http://127.0.0.1:8000 after ")
    assert ready.endswith(" s (chunk cache off)")
    assert last == f"tessera: {off_message(REASON)}"


def test_a_cache_that_was_switched_off_is_as_it_should_be(capsys: pytest.CaptureFixture[str]) -> None:
    (ready,) = told(CacheOff("switched off"), "off", capsys)
    assert ready.endswith("(chunk cache off)")


@pytest.mark.parametrize("use", ["on", "require"])
def test_a_cache_that_is_on(use: str, capsys: pytest.CaptureFixture[str]) -> None:
    (ready,) = told(SimpleNamespace(reason=None, num_tokens=64000, placement="copy"), use, capsys)
    assert "(chunk cache on: 64000 tokens; placement: copy; positions: offset" in ready
