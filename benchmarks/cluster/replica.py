# SPDX-License-Identifier: Apache-2.0
"""One replica: a chunk pool with the real eviction policy, and an engine of which only the time is simulated.

The engine takes requests in their order, at most ``max_num_seqs`` at once; it computes one prompt at a time, and the
answers of all others beside it, each at a steady pace. Documents are looked up when a prompt's turn comes, so what an
earlier one computed is there.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.cluster.clock import Clock
from benchmarks.cluster.registry import BEAT_S, FLUSH_S, SimulatedRegistry
from benchmarks.cluster.workload import QUESTION_TOKENS, key_of
from benchmarks.eviction import PAGE_TOKENS, Chunk, Pool
from cache.eviction import EvictionPolicy, make_policy
from replicas.registry import DocumentKey, Holding, Replica, Tier

TOKEN_BYTES = 131_072
"""KV of one token of a model with 32 layers and 8 KV heads of 128, 16 bits a number."""


@dataclass(frozen=True, slots=True)
class EngineModel:
    """How fast a replica is, and the size of its chunk pool."""

    prefill_tokens_per_s: float = 10_000
    request_s: float = 0.01
    """What a prompt takes beside its tokens."""
    token_s: float = 0.02
    """For one token of an answer."""
    max_num_seqs: int = 64
    pool_tokens: int = 262_144

    def prefill_s(self, tokens: float) -> float:
        """For a prompt of which so many tokens of documents are missing."""
        return self.request_s + (QUESTION_TOKENS + tokens) / self.prefill_tokens_per_s

    def requests_per_s(self, missing_tokens: float, output_tokens: float) -> float:
        """What the engine can do at most, given means of its requests."""
        return 1 / max(self.prefill_s(missing_tokens), output_tokens * self.token_s / self.max_num_seqs)


@dataclass(slots=True, eq=False)
class Request:
    """One request on its way. Times are seconds of the clock."""

    at: float
    chunks: list[Chunk]
    output_tokens: int
    first_token_at: float = -1.0
    finished_at: float = -1.0
    missing_tokens: int = 0
    sendings: int = 0

    @property
    def tokens(self) -> int:
        """Of its documents."""
        return sum(chunk.tokens for chunk in self.chunks)


class _Watched:
    """A policy, with a note of what it gave up."""

    def __init__(self, policy: EvictionPolicy[Chunk]) -> None:
        self.given_up: list[Chunk] = []
        self._policy = policy

    def added(self, entry: Chunk) -> None:
        self._policy.added(entry)

    def used(self, entry: Chunk) -> None:
        self._policy.used(entry)

    def evicted(self, entry: Chunk) -> None:
        self.given_up.append(entry)
        self._policy.evicted(entry)

    def removed(self, entry: Chunk) -> None:
        self._policy.removed(entry)

    def victims(self) -> Iterator[Chunk]:
        return self._policy.victims()


class SimulatedReplica:
    """Serves from :meth:`start` to :meth:`fail`; ``busy_s`` is the time that prompts took so far."""

    def __init__(
        self,
        id: str,
        name: str,
        model: EngineModel,
        clock: Clock,
        registry: SimulatedRegistry,
        on_finished: Callable[[Request], None],
    ) -> None:
        self.id, self.name = id, name
        self.is_alive = True
        self.busy_s = 0.0
        self._model, self._clock, self._registry = model, clock, registry
        self._on_finished = on_finished
        self._policy = _Watched(make_policy("s3fifo"))
        self._pool = Pool(model.pool_tokens // PAGE_TOKENS, self._policy)
        self._unfinished: dict[Request, None] = {}
        self._waiting: deque[Request] = deque()
        self._running = 0
        self._is_prefilling = False
        self._changes: dict[DocumentKey, Holding | None] = {}
        # Replicas start at different moments, so they don't speak all at once.
        self._phase = (int(id, 16) * 0.618034) % 1

    @property
    def load(self) -> int:
        """Unfinished requests."""
        return len(self._unfinished)

    def start(self, goes_on: Callable[[], bool]) -> None:
        """Says that it is there, and again at each heartbeat while ``goes_on``."""
        self._beat()
        self._clock.at(self._clock.now + self._phase * BEAT_S, self._keep_beating, goes_on)

    def submit(self, request: Request) -> None:
        self._unfinished[request] = None
        self._waiting.append(request)
        self._start_next()

    def fail(self) -> list[Request]:
        """Ends without a word; returns the requests that it leaves unfinished."""
        self.is_alive = False
        return list(self._unfinished)

    def _keep_beating(self, goes_on: Callable[[], bool]) -> None:
        if self.is_alive and goes_on():
            self._beat()
            self._clock.at(self._clock.now + BEAT_S, self._keep_beating, goes_on)

    def _beat(self) -> None:
        self._registry.beat(Replica(self.id, self.name, "http://replica", (), "", self.load))

    def _start_next(self) -> None:
        if not self._waiting or self._is_prefilling or self._running >= self._model.max_num_seqs:
            return
        request = self._waiting.popleft()
        self._running += 1
        self._is_prefilling = True
        missing = self._pool.request(request.chunks)
        self._gave_up()
        request.missing_tokens = sum(chunk.tokens for chunk in missing)
        takes = self._model.prefill_s(request.missing_tokens)
        self.busy_s += takes
        self._plan(takes, self._prefilled, request, missing)

    def _prefilled(self, request: Request, computed: list[Chunk]) -> None:
        for chunk in computed:
            self._change(chunk, Holding(Tier.DEVICE, chunk.tokens, chunk.num_pages * PAGE_TOKENS * TOKEN_BYTES))
        if request.first_token_at < 0:
            request.first_token_at = self._clock.now
        self._is_prefilling = False
        self._plan((request.output_tokens - 1) * self._model.token_s, self._finished, request)
        self._start_next()

    def _finished(self, request: Request) -> None:
        request.finished_at = self._clock.now
        del self._unfinished[request]
        self._running -= 1
        self._on_finished(request)
        self._start_next()

    def _gave_up(self) -> None:
        for chunk in self._policy.given_up:
            self._change(chunk, None)
        self._policy.given_up.clear()

    def _change(self, chunk: Chunk, holding: Holding | None) -> None:
        if not self._changes:
            flushes = int((self._clock.now - self._phase * FLUSH_S) / FLUSH_S) + 1
            self._plan((flushes + self._phase) * FLUSH_S - self._clock.now, self._flush)
        self._changes[key_of(chunk)] = holding

    def _flush(self) -> None:
        self._registry.publish(self.id, self._changes)
        self._changes = {}

    def _plan(self, after_s: float, action: Callable[..., None], *arguments: Any) -> None:
        """Plans what happens only if the replica is still there."""
        self._clock.at(self._clock.now + after_s, self._if_alive, action, *arguments)

    def _if_alive(self, action: Callable[..., None], *arguments: Any) -> None:
        if self.is_alive:
            action(*arguments)
