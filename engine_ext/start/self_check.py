# SPDX-License-Identifier: Apache-2.0
"""Start-up self-check: saved, rotated and loaded KV must equal KV that the engine computes itself.

Two checks, both comparing every layer's K and V token by token, through the real engine, pool and kernels:

1. *Reuse.* Random tokens, one chunk: chunk-isolated attention then equals plain causal attention and nothing is
   rotated. The question's KV depends on everything loaded, so values, order and views are checked.
2. *Rotation.* One token repeated: every position then attends to equal values, so all hidden states are equal,
   and the key at position ``p + d`` is exactly the key at ``p`` rotated by ``d``. A chunk loaded a second time,
   further on, must therefore equal what the engine computes there. This checks frequencies, sign and pairing.
   (With attention sinks hidden states are equal only before the first layer, whose KV alone is compared.)

In 16 bits or fewer, a router of experts may decide a near-tie in one way in a batch of one size and otherwise in
another: the engine does not reproduce its own KV then. So a difference counts only if it is there in batches of the
same sizes (reuse), and for several tokens (rotation).
"""

import random
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Final

import torch
from vllm.v1.engine.async_llm import AsyncLLM

from cache.config import ChunkCacheConfig
from cache.pool import ChunkBlockPool
from engine_ext.chunks.prefill import NotSavedError, run_prefill
from engine_ext.start.support import is_quantized
from engine_ext.wire.plan import Composition, Span, TransferPlan
from kernels.attention.plan import PREFILL_TOKENS

TOLERANCE: Final = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Of :func:`engine_ext.core.pages.relative_difference`. In transformers' bfloat16, SmolLM2 and Qwen2.5 reach 0.04."""
ROUNDED_ONCE_MORE: Final = 5
"""Times the tolerance where 16 bits of a turned key are rounded by one of two ways only.

Random tokens behind keys with large biases attend otherwise then. Qwen2.5-Coder-1.5B in bfloat16 with AVX-512: 0.22,
unturned 0.03, a segment turned by one position too many 1.2 and more.
"""
QUANTIZED_TOLERANCE: Final = 0.5
"""Two roundings to three bits of mantissa, or fewer of small values, with the differences that they cause in later
layers."""
_SYSTEM, _CHUNK, _QUESTION = 19, 45, 13
"""Tokens; system segment and chunk fill blocks of up to 64 tokens."""
_MOST_TOKENS = 4
"""Tokens that are tried for the rotation, in 16 bits or fewer."""


class SelfCheckError(Exception):
    """Reuse does not reproduce the engine's own KV; the message says where. The cache stays off."""


