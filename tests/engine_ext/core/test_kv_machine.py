# SPDX-License-Identifier: Apache-2.0
"""Random histories of requests over chunks in vLLM's asynchronous scheduler, with labels for KV.

Pages with a tag must have that entry's KV, and every token that is delivered must be the model's over the request's own
context: while pages are taken away under leases, loads are refused, requests preempted and aborted, chunks imported and
evicted.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.core.block_pool import BlockPool

from cache.config import ChunkCacheConfig
from cache.errors import CapacityError
from cache.eviction.removal import Removal
from cache.lease import FillJob, Lease
from cache.manager import ChunkCacheManager
from cache.positions.layout import Chunk, ChunkedPrompt, PositionReindexer, PositionStrategy, pack
from cache.segments.hashing import CacheScope
from cache.segments.index import ChunkKVCache, EntryState
from engine_ext.core.connector import ChunkCacheConnector
from engine_ext.core.pages import PageTags
from engine_ext.core.scheduler import SchedulerHalf
from engine_ext.core.worker import WorkerHalf
from engine_ext.wire.plan import SAVED_KEY, Composition, Span, TransferPlan
from tests.support.symbolic import (
    BLOCK_TOKENS,
    NUM_PAGES,
    PAGE_TOKENS,
    Labels,
    SymbolicEngine,
    computed,
    continued,
    next_token,
    symbolic_copies,
)

STEPS = 80
SYSTEMS = [(), tuple(range(1, 5)), tuple(range(11, 20))]
CHUNKS = [tuple(range(100 * i, 100 * i + length)) for i, length in enumerate((3, 4, 8, 9, 12), 1)]
QUESTIONS = [(71,), (81, 82, 83)]
WRONG_PAGES, WRONG_ANSWER, UNENDED = "pages have another KV than their tag's", "a wrong answer", "a request never ends"


@dataclass(eq=False)
class Ask:
    """A client's request: over chunks while it has a lease, otherwise in full attention."""

    prompt: ChunkedPrompt
    lease: Lease | None
    plan: TransferPlan | None
    salt: str | None
    context: Labels
    """Labels of the tokens before the question."""
    is_running: bool = False
    delivered: list[int] = field(default_factory=list)

    @property
    def token_ids(self) -> list[int]:
        chunks = (token for chunk in self.prompt.chunks for token in chunk.token_ids)
        return [*self.prompt.system, *chunks, *self.prompt.question]


