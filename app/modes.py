# SPDX-License-Identifier: Apache-2.0
"""Names of the ways to answer over chunks: full, shared, offset, parallel, link-16."""

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from cache.positions.layout import PositionStrategy
from engine_ext.wire.request import MAX_LINK_TOKENS

MODES: Final = ("full", *(strategy.value for strategy in PositionStrategy))
CALIBRATED: Final = (*MODES, "link-8", "link-16", "link-32")
_LINK: Final = re.compile(r"link-([1-9]\d{0,3})")


def is_mode(name: str) -> bool:
    """Whether a mode exists; ``link-N`` is ``offset`` with N link tokens."""
    return name in MODES or 0 < link_tokens(name) <= MAX_LINK_TOKENS


def link_tokens(mode: str) -> int:
    """Number of link tokens of a mode."""
    match = _LINK.fullmatch(mode)
    return int(match[1]) if match else 0


def strategy_of(mode: str) -> PositionStrategy:
    """The position strategy of a mode that reuses chunks."""
    return PositionStrategy.OFFSET if link_tokens(mode) else PositionStrategy(mode)


def cache_field(mode: str) -> dict[str, Any]:
    """The ``cache`` field of a request in the mode."""
    if mode == "full":
        return {"mode": "full"}
    return {"position_strategy": strategy_of(mode).value, "link_tokens": link_tokens(mode)}


def mode_of(report: Mapping[str, Any]) -> str:
    """The mode of an answer with this cache report."""
    if report["mode"] == "full":
        return "full"
    if links := report.get("links"):
        return f"link-{links['tokens']}"
    return str(report["position_strategy"])


def in_order(modes: Iterable[str]) -> list[str]:
    """Distinct modes; full attention first, then by cost."""
    return sorted(set(modes), key=lambda mode: (link_tokens(mode), MODES.index(mode) if mode in MODES else 0))
