# SPDX-License-Identifier: Apache-2.0
"""A fake of vLLM's engine client: requests take turns of the event loop, pages store their tags."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from types import SimpleNamespace
from typing import Any

from vllm.sampling_params import SamplingParams

from cache.config import ChunkCacheConfig
from cache.positions.layout import Chunk, ChunkedPrompt, pack
from cache.report import Report
from cache.segments.holdings import DocumentKey
from engine_ext.chunks.chunk_cache import ChunkCache, FillLimits
from engine_ext.client.engine import ChunkEngine
from engine_ext.client.request import REQUEST_KEY, CacheOptions, ChunkedRequest, Ticket
from engine_ext.core.attention.probes import Measured
from engine_ext.wire.plan import Span, TransferPlan
from tests.cache.helpers import PAGE_TOKENS, Clock


class FakeLLM:
    """``pages`` maps a page to its saved tag and tokens, with which loads are compared.

    ``loses(request)`` decides whether a request's save is lost; ``num_others`` counts other clients' requests.
    """

    renderer = None

    def __init__(self) -> None:
        self.model_config = SimpleNamespace(max_model_len=100_000, max_logprobs=20, hf_config=SimpleNamespace())
        self.vllm_config = SimpleNamespace(
            scheduler_config=SimpleNamespace(policy="fcfs", max_num_seqs=128),
            observability_config=SimpleNamespace(otlp_traces_endpoint=None),
        )
        self.pages: dict[int, tuple[int, tuple[int, ...]]] = {}
        self.attention: dict[int, list[Measured]] = {}
        """Of probes: to each token of their context the same."""
        self.computed: Counter[tuple[int, ...]] = Counter()
        self.running: set[str] = set()
        self.num_others = 0
        self.output_processor = self  # vLLM's processor tracks running requests
        self.loses: Callable[[tuple[int, ...]], bool] = lambda prompt_ids: False
        self.work: Callable[[int], Any] = lambda num_tokens: turns(3)

    def get_num_unfinished_requests(self) -> int:
        return len(self.running) + self.num_others

    async def add_lora(self, lora: Any) -> bool:
        return True

    async def generate(self, prompt: Any, params: SamplingParams, request_id: str, **kwargs: Any) -> AsyncIterator[Any]:
        assert request_id not in self.running
        prompt_ids = tuple(prompt["prompt_token_ids"])
        plan = TransferPlan.from_params((params.extra_args or {}).get("kv_transfer_params")) or TransferPlan()
        self.running.add(request_id)
        try:
            if not plan.windows:  # of another sequence
                self._load(plan.loads, prompt_ids)
            if plan.probe is not None:
                weights = [1 / len(prompt_ids)] * plan.num_loaded_tokens
                self.attention[plan.probe] = [(1, weights, b"")] * len(plan.windows)
            await self.work(len(prompt_ids) - plan.num_loaded_tokens)
            is_saved = not self.loses(prompt_ids)
            if is_saved:
                self._save(plan.saves, prompt_ids)
            yield _output(plan, is_saved)
        finally:
            self.running.remove(request_id)

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        assert method == "chunk_cache_take_attention"
        return [self.attention.pop(*args)]

    def _load(self, spans: Sequence[Span], prompt_ids: tuple[int, ...]) -> None:
        for span in spans:
            wanted = prompt_ids[span.start - span.skipped : span.end]
            for tag, tokens in map(self.pages.__getitem__, span.pages):
                assert (tag, tokens[: len(wanted)]) == (span.tag, wanted)

    def _save(self, spans: Sequence[Span], prompt_ids: tuple[int, ...]) -> None:
        for span in spans:
            tokens = prompt_ids[span.start : span.end]
            self.computed[tokens] += 1
            self.pages.update(dict.fromkeys(span.pages, (span.tag, tokens)))


def _output(plan: TransferPlan, is_saved: bool) -> Any:
    return SimpleNamespace(
        finished=True,
        metrics=None,
        num_cached_tokens=plan.num_loaded_tokens,
        outputs=[SimpleNamespace(finish_reason="length", token_ids=[7])],
        kv_transfer_params={"saved": is_saved} if plan.saves else None,
    )


async def turns(number: int) -> None:
    """Yields to other tasks this many times."""
    for _ in range(number):
        await asyncio.sleep(0)


def make_cache(
    llm: Any, num_pages: int = 64, max_running: int = 4, max_queued: int = 1024, **options: Any
) -> ChunkCache:
    config = ChunkCacheConfig(num_pages, PAGE_TOKENS, "engine")
    return ChunkCache(llm, config, FillLimits(max_running, max_queued), clock=Clock(), **options)


def make_engine(*sizes: int, **options: Any) -> tuple[ChunkEngine, FakeLLM]:
    """With the arguments of :func:`make_cache`."""
    llm: Any = FakeLLM()
    return ChunkEngine(llm, make_cache(llm, *sizes, **options)), llm


async def ask(
    engine: ChunkEngine,
    prompt: ChunkedPrompt,
    options: CacheOptions | None = None,
    params: SamplingParams | None = None,
    documents: tuple[DocumentKey, ...] = (),
    **kwargs: Any,
) -> Report:
    """The report of one request."""
    params = params or SamplingParams(max_tokens=1)
    ticket = Ticket(options or CacheOptions(), (None,) * len(prompt.chunks), documents)
    engine_input: Any = {"prompt_token_ids": prompt.token_ids, REQUEST_KEY: ChunkedRequest(ticket, prompt)}
    async for _ in engine.generate(engine_input, params, f"request-{id(ticket)}", **kwargs):
        pass
    return Report.model_validate(ticket.report)


def chunk(first: int, length: int) -> Chunk:
    return Chunk(pack(tuple(range(first, first + length))))
