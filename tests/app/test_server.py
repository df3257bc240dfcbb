# SPDX-License-Identifier: Apache-2.0
"""The last lines of a start."""

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from app import server
from app.advice import off_message
from app.settings import Settings
from cache.positions.strategy import UNKNOWN
from engine_ext.chunks.cache_off import CacheOff

REASON = "self-check failed: rotation: loaded KV differs from computed KV by 0.5"


ON = SimpleNamespace(reason=None, num_tokens=64000, placement="copy")


@pytest.mark.parametrize(
    ("cache", "use", "state", "last"),
    [
        (ON, "on", "(chunk cache on: 64000 tokens; placement: copy; positions: offset", []),
        (ON, "require", "(chunk cache on: 64000 tokens; placement: copy; positions: offset", []),
        (CacheOff("switched off"), "off", "(chunk cache off)", []),
        (CacheOff(REASON), "on", "(chunk cache off)", [f"tessera: {off_message(REASON)}"]),
    ],
)
def test_the_last_word_is_of_a_cache_that_is_off_though_nobody_asked(cache, use, state, last, capsys):
    engine = SimpleNamespace(cache=cache, strategy=UNKNOWN)
    server._tell_ready(engine, "http://0.0.0.0:8000", 0, Settings(chunk_cache=use))
    ready, *others = capsys.readouterr().err.splitlines()
    assert ready.startswith("tessera: ready at http://127.0.0.1:8000 after ")
    assert f" s {state}" in ready
    assert others == last
