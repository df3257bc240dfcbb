# SPDX-License-Identifier: Apache-2.0
"""`tessera doctor` about placements, sparse methods and dtypes, on platforms that are not here, with a fake engine."""

import argparse
import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from itertools import repeat
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from vllm.engine.arg_utils import AsyncEngineArgs

from app import server
from app.arguments import parse
from app.commands.doctor import trial, trial_process
from app.models.demo_model import DEMO_MODEL
from app.settings import Settings, load_settings
from cache.errors import FullAttentionError
from cache.positions.strategy import UNKNOWN
from engine_ext.client.engine import ChunkEngine
from engine_ext.start import refusals, startup, support
from engine_ext.start.startup import start_chunk_engine
from engine_ext.start.support import attention_reason, kv_dtype_reason, turning_reason, unsupported_reason
from tests.support.comparing_llm import ComparingLLM

ANSWERS: dict[str, Any] = {
    "chunk_cache_prepare": {"num_pages": 400, "page_bytes": 1, "block_order": "order"},
    "chunk_cache_describe": {"copier": "Triton", "layout": "any", "isa": None, "pool_bytes": 400},
}
NEVER_RUN = "placement attend, sparse requests, windows computed anew, chunks read again, citations, sparse decoding"
IN_PLACE = ["--chunk-cache-placement", "in-place"]
TURNED = "Triton turns float8_e4m3fn on GPUs of compute capability 8.9 and later"


def cuda(*capability: int) -> Any:
    return device("cuda", capability)


def device(kind: str, capability: tuple[int, ...] | None = None) -> Any:
    return SimpleNamespace(
        device_type=kind,
        is_cpu=lambda: False,
        is_cuda=lambda: kind == "cuda",
        get_device_capability=lambda: capability,
    )


class Engine(ComparingLLM):
    """Its workers refuse nothing, or these."""

    def __init__(self, **refuse: str) -> None:
        super().__init__(torch.float32)
        self.differences = repeat(0.0)
        self.refuse = refuse

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        return [self.refuse.get(method, ANSWERS.get(method))]


class PassedCheck:
    def __init__(self, *_: Any) -> None:
        pass

    async def run(self, *_: Any) -> None:
        pass

    run_attention = run_in_place = run


Said = list[tuple[str, str, str | None]]


