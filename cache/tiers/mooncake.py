# SPDX-License-Identifier: Apache-2.0
"""Mooncake Store: memory of many machines, through the package ``mooncake-transfer-engine``."""

import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final
from urllib.parse import SplitResult

from cache.tiers.tier import TIMEOUT_S, Address, Buffer, Stored, TierConfigError, TierError

_LOCAL_BUFFER_BYTES: Final = 256 << 20
"""Bytes of the transfer buffer; the largest file must fit."""
_OPTIONS: Final = {"metadata": "P2PHANDSHAKE", "protocol": "tcp", "devices": "", "host": "127.0.0.1"}


class MooncakeTier:
    """A :class:`cache.tiers.tier.StorageTier` at ``mooncake://MASTER:PORT?size=…``.

    ``max_bytes`` of this machine's memory are given to the store; Mooncake decides about all machines' memory and
    about eviction. It can't list its objects: :meth:`list` has only the files that this process put there.
    ``options``: ``metadata`` (its metadata server), ``protocol`` (tcp or rdma), ``devices``, ``host`` (this machine's).
    """

    name = "mooncake"
    timeout_s = TIMEOUT_S

    def __init__(self, url: SplitResult, max_bytes: int, options: Mapping[str, str], store: Any = None) -> None:
        """Raises :class:`TierConfigError`. ``store`` stands for a ``MooncakeDistributedStore`` in tests."""
        if unknown := sorted(options.keys() - _OPTIONS.keys()):
            raise TierConfigError(f"{unknown[0]} is no option; there are {', '.join(_OPTIONS)}")
        if not url.netloc:
            raise TierConfigError("mooncake:// takes the master's address, as in mooncake://host:50051")
        given = {**_OPTIONS, **options}
        self.max_bytes = max_bytes
        self._put: OrderedDict[Address, Stored] = OrderedDict()
        self._store = store if store is not None else _new_store()
        status = self._store.setup(
            given["host"],
            given["metadata"],
            max_bytes,
            _LOCAL_BUFFER_BYTES,
            given["protocol"],
            given["devices"],
            url.netloc,
        )
        if status:
            raise TierConfigError(f"Mooncake's master at {url.netloc} can't be reached (error {status})")

    @property
    def num_bytes(self) -> int:
        """Bytes that this process put there."""
        return sum(each.num_bytes for each in self._put.values())

    def put(self, address: Address, file: Buffer) -> None:
        if len(file) > self.max_bytes:
            raise TierError(f"{len(file)} bytes exceed the limit of {self.max_bytes}")
        if self._exists(address):
            return
        # This process's files stay within its own share; the store could use other machines' memory for more.
        while self._put and self.num_bytes + len(file) > self.max_bytes:
            self.delete([next(iter(self._put))])
        if status := self._store.put(_name(address), bytes(file)):
            raise TierError(f"Mooncake did not take a file (error {status})")
        self._put[address] = Stored(address, len(file), time.time())

    def get(self, address: Address, max_bytes: int) -> Buffer | None:
        data = self._store.get(_name(address))  # its objects fit into the local buffer
        if not data:
            self._put.pop(address, None)
            return None
        with suppress(KeyError):  # it is another machine's, or is being dropped
            self._put.move_to_end(address)
        return bytearray(data[:max_bytes])

    def stat(self, address: Address) -> Stored | None:
        if not self._exists(address):
            return None
        return self._put.get(address) or Stored(address, self._store.get_size(_name(address)), 0.0)

    def delete(self, addresses: Sequence[Address]) -> None:
        for address in addresses:
            self._put.pop(address, None)
            if self._exists(address):
                # Objects being read have leases, and are removed when these end.
                self._store.remove(_name(address), True)

    def quarantine(self, address: Address) -> None:
        self.delete([address])

    def list(self) -> Iterator[Stored]:
        return iter([stored for stored in self._put.values() if self._exists(stored.address)])

    def close(self) -> None:
        self._store.close()

    def _exists(self, address: Address) -> bool:
        found: int = self._store.is_exist(_name(address))
        if found < 0:
            raise TierError(f"Mooncake does not answer (error {found})")
        return found == 1


def _new_store() -> Any:
    try:
        from mooncake.store import MooncakeDistributedStore
    except ImportError as error:
        raise TierConfigError(f"pip install mooncake-transfer-engine: {error}") from error
    return MooncakeDistributedStore()


def _name(address: Address) -> str:
    return f"tessera/{address.name}"
