# SPDX-License-Identifier: Apache-2.0
"""Rate limits of a tenant on one server."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from app.access.tenants import Tenant
from engine_ext.client.request import LimitsError, Spending

LIMITS: "ContextVar[TenantLimits | None]" = ContextVar("limits", default=None)
"""Of the request's tenant; ``None`` if the server requires no keys."""


class LimitExceededError(LimitsError):
    """The tenant has reached a limit. ``retry_after_s``: seconds until the next request may pass."""

    def __init__(self, message: str, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


_TOKENS_AT_ONCE_S = 10
"""Seconds of a tenant's tokens that it may use at once: a whole minute's would keep an engine busy, and the others
waiting, for long."""


class Allowance:
    """Token bucket, per minute, of which ``at_once_s`` seconds' worth may be used at once; may go negative.

    The cost of a request is known when it has ended. So a request starts while anything is left, and later requests
    wait until the debt is paid.
    """

    def __init__(self, per_minute: int, at_once_s: float = 60, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_s = per_minute / 60
        self._most = self._left = max(1.0, self._per_s * at_once_s)
        self._clock = clock
        self._since = clock()

    def wait_s(self, needed: float) -> float:
        """Seconds until at least ``needed`` are left; 0 if they already are."""
        now = self._clock()
        self._left = min(self._most, self._left + (now - self._since) * self._per_s)
        self._since = now
        return max(0.0, (needed - self._left) / self._per_s)

    def take(self, amount: int) -> None:
        """Withdraws ``amount``."""
        self._left -= amount


class TenantLimits:
    """The limits of one tenant on this server, and their use."""

    def __init__(self, tenant: Tenant, clock: Callable[[], float] = time.monotonic) -> None:
        requests, tokens = tenant.requests_per_minute, tenant.tokens_per_minute
        self._requests = Allowance(requests, clock=clock) if requests else None
        self._tokens = Allowance(tokens, _TOKENS_AT_ONCE_S, clock) if tokens else None
        self._most_at_once = tenant.concurrent_requests
        self.collections_size = None if tenant.collections_size is None else int(tenant.collections_size)
        self._running = 0

    @contextmanager
    def request(self) -> Iterator[Spending]:
        """Count one request as running, and yield what it spends.

        Raises :class:`LimitExceededError` if it must not start.
        """
        self.take_places(1)
        running = _Running(self)
        try:
            self.refuse_without_tokens()
            _refuse_without("requests", self._requests)
            self.count_requests(1)
            yield running
        finally:
            running.close()

    def take_places(self, number: int) -> None:
        """Count more as running; raises :class:`LimitExceededError`."""
        if self._most_at_once is not None and self._running + number > self._most_at_once:
            at_once = f"{self._running + number} requests or answers of this tenant would run at once"
            raise LimitExceededError(f"{at_once}; its limit is {self._most_at_once}")
        self._running += number

    def leave_places(self, number: int) -> None:
        """Count these as running no longer."""
        self._running -= number

    def count_requests(self, number: int) -> None:
        """Counts requests of this minute."""
        if self._requests is not None:
            self._requests.take(number)

    def refuse_without_tokens(self) -> None:
        """Raises :class:`LimitExceededError` if no tokens are left."""
        _refuse_without("tokens", self._tokens)

    def wait_s(self) -> float:
        """Seconds until tokens are left for more work of a running request."""
        return self._tokens.wait_s(1) if self._tokens is not None else 0.0

    def charge(self, tokens: int) -> None:
        """Counts tokens of a prompt or an answer."""
        if self._tokens is not None:
            self._tokens.take(tokens)


class _Running(Spending):
    """A running request: one place among those that run at once, and one for each answer beyond the first.

    It counts as many requests as the most places that it has had: the engine answers each prompt of a list, and a beam
    takes its place anew for each token.

    Many requests start beside one another while tokens are left. So the first charge looks again: else each of them
    would run at the others' expense.
    """

    def __init__(self, limits: TenantLimits) -> None:
        self._limits = limits
        self._has_begun = False
        self._num_answers = 0
        self._most_places = 1

    @property
    def num_places(self) -> int:
        return max(1, self._num_answers)

    def begin(self, num_tokens: int, num_answers: int) -> None:
        if not self._has_begun:
            self._limits.refuse_without_tokens()
        self._limits.take_places(max(1, self._num_answers + num_answers) - self.num_places)
        self._has_begun = True
        self._num_answers += num_answers
        self._limits.count_requests(max(0, self.num_places - self._most_places))
        self._most_places = max(self._most_places, self.num_places)
        self.charge(num_tokens)

    def charge(self, num_tokens: int) -> None:
        self._limits.charge(num_tokens)

    def end(self, num_answers: int) -> None:
        before = self.num_places
        self._num_answers -= num_answers
        self._limits.leave_places(before - self.num_places)

    def close(self) -> None:
        """Leave all places. An answer may still end later, when its stream is collected: its place is left already."""
        self._limits.leave_places(self.num_places)
        self._num_answers = 0


def _refuse_without(unit: str, allowance: Allowance | None) -> None:
    if allowance is not None and (wait := allowance.wait_s(1)) > 0:
        raise LimitExceededError(f"this tenant's {unit} per minute are used up", math.ceil(wait))