class SelfCheck:
    """Runs before the engine serves requests, on pages of the empty pool.

    ``window``: the tokens that attention of some layers is limited to, behind which vLLM may drop blocks.
    """

    def __init__(self, llm: AsyncLLM, config: ChunkCacheConfig, window: int | None = None) -> None:
        self._llm = llm
        self._window = window
        self._config = config
        self._pool = ChunkBlockPool(config.num_pages)
        self._random = random.Random(0)
        self._nonce = secrets.token_hex(8)
        self._borrowed: list[int] = []
        self._tag = 0

    async def run(self) -> None:
        """Raises :class:`SelfCheckError` if a difference is above the dtype's tolerance."""
        with self._borrowing():
            await self._check_reuse()
            await self._check_rotation()

    async def run_in_place(self, block_tokens: int) -> None:
        """Checks that KV behind a shared block equals KV computed without sharing.

        Raises :class:`SelfCheckError`.
        """
        prompt = [self._random_token() for _ in range(2 * block_tokens)]
        with self._borrowing():
            second = self._span(block_tokens, block_tokens)
            await self._request(prompt, "plain", TransferPlan(saves=(second,)))
            await self._behind_shared("in-place", prompt, second)

    async def run_attention(self) -> None:
        """Checks that attending to segments in the pool equals loading them.

        Compares the KV of a short and of a long question behind segments of several lengths: as they are, whose keys
        both ways read alike, and turned, whose keys only loading rounds. Raises :class:`SelfCheckError`.
        """
        with self._borrowing():
            context = [self._random_token() for _ in range(_SYSTEM + _CHUNK)]
            filled = self._span(0, len(context))
            await self._request(context, "attention-fill", TransferPlan(saves=(filled,)))
            system = replace(filled, length=_SYSTEM)
            chunk = replace(filled, start=_SYSTEM, length=_CHUNK, skipped=_SYSTEM)
            again = replace(chunk, start=chunk.end, length=_CHUNK - 7, skipped=_SYSTEM + 7)
            turned = (replace(system, delta=3), chunk, replace(again, delta=_CHUNK + 11))
            roundings = ROUNDED_ONCE_MORE if self._is_coarse else 1
            for length in (_QUESTION, PREFILL_TOKENS):
                prompt = [*context, *context[_SYSTEM + 7 :], *(self._random_token() for _ in range(length))]
                for name, loads, times in (
                    (f"attention of {length} tokens", (system, chunk, again), 1),
                    (f"turned attention of {length} tokens", turned, roundings),
                ):
                    copied, attended = (self._span(again.end, length) for _ in range(2))
                    await self._request(prompt, f"{name}-copied", TransferPlan(loads, (copied,)))
                    await self._request(prompt, name, TransferPlan(loads, (attended,), attends=True))
                    await self._compare(name, copied, attended, one_token=False, times=times)

    async def _behind_shared(self, name: str, prompt: Sequence[int], expected: Span) -> None:
        """Compares ``prompt``'s second half, behind a shared first half, with ``expected``.

        The first half is loaded once, and once found in the engine's prefix cache: were it not, its load would be
        refused.
        """
        size = len(prompt) // 2
        first = self._span(0, size)
        await self._request(prompt[:size], name, TransferPlan(saves=(first,)))
        nowhere = replace(first, tag=first.tag - 1)
        for how, load, salt in (
            ("loaded", first, self._salt(f"{name}-not-found")),
            ("found", nowhere, self._salt(name)),
        ):
            second = self._span(size, size)
            plan = TransferPlan((load,), (second,), Composition((size,), salt))
            await self._request(prompt, f"{name}-{how}", plan)
            await self._compare(f"{name}-{how}", expected, second, one_token=False)

    async def _check_reuse(self) -> None:
        prompt = [self._random_token() for _ in range(self._length(1))]
        computed, loaded = await self._computed_and_loaded("reuse", prompt, repeat_chunk=False)
        try:
            await self._compare("reuse", computed, loaded, one_token=False)
        except SelfCheckError:
            if not self._is_coarse:
                raise
            # Behind the very blocks of the fill, which vLLM's prefix cache has, the engine computes as many tokens at
            # once as behind loaded ones.
            same_sizes = self._compared(prompt)
            plan = TransferPlan(saves=(same_sizes,))
            await run_prefill(self._llm, prompt, plan, "self-check-reuse-cached", self._salt("reuse-fill"))
            await self._compare("reuse", same_sizes, loaded, one_token=False)

    async def _check_rotation(self) -> None:
        for left in reversed(range(_MOST_TOKENS if self._is_coarse else 1)):
            prompt = [self._random_token()] * self._length(2)
            computed, loaded = await self._computed_and_loaded("rotation", prompt, repeat_chunk=True)
            try:
                await self._compare("rotation", computed, loaded, one_token=True)
                break
            except SelfCheckError:
                if not left:
                    raise

    async def _computed_and_loaded(self, name: str, prompt: list[int], *, repeat_chunk: bool) -> tuple[Span, Span]:
        """KV of ``prompt`` as the engine computes it, and behind a context that is loaded."""
        context = self._span(0, _SYSTEM + _CHUNK)
        await self._request(prompt[: context.end], f"{name}-fill", TransferPlan(saves=(context,)))
        loads = [context]
        if repeat_chunk:
            loads.append(self._repeat(context))
        computed, loaded = self._compared(prompt), self._compared(prompt)
        await self._request(prompt, f"{name}-computed", TransferPlan(saves=(computed,)))
        await self._request(prompt, f"{name}-loaded", TransferPlan(tuple(loads), (loaded,)))
        return computed, loaded

    def _compared(self, prompt: Sequence[int]) -> Span:
        """The tokens of ``prompt`` to save: all, or the last, which have blocks whatever the window."""
        start = _SYSTEM + _CHUNK if self._window and self._window < len(prompt) else 0
        return self._span(start, len(prompt) - start)

    @property
    def _is_coarse(self) -> bool:
        """Whether KV has at most 16 bits."""
        return is_quantized(self._llm.vllm_config) or bool(self._llm.model_config.dtype.itemsize == 2)

    async def _request(self, prompt: Sequence[int], name: str, plan: TransferPlan) -> None:
        try:
            output = await run_prefill(self._llm, list(prompt), plan, f"self-check-{name}", self._salt(name))
        except NotSavedError as error:
            raise SelfCheckError(f"{name}: {error}") from error
        if (output.num_cached_tokens or 0) != plan.num_loaded_tokens:
            raise SelfCheckError(f"{name}: {output.num_cached_tokens} tokens reused, {plan.num_loaded_tokens} planned")

    async def _compare(self, name: str, computed: Span, loaded: Span, *, one_token: bool, times: int = 1) -> None:
        """Raises :class:`SelfCheckError` for a difference of more than ``times`` the dtype's tolerance."""
        arguments = (list(computed.pages), list(loaded.pages), computed.length, one_token)
        worst = max(await self._llm.collective_rpc("chunk_cache_compare", args=arguments))
        dtype = self._llm.model_config.dtype
        tolerance = times * (QUANTIZED_TOLERANCE if is_quantized(self._llm.vllm_config) else TOLERANCE[dtype])
        if not worst <= tolerance:
            raise SelfCheckError(
                f"{name}: loaded KV differs from computed KV by {worst:.1e} of a dimension's largest value "
                f"(tolerance {tolerance:.0e})"
            )

    @contextmanager
    def _borrowing(self) -> Iterator[None]:
        """Returns the pages that spans take within the block; raises :class:`SelfCheckError` if there are too few."""
        try:
            yield
        except MemoryError as error:
            raise SelfCheckError(f"the chunk pool is too small for the self-check: {error}") from error
        finally:
            self._pool.free(self._borrowed)
            self._borrowed = []

    def _span(self, start: int, length: int) -> Span:
        pages = self._pool.allocate(self._config.pages_for(length))
        self._borrowed += pages
        self._tag += 1
        return Span(start, length, 0, self._tag, tuple(pages))

    def _repeat(self, context: Span) -> Span:
        """The same pages again, directly behind themselves."""
        return Span(context.end, context.length, context.length, context.tag, context.pages)

    def _length(self, repeats: int) -> int:
        return repeats * (_SYSTEM + _CHUNK) + _QUESTION

    def _random_token(self) -> int:
        return self._random.randrange(self._llm.model_config.get_vocab_size())

    def _salt(self, name: str) -> str:
        """A salt of this start alone: other connectors may have earlier blocks."""
        return f"tessera-self-check-{name}-{self._nonce}"
