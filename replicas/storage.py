# SPDX-License-Identifier: Apache-2.0
"""Ids of storage that may be shared: replicas with the same id find the same chunks there."""

import hashlib
import os
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from cache.segments.holdings import HOST
from cache.tiers.locked_file import locked_file

_ID_BYTES: Final = 2
"""Short, since each stored document has one in the registry; a wrong match costs time only."""
_MARK: Final = "storage"


def storage_ids(urls: Iterable[str], fingerprint: str) -> tuple[str, ...]:
    """Ids, in hexadecimal, of tiers that outlive a server, in their order; of engines with this fingerprint.

    A directory is known by a random mark in it, since paths say nothing about machines; any other storage by its URL.
    Raises ``OSError`` if a directory can't be marked.
    """
    names = [_name(url) for url in urls if urlsplit(url).scheme != HOST]
    return tuple(hashlib.sha256(f"{name}\0{fingerprint}".encode()).digest()[:_ID_BYTES].hex() for name in names)


def _name(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme == "file":
        return _mark(Path(unquote(parts.path)))
    options = sorted(each for each in parts.query.split("&") if each.startswith("endpoint="))
    return parts._replace(query="&".join(options)).geturl()


def _mark(folder: Path) -> str:
    """The directory's mark, made by the first server."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with locked_file(folder / _MARK) as mark:
        if not (found := os.pread(mark, 64, 0).decode(errors="replace")):
            found = secrets.token_hex(16)
            os.pwrite(mark, found.encode(), 0)
        return found
