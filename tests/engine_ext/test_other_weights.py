# SPDX-License-Identifier: Apache-2.0
"""Changing vLLM's weights or discarding its KV empties the chunk cache."""

import asyncio
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock, call

import pytest

from cache.positions.layout import ChunkedPrompt
from engine_ext.client.engine import ChunkEngine
from engine_ext.client.request import CacheOptions
from tests.engine_ext.fake_llm import ask, chunk, make_engine, turns

PROMPT = ChunkedPrompt((1, 2, 3), (chunk(100, 9),), (9, 9))
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("reset_prefix_cache", {}),
    ("sleep", {"level": 1}),
    ("sleep", {"level": 2}),
    ("release_kv_cache_memory", {}),
    ("pause_generation", {"mode": "wait"}),
    ("update_weights", {"request": None}),
    ("finish_weight_update", {"weight_version": "2"}),
]


async def status(engine: ChunkEngine) -> str | None:
    return (await ask(engine, PROMPT)).chunks[0].status


@pytest.mark.parametrize(("name", "arguments"), CALLS)
async def test_nothing_of_before_is_found(name: str, arguments: dict[str, Any]) -> None:
    engine, llm = make_engine()
    setattr(llm, name, AsyncMock(return_value=True))
    assert [await status(engine), await status(engine)] == ["filled", "hit"]
    await getattr(engine, name)(**arguments)
    getattr(llm, name).assert_awaited_once()
    why = "asleep" if name in ("sleep", "release_kv_cache_memory") else "reset"
    assert set(engine.cache.manager.metrics.removals) == {why}
    assert [await status(engine), await status(engine)] == ["filled", "hit"]


@pytest.mark.parametrize("name", ["reset_prefix_cache", "sleep", "pause_generation", "update_weights"])
@pytest.mark.parametrize("fails", [False, True])
async def test_nothing_that_was_computed_until_then_is_found(name: str, fails: bool) -> None:
    """Includes running fills, and partial changes of the weights."""
    engine, llm = make_engine()

    async def change(*_: Any, **__: Any) -> None:
        await status(engine)
        running.append(asyncio.create_task(status(engine)))
        await turns(1)
        if fails:
            raise RuntimeError

    running: list[asyncio.Task[str | None]] = []
    setattr(llm, name, change)
    with pytest.raises(RuntimeError) if fails else nullcontext():
        await getattr(engine, name)()
    await asyncio.gather(*running)
    assert await status(engine) == "filled"


@pytest.mark.parametrize("is_complete", [False, True])
async def test_workers_forget_their_pages_if_requests_that_run_are_to_be_computed_anew(is_complete: bool) -> None:
    engine, llm = make_engine()
    calls: Any = Mock()
    llm.collective_rpc, llm.reset_prefix_cache = calls.rpc, calls.reset = AsyncMock(), AsyncMock(return_value=False)
    assert not await engine.reset_prefix_cache(is_complete)
    expected = [call.rpc("chunk_cache_forget")] if is_complete else []
    assert calls.mock_calls == [*expected, call.reset(is_complete)]


async def test_a_pause_that_keeps_vllms_cache_keeps_the_chunk_cache() -> None:
    engine, llm = make_engine()
    llm.pause_generation = AsyncMock()
    await status(engine)
    await engine.pause_generation(clear_cache=False)
    assert await status(engine) == "hit"


class Adapters:
    """Adapters of an engine, both named `a`, with files in a folder."""

    def __init__(self, folder: Path) -> None:
        self.engine, self.llm = make_engine()
        self.folder = folder

    def request(self, number: int, *, load_inplace: bool = False) -> Any:
        return SimpleNamespace(lora_name="a", lora_int_id=number, lora_path=str(self.folder), load_inplace=load_inplace)

    async def ask(self, number: int) -> tuple[str, str | None, str | None]:
        report = await ask(self.engine, PROMPT, CacheOptions(), lora_request=self.request(number))
        return report.mode, report.reason, report.chunks[0].status

    async def statuses(self, *numbers: int) -> list[str | None]:
        return [(await self.ask(number))[2] for number in numbers]


@pytest.fixture
def adapters(tmp_path: Path) -> Adapters:
    return Adapters(tmp_path)


async def test_an_adapter_is_told_from_others_and_from_what_it_was_also_if_a_load_fails(adapters: Adapters) -> None:
    assert (await adapters.ask(1))[:2] == ("full", "the adapter a was not loaded by this server")
    for number in (1, 2):
        await adapters.engine.add_lora(adapters.request(number))
    assert await adapters.statuses(1, 2, 1) == ["filled", "filled", "hit"]
    assert await status(adapters.engine) == "filled"
    again = adapters.request(1, load_inplace=True)
    await adapters.engine.add_lora(again)
    assert not again.load_inplace, "vLLM would read the files before every step"
    assert await adapters.statuses(1, 1) == ["filled", "hit"]
    await adapters.engine.add_lora(adapters.request(1))
    assert await adapters.statuses(1, 1) == ["filled", "hit"]
    adapters.llm.add_lora = AsyncMock(side_effect=RuntimeError)
    with pytest.raises(RuntimeError):
        await adapters.engine.add_lora(adapters.request(1))
    assert await adapters.statuses(1, 1) == ["filled", "hit"]


async def test_an_adapter_whose_files_change_is_not_reused_until_it_is_loaded_again(adapters: Adapters) -> None:
    weights = adapters.folder / "adapter_model.safetensors"
    weights.write_bytes(b"old")
    await adapters.engine.add_lora(adapters.request(1))
    assert await adapters.ask(1) == ("chunked", None, "filled")
    weights.write_bytes(b"new weights")
    assert await adapters.ask(1) == ("full", "files of the adapter a changed since it was loaded", None)
    await adapters.engine.add_lora(adapters.request(1))
    assert await adapters.ask(1) == ("chunked", None, "filled")
