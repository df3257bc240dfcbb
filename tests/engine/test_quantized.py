# SPDX-License-Identifier: Apache-2.0
"""Chunks in a KV cache of fp8: in place as exact as the engine, turned keys rounded once more and reported."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.server import TesseraServer, token_logprobs
from tests.support.exactness import ask, full_attention, statuses
from tests.support.in_place import IN_PLACE
from tests.support.tier_servers import archived, origins, to_sleep

Text = Callable[[int], str]

FP8 = ("--kv-cache-dtype", "fp8")
pytestmark = [
    pytest.mark.matrix,
    pytest.mark.skipif(not torch.cpu._is_avx512_supported(), reason="vLLM's fp8 KV cache needs AVX-512 on the CPU"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("quantized") / "kv"


@pytest.fixture
def quantized(serve: Callable[..., TesseraServer], folder: Path) -> TesseraServer:
    """Shares chunks in place, and stores them."""
    tiers = ("--chunk-cache-tiers", f"file://{folder}?size=1GiB")
    return serve("tiny-llama", *FP8, *IN_PLACE, "--chunk-mode", "parallel", *tiers)


def files(server: TesseraServer, folder: Path) -> dict[str, bytes]:
    """The stored KV by key."""
    archived(server)
    return {path.name: path.read_bytes() for path in folder.glob("??/*")}


def test_one_chunk_in_place_is_full_attention(quantized: TesseraServer, text: Text) -> None:
    chunk, question = text(150), text(20)
    answers = [ask(quantized, "parallel", [chunk], question, cache=cache) for cache in ({}, {}, {"mode": "full"})]
    assert [each["cache"]["mode"] for each in answers] == ["chunked", "chunked", "full"]
    filled, hit, full = map(token_logprobs, answers)
    assert statuses(answers[1]) == ["hit"]
    assert filled == pytest.approx(full, abs=1e-5)
    assert hit == pytest.approx(full, abs=1e-5)


def test_blocks_have_the_bytes_of_a_fresh_computation(quantized: TesseraServer, text: Text, folder: Path) -> None:
    """Whatever stands beside the chunk, and also behind a tier."""
    a, b, c = (text(n) for n in (100, 37, 200))
    quantized.post("/v1/cache/clear", {})
    answer = ask(quantized, "parallel", [a, b, c], "What?")
    assert answer["cache"]["placement"] == "in-place"
    assert "kv" not in answer["cache"]
    before = files(quantized, folder)
    assert len(before) == 4
    to_sleep(quantized)
    loaded = ask(quantized, "parallel", [a, b, c], "What?")
    assert set(origins(loaded)) == {"file"}
    quantized.post("/v1/cache/clear", {})
    assert not files(quantized, folder)
    ask(quantized, "parallel", [text(60), c, b, a], "Which?")
    after = files(quantized, folder)
    assert before.items() <= after.items()
    again = ask(quantized, "parallel", [a, b, c], "What?")
    assert statuses(again) == ["hit"] * 3
    for each in (loaded, again):
        assert token_logprobs(each) == pytest.approx(token_logprobs(answer), abs=1e-5)


@pytest.mark.parametrize("strategy", ["offset", "shared"])
def test_turned_keys_are_reported(quantized: TesseraServer, text: Text, strategy: str) -> None:
    chunks = [text(100), text(60)]
    answer = ask(quantized, strategy, chunks, "What?")
    assert (answer["cache"]["mode"], answer["cache"]["kv"]) == ("chunked", "requantized")


@pytest.mark.serve_with(*FP8)
def test_keys_are_not_turned_unless_somebody_chose_to(server: TesseraServer, text: Text) -> None:
    reason = "offset positions turn keys, which rounds them once more"
    answer: dict[str, Any] = full_attention(server, [text(100), text(40)], text(20), reason)
    assert answer["usage"]["completion_tokens"] == 8
