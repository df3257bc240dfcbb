# SPDX-License-Identifier: Apache-2.0
"""Several tiers, the fastest first, with time limits for each call."""

import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeVar

from cache.tiers.signed import UnsignedFileError
from cache.tiers.tier import Address, Buffer, StorageTier, TierError

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

SUSPENDED_S: Final = 10.0
"""Suspension of a tier that did not answer in time."""
STORE_TIMEOUT_S: Final = 60.0
READERS: Final = 16
"""Files that are read from one tier at once, at most."""


@dataclass(slots=True)
class Events:
    """Events to count, as pairs of a tier's name and a word."""

    happened: list[tuple[str, str]] = field(default_factory=list)

    def add(self, tier: str, word: str) -> None:
        """Adds an event."""
        self.happened.append((tier, word))


class TierChain:
    """Calls each tier in threads of its own, with a time limit: several read, one writes.

    A tier that does not answer in time is suspended; the thread ends when its call does.
    """

    def __init__(self, tiers: Sequence[StorageTier]) -> None:
        self.tiers = list(tiers)
        self._readers = {tier.name: _Caller(f"{tier.name}-read", READERS) for tier in tiers}
        self._writers = {tier.name: _Caller(f"{tier.name}-write", 1) for tier in tiers}
        self._told_unsigned: set[str] = set()
        self._last_deletion = object()

    @property
    def timeout_s(self) -> float:
        """Time that a load may take from the slowest tier."""
        return max((tier.timeout_s for tier in self.tiers), default=0.0)

    def get(
        self,
        address: Address,
        max_bytes: int,
        among: Collection[str],
        check: Callable[[Buffer], Result],
        events: Events,
        limit_s: float = math.inf,
    ) -> tuple[str, Result] | None:
        """The tier of the first file that passes ``check``, and the check's result.

        ``check`` raises ``ValueError`` for a bad file; no file has more than ``max_bytes``. A tier that takes longer
        than ``limit_s`` is passed over.
        """
        last_deletion = self._last_deletion
        for i, tier in enumerate(self.tiers):
            if tier.name not in among:
                continue
            read = partial(tier.get, address, max_bytes)
            try:
                file = self._call(self._readers[tier.name], tier, "load", read, events, limit_s)
            except UnsignedFileError as error:
                self._tell_unsigned(tier, address, error)
                events.add(tier.name, "unsigned")
                self._write(tier, partial(tier.quarantine, address), events)  # its place is free for a signed one
                continue
            if file is None:
                continue
            try:
                checked = check(file)
            except ValueError as error:
                logger.warning("%s: %s.%d: %s", tier.name, address.key, address.part, error)
                events.add(tier.name, "corrupt")
                self._write(tier, partial(tier.quarantine, address), events)
                continue
            events.add(tier.name, "loaded")
            for faster in self.tiers[:i]:
                self._write(faster, partial(self._promote, faster, address, file, last_deletion), events)
            return tier.name, checked
        return None

    def _promote(self, tier: StorageTier, address: Address, file: Buffer, last_deletion: object) -> None:
        """Stores what a slower tier had in the one thread that writes to this tier.

        Not if anything was deleted meanwhile: perhaps this file, which would be back.
        """
        if self._last_deletion is last_deletion:
            tier.put(address, file)

    def put(self, address: Address, file: Buffer, events: Events) -> None:
        """Stores a file in every tier that takes it."""
        for tier in self.tiers:
            before = len(events.happened)
            self._write(tier, partial(tier.put, address, file), events)
            if len(events.happened) == before:
                events.add(tier.name, "stored")

    def delete(self, addresses: Sequence[Address], events: Events) -> None:
        """Drops files from every tier that answers."""
        self._last_deletion = object()
        for tier in self.tiers:
            self._write(tier, partial(tier.delete, addresses), events)

    def delete_all(self, is_meant: Callable[[Address], bool], events: Events) -> None:
        """Drops all files of such addresses from every tier that answers."""
        self._last_deletion = object()
        for tier in self.tiers:
            self._write(tier, partial(_delete_all, tier, is_meant), events)

    def addresses(self, is_meant: Callable[[Address], bool], events: Events) -> set[Address]:
        """Such addresses of the files in every tier that answers."""
        found: set[Address] = set()
        for tier in self.tiers:
            listing = partial(_addresses, tier, is_meant)
            found.update(self._call(self._writers[tier.name], tier, "list", listing, events) or ())
        return found

    def close(self) -> None:
        """Closes the tiers, without waiting for one that hangs."""
        for tier in self.tiers:
            tier.close()

    def _tell_unsigned(self, tier: StorageTier, address: Address, error: UnsignedFileError) -> None:
        """Once: whoever writes such files could write any number of them."""
        if tier.name not in self._told_unsigned:
            self._told_unsigned.add(tier.name)
            logger.warning(
                "%s: %s.%d: %s; further ones are only counted, as unsigned", tier.name, address.key, address.part, error
            )

    def _write(self, tier: StorageTier, call: Callable[[], None], events: Events) -> None:
        self._call(self._writers[tier.name], tier, "store", call, events)

    def _call(
        self,
        caller: "_Caller",
        tier: StorageTier,
        verb: str,
        call: Callable[[], Result],
        events: Events,
        limit_s: float = math.inf,
    ) -> Result | None:
        timeout_s = tier.timeout_s if verb == "load" else STORE_TIMEOUT_S
        try:
            return caller.run(call, min(limit_s, timeout_s), SUSPENDED_S if timeout_s <= limit_s else 0.0)
        except _SuspendedError:
            events.add(tier.name, "suspended")
        except FutureTimeoutError:
            if limit_s < timeout_s:
                events.add(tier.name, "late")
            else:
                logger.warning("%s did not %s within %g s; it is suspended for a while", tier.name, verb, timeout_s)
                events.add(tier.name, "timeout")
        except UnsignedFileError:
            raise
        except (TierError, OSError) as error:
            logger.warning("%s could not %s: %s", tier.name, verb, error)
            events.add(tier.name, f"{verb}_failed")
        return None


def _addresses(tier: StorageTier, is_meant: Callable[[Address], bool]) -> list[Address]:
    return [stored.address for stored in tier.list() if is_meant(stored.address)]


def _delete_all(tier: StorageTier, is_meant: Callable[[Address], bool]) -> None:
    tier.delete(_addresses(tier, is_meant))


class _SuspendedError(Exception):
    pass


class _Caller:
    """Threads for calls that may hang."""

    def __init__(self, name: str, num_threads: int) -> None:
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        # A thread that a load starts would have its low priority: the tier would seem slow that waits for a core.
        all_run = threading.Barrier(num_threads)
        for _ in range(num_threads):
            self._executor.submit(all_run.wait)
        self._hanging: tuple[Future[Any], ...] = ()
        self._suspended_until = 0.0

    def run(self, call: Callable[[], Result], timeout_s: float, suspended_s: float) -> Result:
        """The call's result. If it takes too long, others are refused until it ends, and for ``suspended_s``."""
        if self._still_hanging() or time.monotonic() < self._suspended_until:
            raise _SuspendedError
        future = self._executor.submit(call)
        try:
            return future.result(timeout_s)
        except FutureTimeoutError:
            if future.done():  # the call itself raised it
                raise
            self._hanging, self._suspended_until = (*self._still_hanging(), future), time.monotonic() + suspended_s
            raise

    def _still_hanging(self) -> tuple[Future[Any], ...]:
        return tuple(each for each in self._hanging if not each.done())