class Doctor:
    """Examines flags as `tessera doctor` does, but for the engine; keeps what it started."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.patch = monkeypatch.setattr
        self.args = argparse.Namespace()
        self.engine: Any = None

    def says(self, platform: Any, *flags: str, **refuse: str) -> Said:
        """States, texts and advice of what works and what does not."""
        self.args = args = parse([str(DEMO_MODEL), "--dtype", "float32", "--skip-tokenizer-init", *flags])
        args.model = args.model_tag
        settings = load_settings(args)
        llm = Engine(**refuse)
        llm.vllm_config = AsyncEngineArgs.from_cli_args(args).create_engine_config()
        llm.model_config = llm.vllm_config.model_config
        if platform is not None:
            self.patch(support, "current_platform", platform)

        @asynccontextmanager
        async def started_llm(_: AsyncEngineArgs) -> AsyncIterator[Engine]:
            yield llm

        @asynccontextmanager
        async def started_app(args: Any, settings: Settings) -> AsyncIterator[tuple[None, ChunkEngine]]:
            options = server._cache_options(settings, None)
            async with start_chunk_engine(AsyncEngineArgs.from_cli_args(args), options) as self.engine:
                yield None, self.engine

        self.patch(startup, "build_async_engine_client_from_engine_args", started_llm)
        self.patch(server, "started_app", started_app)
        found = asyncio.run(trial_process._try(args, settings))
        assert found["reason"] is None
        described = [(each.state, each.text, each.fix) for each in trial._described(found, settings)]
        return [each for each in described if "work here: " in each[1] or each[1].startswith("works here: ")]


@pytest.fixture
def doctor(monkeypatch: pytest.MonkeyPatch) -> Iterator[Doctor]:
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    monkeypatch.setattr(startup, "mark_engine", lambda: None)
    monkeypatch.setattr(startup, "SelfCheck", PassedCheck)
    monkeypatch.setattr(server, "prepare", lambda *_: None)
    return Doctor(monkeypatch)


def test_on_a_cpu_everything_works(doctor: Doctor) -> None:
    dtypes = "KV in float32, KV in float16, KV in bfloat16, KV in fp8"
    works = f"works here: placement copy, placement in-place, {NEVER_RUN}, {dtypes}"
    assert doctor.says(None, "--chunk-mode", "parallel") == [("ok", works, None)]


def test_on_a_gpu_the_words_are_those_by_which_the_engine_refuses(
    doctor: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(startup, "strategy_for", lambda _: UNKNOWN)
    said = doctor.says(cuda(9, 0))
    works, attention, fp8 = said
    dtypes = "KV in float32, KV in float16, KV in bfloat16"
    assert works == ("ok", f"works here: placement copy, placement in-place, {dtypes}", None)
    reason = attention_reason(doctor.engine.llm.vllm_config)
    assert attention == ("info", f"does not work here: {NEVER_RUN}: {reason}", None)
    with pytest.raises(FullAttentionError, match=f"can't be measured: {reason}"):
        doctor.engine.cache.check_attention()
    assert fp8 == ("info", f"does not work here: KV in fp8: {turning_reason('fp8', UNKNOWN)}", None)


def test_on_a_gpu_requests_attend_to_chunks_if_that_is_asked_for_and_passes_its_check(doctor: Doctor) -> None:
    works, refused = doctor.says(cuda(9, 0), "--chunk-cache-placement", "attend", "--chunk-mode", "parallel")
    assert works[1].startswith("works here: placement copy, placement in-place, placement attend, KV in float32")
    assert refused[1] == f"does not work here: {NEVER_RUN.removeprefix('placement attend, ')}: proven on CPUs only"
    assert doctor.engine.cache.placement == "attend"


def test_there_is_no_other_source_of_what_works(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "attention_reason", lambda *_, **__: "another reason")
    monkeypatch.setattr(startup, "in_place_reason", lambda _: "a third")
    said = doctor.says(cuda(9, 0), "--chunk-mode", "parallel")
    assert [text.rpartition(": ")[2] for state, text, _ in said if state == "info"] == ["a third", "another reason"]
    monkeypatch.setattr(startup, "attention_reason", lambda *_, **__: None)
    monkeypatch.setattr(startup, "in_place_reason", lambda _: None)
    assert len(doctor.says(cuda(9, 0), "--chunk-mode", "parallel")) == 1


@pytest.mark.parametrize(("capability", "reason"), [((8, 0), TURNED), ((8, 9), None), ((10, 0), None)])
def test_fp8_works_where_the_engine_takes_it(capability: tuple[int, int], reason: str | None, doctor: Doctor) -> None:
    said = doctor.says(cuda(*capability), "--chunk-mode", "parallel")
    refused = [text for state, text, _ in said if state == "info" and "KV in fp8" in text]
    assert refused == ([f"does not work here: KV in fp8: {reason}"] if reason else [])
    args = AsyncEngineArgs.from_cli_args(doctor.args)
    args.kv_cache_dtype = "fp8"
    assert unsupported_reason(args, doctor.engine.model_config) == (reason and f"--kv-cache-dtype=fp8: {reason}")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda model, patch: patch.setattr(support, "is_ascend", lambda: True), "on Ascend NPUs"),
        (lambda model, patch: setattr(model, "use_mla", True), "latent attention (MLA)"),
    ],
)
def test_fp8_is_refused_before_the_start(
    change: Callable[[Any, pytest.MonkeyPatch], None], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = SimpleNamespace(use_mla=False)
    assert kv_dtype_reason("fp8", model) is None
    change(model, monkeypatch)
    assert words in str(kv_dtype_reason("fp8", model))
    assert kv_dtype_reason("bfloat16", model) is None


@pytest.mark.parametrize(
    ("flags", "advice"),
    [
        (["--chunk-cache-placement", "attend"], "leave out --chunk-cache-placement attend: chunks are copied"),
        (["--decode-sparse-budget", "4096"], "leave out --decode-sparse-budget: generated tokens attend to everything"),
        (
            ["--chunk-mode", "offset~15%"],
            "choose a --chunk-mode without %P, ~P% and +P%: such requests run in full attention",
        ),
    ],
)
def test_what_is_asked_for_and_does_not_work_is_a_warning(flags: list[str], advice: str, doctor: Doctor) -> None:
    (warned,) = [each for each in doctor.says(device("npu"), *flags) if each[0] == "warn"]
    assert "proven on CPUs only" in warned[1]
    assert advice in str(warned[2])


def test_a_refusal_of_a_worker_is_told(doctor: Doctor) -> None:
    said = doctor.says(None, *IN_PLACE, chunk_cache_in_place_reason="blocks are dropped")
    said += doctor.says(None, "--decode-sparse-budget", "1", chunk_cache_prepare_decoding="less than 4 blocks")
    in_place, decoding = "placement in-place: blocks are dropped", "sparse decoding: the log says why"
    told = [f"does not work here: {each}" for each in (in_place, decoding)]
    assert [text for state, text, _ in said if state == "warn"] == told


def test_blocks_that_another_placement_would_keep_are_no_reason_against_it(
    doctor: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refusals, "drops_blocks", lambda *_, in_place: not in_place)
    dropped = {"chunk_cache_in_place_reason": "blocks are dropped"}
    (works, *_), (_, refused, *_) = (doctor.says(None, *flags, **dropped) for flags in ([], IN_PLACE))
    assert "placement in-place" in works[1]
    assert refused[1] == "does not work here: placement in-place: blocks are dropped"