class History:
    """Random calls of an app, its engine, and whoever takes its pages."""

    def __init__(self, source: random.Random) -> None:
        self._source = source
        self._engine = SymbolicEngine(preempts_in_flight=source.random() < 0.5)
        self._manager = ChunkCacheManager(ChunkCacheConfig(NUM_PAGES, PAGE_TOKENS, "engine"))
        self._entries: dict[int, ChunkKVCache] = {}
        """Every entry that there ever was, by tag."""
        self._asks: dict[str, Ask] = {}
        self._jobs: dict[str, FillJob] = {}
        self._num_names = 0
        self._problems: set[str] = set()
        self.num_refused = 0

    def problems(self) -> set[str]:
        """Run the calls and what they have begun; return the kinds of fault that were seen."""
        calls = (self._ask, self._abort, self._steal, self._schedule, self._receive)
        for call in self._source.choices(calls, (6, 1, 3, 10, 10), k=STEPS):
            call()
            self._check_pages()
        for _ in range(500):
            if not self._asks and not self._jobs:
                break
            self._schedule()
            self._receive()
            self._check_pages()
        else:
            self._problems.add(UNENDED)
        self._manager.check_integrity()
        return self._problems

    def _ask(self) -> None:
        chunks = self._source.choices(CHUNKS, k=self._source.randint(1, 3))
        system, question = self._source.choice(SYSTEMS), self._source.choice(QUESTIONS)
        prompt = ChunkedPrompt(system, tuple(Chunk(pack(chunk)) for chunk in chunks), question)
        scope = CacheScope()
        found = self._manager.look_up(prompt, scope)
        try:
            fit = self._manager.fit(found, scope.owner)
        except CapacityError:
            self._add(self._in_full(prompt))
            return
        is_shared = self._source.random() < 0.5 and not any(len(part) % BLOCK_TOKENS for part in (system, *chunks))
        strategy = PositionStrategy.PARALLEL if is_shared else self._source.choice([*PositionStrategy])
        lease = self._manager.lease(fit, PositionReindexer().layout(prompt, strategy))
        lengths = (len(system), *map(len, chunks))
        parts = [self._kv_of(each.entry) + np.array([0, each.place.delta]) for each in lease.segments]
        self._entries.update({each.tag: each.entry for each in lease.segments})
        plan = TransferPlan.for_answer(lease, composition=Composition(lengths, None) if is_shared else None)
        salt = f"{strategy} {is_shared} {lengths} {chunks}"
        self._asks[self._name()] = Ask(prompt, lease, plan, salt, np.concatenate(parts))
        for job in lease.fills:
            self._fill(job)

    def _fill(self, job: FillJob) -> None:
        """Computes the job's entries, or imports them."""
        if self._source.random() < 0.2:
            for entry in job.entries:
                self._engine.worker.write(
                    entry.pages, entry.tag, entry.num_tokens, self._engine.tensors(self._kv_of(entry))
                )
            self._manager.fill_succeeded(job)
            return
        name, plan = self._name(), TransferPlan.for_fill(job, job.prefix if job.has_prefix else None)
        self._jobs[name] = job
        self._engine.add(name, job.prompt_ids, plan, None, max_tokens=1)

    def _abort(self) -> None:
        if not self._asks:
            return
        name = self._source.choice(sorted(self._asks))
        ask = self._asks.pop(name)
        if ask.is_running:
            self._engine.abort(name)
        self._release(ask)
        for fill, job in tuple(self._jobs.items()):
            if not job.is_wanted:
                self._engine.abort(fill)
                self._manager.fill_failed(self._jobs.pop(fill))

    def _steal(self) -> None:
        """Writes other KV to an entry's pages, whoever leases them."""
        if self._entries:
            entry = self._entries[self._source.choice(sorted(self._entries))]
            self._num_names += 1
            other = self._engine.tensors(np.full((entry.num_tokens, 2), -self._num_names))
            self._engine.worker.write(entry.pages, self._num_names, entry.num_tokens, other)

    def _schedule(self) -> None:
        for name, ask in tuple(self._asks.items()):
            if not ask.is_running:
                self._start_if_filled(name, ask)
        self._engine.schedule()

    def _receive(self) -> None:
        for name, token_ids, ended, told in self._engine.receive():
            if name in self._jobs:
                if ended:
                    is_saved = ended != "error" and told.get(SAVED_KEY, False)
                    job = self._jobs.pop(name)
                    (self._manager.fill_succeeded if is_saved else self._manager.fill_failed)(job)
            elif name in self._asks:
                self._deliver(name, token_ids, ended)
        self._detach_refused()

    def _deliver(self, name: str, token_ids: list[int], ended: str | None) -> None:
        ask = self._asks[name]
        for token in token_ids:
            before = [*ask.prompt.question, *ask.delivered]
            if token != next_token(continued(ask.context, before)):
                self._problems.add(WRONG_ANSWER)
            ask.delivered.append(token)
        if ended:
            del self._asks[name]
            self._release(ask)
        if ended == "error":
            self._add(self._in_full(ask.prompt))

    def _start_if_filled(self, name: str, ask: Ask) -> None:
        assert ask.lease is not None
        states = {each.entry.state for each in ask.lease.segments}
        if EntryState.FAILED in states:
            del self._asks[name]
            self._release(ask)
            self._add(self._in_full(ask.prompt))
        elif EntryState.FILLING not in states:
            self._start(name, ask)

    def _add(self, ask: Ask) -> None:
        name = self._name()
        self._asks[name] = ask
        self._start(name, ask)

    def _start(self, name: str, ask: Ask) -> None:
        ask.is_running = True
        self._engine.add(name, ask.token_ids, ask.plan, ask.salt, max_tokens=self._source.randint(1, 8))

    def _in_full(self, prompt: ChunkedPrompt) -> Ask:
        ask = Ask(prompt, None, None, None, computed(()))
        return replace(ask, context=computed(tuple(ask.token_ids[: -len(prompt.question)])))

    def _release(self, ask: Ask) -> None:
        if ask.lease is not None:
            self._manager.release(ask.lease)

    def _detach_refused(self) -> None:
        """As the app does when it reads which pages had another tag."""
        refused = self._engine.worker.refused_tags
        self.num_refused += len(refused)
        for tag in refused:
            if not self._entries[tag].detached:
                self._manager.detach(self._entries[tag], Removal.REFUSED)
        refused.clear()

    def _check_pages(self) -> None:
        for tag, entry in self._entries.items():
            pages = tuple(entry.pages)
            is_tagged = not self._engine.worker.tags.missing([Span(0, entry.num_tokens, 0, tag, pages)])
            is_loadable = is_tagged and entry.state is EntryState.READY
            if is_loadable and not np.array_equal(self._engine.pooled(pages, entry.num_tokens), self._kv_of(entry)):
                self._problems.add(WRONG_PAGES)

    def _kv_of(self, entry: ChunkKVCache) -> Labels:
        prefix = entry.identity.prefix_ids
        return computed((*prefix, *entry.identity.token_ids))[len(prefix) :]

    def _name(self) -> str:
        self._num_names += 1
        return f"r{self._num_names}"


