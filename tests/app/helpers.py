# SPDX-License-Identifier: Apache-2.0
"""Byte-level tokenizers, reports and errors."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from app.documents.document import BadRequestError
from app.models.random_tokenizer import SPECIAL_TOKENS
from cache.manager import ChunkCacheManager
from cache.positions.layout import PositionStrategy
from cache.report import Report
from engine_ext.chunks.tier_writer import TierWriter

WHITESPACE = "        "
ADDED = (*SPECIAL_TOKENS, "<think>", "[INST]", WHITESPACE)
CONTROL = ADDED[:-1]


def cache_with(manager: ChunkCacheManager, *, running: int = 0, queued: int = 0) -> SimpleNamespace:
    """The parts of a chunk cache that the app reads, without an engine."""
    checks: list[int] = []
    cache = SimpleNamespace(
        reason=None,
        manager=manager,
        config=manager.config,
        metrics=manager.metrics,
        placement="copy",
        no_attention=None,
        fills=SimpleNamespace(num_running=running, num_queued=queued),
        tier_writer=TierWriter(None, manager, manager.release, {}, lambda: None),
        num_waiting=0,
        checks=checks,
        check_integrity=lambda: checks.append(1),
    )
    cache.usable = lambda: cache
    return cache


def make_tokenizer(
    added: Iterable[str] = ADDED, *, spelled: Iterable[str] = (), ignore_merges: bool = False
) -> PreTrainedTokenizerFast:
    """One token per byte, then ``added`` tokens; vocabulary merges yield the tokens of ``spelled``."""
    vocab = {token: i for i, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = []
    for text in spelled:
        for end in range(2, len(text) + 1):
            if text[:end] not in vocab:
                vocab[text[:end]] = len(vocab)
                merges.append((text[: end - 1], text[end - 1]))
    model = models.BPE(vocab=vocab, merges=[] if ignore_merges else merges, ignore_merges=ignore_merges)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    for token in added:
        is_special = token in SPECIAL_TOKENS
        (tokenizer.add_special_tokens if is_special else tokenizer.add_tokens)(
            [AddedToken(token, special=is_special, normalized=False)]
        )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)


def make_report() -> Report:
    return Report.begun(PositionStrategy.SHARED, "system", 3)


@contextmanager
def refused(parameter: str, message: str | None = None) -> Iterator[None]:
    """Expects a :class:`BadRequestError` of ``parameter`` whose text contains ``message``."""
    with pytest.raises(BadRequestError, match=message) as raised:
        yield
    assert raised.value.parameter == parameter
