# SPDX-License-Identifier: Apache-2.0
"""Tiers from their URLs: ``host://?size=4GiB``, ``file:///var/cache/tessera?size=200GiB``, ``s3://bucket/prefix?size=1TiB``.

A tier is called by its scheme, or by the option ``name``, so that there may be several of a kind. ``timeout`` is the
time in seconds that a load may take before its chunk is computed instead (default: 1).
"""

import importlib.metadata
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from pydantic import ByteSize, TypeAdapter, ValidationError

from cache.tiers.directory import DirectoryTier
from cache.tiers.memory import MemoryTier
from cache.tiers.signed import SignedTier, TierKey
from cache.tiers.tier import TIMEOUT_S, StorageTier, TierConfigError

_NAME: Final = re.compile(r"[a-z][a-z0-9-]{0,31}")
_SECONDS: Final = re.compile(r"\d{1,9}(\.\d{1,9})?", re.ASCII)
MAX_TIMEOUT_S: Final = 60
ENTRY_POINTS: Final = "tessera.tiers"
"""Entry points of other packages: a URL's scheme, and a :data:`MakeTier`."""

Allocate = Callable[[int], memoryview]
MakeTier = Callable[[SplitResult, int, Mapping[str, str], Allocate | None], StorageTier]
"""Makes a tier from a URL, its size in bytes, other options, and an allocator of host memory (``None``: any).

The allocator is slow, and best called for powers of two, while the tier is made: see :mod:`cache.tiers.slabs`.
"""


def _host(url: SplitResult, max_bytes: int, options: Mapping[str, str], allocate: Allocate | None) -> StorageTier:
    if url.netloc or url.path.strip("/") or options:
        raise TierConfigError("host:// takes nothing but a size and a timeout")
    return MemoryTier(max_bytes, allocate)


def _directory(url: SplitResult, max_bytes: int, options: Mapping[str, str], allocate: Allocate | None) -> StorageTier:
    if url.netloc or not url.path.startswith("/") or options:
        raise TierConfigError("file:// takes an absolute path (file:///var/cache/tessera), a size and a timeout")
    return DirectoryTier(Path(unquote(url.path)), max_bytes, allocate)


def _objects(url: SplitResult, max_bytes: int, options: Mapping[str, str], _: Allocate | None) -> StorageTier:
    from cache.tiers.objects import ObjectTier

    return ObjectTier(url, max_bytes, options)


def _mooncake(url: SplitResult, max_bytes: int, options: Mapping[str, str], _: Allocate | None) -> StorageTier:
    from cache.tiers.mooncake import MooncakeTier

    return MooncakeTier(url, max_bytes, options)


_MAKERS: dict[str, MakeTier] = {
    "host": _host,
    "file": _directory,
    "s3": _objects,
    "gs": _objects,
    "az": _objects,
    "mooncake": _mooncake,
}


def parse_tiers(text: str) -> list[str]:
    """Splits a comma-separated list of URLs and checks each; raises :class:`TierConfigError`."""
    urls = [url.strip() for url in text.split(",") if url.strip()]
    names = [_parse(url).name for url in urls]
    if twice := next((name for name in names if names.count(name) > 1), None):
        hint = "there is one host memory" if twice == MemoryTier.name else "name one of them, as in &name=shared"
        raise TierConfigError(f"two tiers are called {twice}: {hint}")
    return urls


def size_of(url: str) -> tuple[str, int]:
    """Name and bytes of a tier; raises :class:`TierConfigError`."""
    parsed = _parse(url)
    return parsed.name, parsed.max_bytes


def make_tier(url: str, allocate: Allocate | None = None, key: TierKey | None = None) -> StorageTier:
    """The tier of a URL, signed with ``key`` unless it is this process's memory; raises :class:`TierConfigError`."""
    parsed = _parse(url)
    try:
        tier = parsed.make(parsed.url, parsed.max_bytes, parsed.options, allocate)
    except TierConfigError as error:
        raise TierConfigError(f"tier {url}: {error}") from error
    tier.name, tier.timeout_s = parsed.name, parsed.timeout_s
    return tier if key is None or isinstance(tier, MemoryTier) else SignedTier(tier, key)


class _Parsed(NamedTuple):
    url: SplitResult
    name: str
    max_bytes: int
    timeout_s: float
    options: dict[str, str]
    make: MakeTier


def _parse(url: str) -> _Parsed:
    parts = urlsplit(url)
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    if (make := _maker(parts.scheme)) is None:
        raise TierConfigError(f"tier {url}: no tier is called {parts.scheme!r}; there are {', '.join(_schemes())}")
    if (size := options.pop("size", None)) is None:
        raise TierConfigError(f"tier {url}: it needs a size, as in ?size=100GiB")
    if size.isdigit():
        raise TierConfigError(f"tier {url}: size={size} has no unit, as in 100GiB")
    try:
        max_bytes = int(TypeAdapter(ByteSize).validate_python(size))
    except ValidationError as error:
        raise TierConfigError(f"tier {url}: size={size} is no size, as in 100GiB") from error
    if max_bytes < 1:
        raise TierConfigError(f"tier {url}: size={size} holds nothing")
    name = options.pop("name", parts.scheme)
    if not _NAME.fullmatch(name) or (name == MemoryTier.name) != (parts.scheme == MemoryTier.name):
        raise TierConfigError(f"tier {url}: name={name} is no name, as in name=shared")
    timeout = options.pop("timeout", f"{TIMEOUT_S:g}")
    if not _SECONDS.fullmatch(timeout) or not 0 < float(timeout) <= MAX_TIMEOUT_S:
        raise TierConfigError(f"tier {url}: timeout={timeout} is not a number of seconds up to {MAX_TIMEOUT_S}")
    return _Parsed(parts, name, max_bytes, float(timeout), options, make)


def _maker(scheme: str) -> MakeTier | None:
    if scheme in _MAKERS:
        return _MAKERS[scheme]
    for point in importlib.metadata.entry_points(group=ENTRY_POINTS, name=scheme):
        found: Any = point.load()
        return found  # type: ignore[no-any-return]
    return None


def _schemes() -> list[str]:
    others = (point.name for point in importlib.metadata.entry_points(group=ENTRY_POINTS))
    return sorted({*_MAKERS, *others})