@pytest.mark.parametrize("num_histories", [100, pytest.param(10_000, marks=pytest.mark.matrix)])
def test_delivered_tokens_and_tagged_pages_are_right(num_histories: int) -> None:
    @settings(max_examples=num_histories, deadline=None)
    @given(st.randoms(use_true_random=False))
    def run(source: random.Random) -> None:
        assert History(source).problems() == set()

    with symbolic_copies():
        run()


def _deliver_whatever_was_computed(patch: pytest.MonkeyPatch) -> None:
    """As before the mend of W1: nothing is known of what is computed behind a refused load."""
    patch.setattr(ChunkCacheConnector, "requires_kv_delivery", False)
    patch.setattr(SchedulerHalf, "loads_refused", lambda self: None)
    refuse = WorkerHalf._refuse

    def forgetful(self: WorkerHalf, *args: Any) -> None:
        refuse(self, *args)
        self._refused_requests.clear()

    patch.setattr(WorkerHalf, "_refuse", forgetful)


def _keep_the_prefix_cache(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockPool, "evict_blocks", lambda self, blocks: None)


def _load_whatever_is_there(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PageTags, "missing", lambda self, spans: set())


@pytest.mark.parametrize(
    "fault", [_deliver_whatever_was_computed, _keep_the_prefix_cache, _load_whatever_is_there], ids=lambda f: f.__name__
)
def test_a_fault_is_found(fault: Callable[[pytest.MonkeyPatch], None]) -> None:
    with symbolic_copies(), pytest.MonkeyPatch.context() as patch:
        fault(patch)
        assert any(WRONG_ANSWER in History(random.Random(seed)).problems() for seed in range(100))


SHARED, CHUNK, OTHER = (1, 2, 3, 4), (100, 101, 102, 103), (200, 201, 202, 203)


def test_nothing_is_saved_that_was_computed_behind_another_requests_refused_load() -> None:
    """Both are computed in the step in which the load is refused; the second is preempted before that is read."""
    with symbolic_copies():
        engine = SymbolicEngine(preempts_in_flight=True)
    engine.add("long", range(500, 543), None, None, max_tokens=8)
    told = dict[str, Any]()
    while len(told.get("long", ())) < 1:
        engine.schedule()
        told.update((name, token_ids) for name, token_ids, _, _ in engine.receive())
    refused = TransferPlan((Span(0, 4, 0, 6, (0,)),), (Span(4, 4, 0, 7, (1,)),))
    engine.add("refused", [*SHARED, *CHUNK], refused, None, max_tokens=1)
    engine.add("sharing", [*SHARED, *OTHER], TransferPlan((), (Span(4, 4, 0, 8, (2,)),)), None, max_tokens=1)
    engine.schedule()
    engine.schedule()
    assert engine.scheduler.requests["sharing"].num_preemptions == 1
    for _ in range(20):
        told.update((name, (ended, kv)) for name, _, ended, kv in engine.receive())
        engine.schedule()
    assert told["refused"][0] == "error"
    assert told["sharing"][1] == {SAVED_KEY: True}
    assert np.array_equal(engine.pooled([2], 4), computed((*SHARED, *OTHER))[4:])
