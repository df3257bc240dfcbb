# SPDX-License-Identifier: Apache-2.0
"""Names of the ways to answer over chunks: full, shared, offset, parallel, link-16, offset%25."""

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from cache.positions.layout import PositionStrategy
from engine_ext.client.request import MAX_LINK_TOKENS

MODES: Final = ("full", "shared", "parallel", "offset")
"""Modes of an evaluation by default."""
_WAYS: Final = ("full", *(strategy.value for strategy in PositionStrategy))
CALIBRATED: Final = (*MODES, "link-8", "link-16", "link-32")
SPARSE: Final = ("offset%25", "offset%50")
"""Calibrated as well where chunks can be left out."""
_LINK: Final = re.compile(r"link-([1-9]\d{0,3})")
_SHARE: Final = re.compile(r"[1-9]\d?")


def is_mode(name: str) -> bool:
    """Whether a mode exists.

    ``link-N`` is ``offset`` with N link tokens. ``%P`` behind a strategy keeps P percent of the chunks' tokens.
    """
    way, percent, share = name.partition("%")
    if percent and (way == "full" or link_tokens(way) or not _SHARE.fullmatch(share)):
        return False
    return way in _WAYS or 0 < link_tokens(way) <= MAX_LINK_TOKENS


def special(stats: Mapping[str, Any]) -> tuple[str, ...]:
    """Calibrated modes that not every server has, of a server with these statistics."""
    return SPARSE if stats.get("leaves_out") else ()


def evaluated(calibrates: bool, special: Iterable[str]) -> tuple[str, ...]:
    """Modes of an evaluation or a calibration of a server with these :func:`special` ones."""
    return tuple(in_order((*CALIBRATED, *special))) if calibrates else MODES


def link_tokens(mode: str) -> int:
    """Number of link tokens of a mode."""
    match = _LINK.fullmatch(_way(mode))
    return int(match[1]) if match else 0


def budget_share_of(mode: str) -> float:
    """Share of the chunks' tokens that a mode keeps."""
    return int(mode.partition("%")[2] or 100) / 100


def strategy_of(mode: str) -> PositionStrategy:
    """The position strategy of a mode that reuses chunks."""
    return PositionStrategy.OFFSET if link_tokens(mode) else PositionStrategy(_way(mode))


def cache_field(mode: str) -> dict[str, Any]:
    """The ``cache`` field of a request in the mode."""
    if mode == "full":
        return {"mode": "full"}
    sparse = {"sparse": {"budget_share": budget_share_of(mode)}} if budget_share_of(mode) < 1 else {}
    return {"position_strategy": strategy_of(mode).value, "link_tokens": link_tokens(mode), **sparse}


def mode_of(report: Mapping[str, Any]) -> str:
    """The mode of an answer with this cache report."""
    if report["mode"] == "full":
        return "full"
    way = f"link-{links['tokens']}" if (links := report.get("links")) else str(report["position_strategy"])
    share = report.get("budget_share", 1)
    return way + (f"%{100 * share:.0f}" if share < 1 else "")


def in_order(modes: Iterable[str]) -> list[str]:
    """Distinct modes; full attention first, then by cost."""

    def cost(mode: str) -> tuple[int, int, float]:
        way = _way(mode)
        place = _WAYS.index(way) if way in _WAYS else 0
        return link_tokens(way), place, -budget_share_of(mode)

    return sorted(set(modes), key=cost)


def _way(mode: str) -> str:
    return mode.partition("%")[0]
