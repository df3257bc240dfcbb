# SPDX-License-Identifier: Apache-2.0
"""Names of the ways to answer over chunks: full, shared, offset, parallel, offset+15%, offset%25, offset%25+15%."""

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from cache.positions.layout import PositionStrategy

MODES: Final = ("full", "shared", "parallel", "offset")
"""Modes of an evaluation by default."""
_WAYS: Final = ("full", *(strategy.value for strategy in PositionStrategy))
MEASURING: Final = ("offset+15%", "offset+25%", "offset%25", "offset%50", "offset%50+15%")
"""Calibrated as well where attention to chunks can be measured."""
_MODE: Final = re.compile(rf"({'|'.join(_WAYS)})(?:%([1-9]\d?))?(?:\+([1-9]\d?|100)%)?")


def is_mode(name: str) -> bool:
    """Whether a mode exists.

    ``%P`` behind a strategy keeps P percent of the chunks' tokens; ``+P%`` behind ``offset`` computes P percent anew.
    """
    if (match := _MODE.fullmatch(name)) is None:
        return False
    way, kept, recomputed = match.groups()
    return (way != "full" or not kept) and (way == "offset" or not recomputed)


def special(stats: Mapping[str, Any]) -> tuple[str, ...]:
    """Calibrated modes that not every server has, of a server with these statistics."""
    return MEASURING if stats.get("measures_attention") else ()


def evaluated(calibrates: bool, special: Iterable[str]) -> tuple[str, ...]:
    """Modes of an evaluation or a calibration of a server with these :func:`special` ones."""
    return tuple(in_order((*MODES, *special))) if calibrates else MODES


def recompute_of(mode: str) -> float:
    """Share of the chunks' tokens that a mode computes anew."""
    return int(_parts(mode)[2] or 0) / 100


def budget_share_of(mode: str) -> float:
    """Share of the chunks' tokens that a mode keeps."""
    return int(_parts(mode)[1] or 100) / 100


def needs_attention(mode: str) -> bool:
    """Whether the mode needs a server that measures attention to chunks."""
    return recompute_of(mode) > 0 or budget_share_of(mode) < 1


def strategy_of(mode: str) -> PositionStrategy:
    """The position strategy of a mode that reuses chunks."""
    return PositionStrategy(_parts(mode)[0])


def cache_field(mode: str) -> dict[str, Any]:
    """The ``cache`` field of a request in the mode."""
    if mode == "full":
        return {"mode": "full"}
    sparse = {"sparse": {"budget_share": budget_share_of(mode)}} if budget_share_of(mode) < 1 else {}
    return {"position_strategy": strategy_of(mode).value, "recompute": recompute_of(mode), **sparse}


def mode_of(report: Mapping[str, Any]) -> str:
    """The mode of an answer with this cache report."""
    if report["mode"] == "full":
        return "full"
    kept, recomputed = report.get("budget_share", 1), report.get("recompute", 0)
    name = str(report["position_strategy"])
    name += f"%{100 * kept:.0f}" if kept < 1 else ""
    return name + (f"+{100 * recomputed:.0f}%" if recomputed else "")


def in_order(modes: Iterable[str]) -> list[str]:
    """Distinct modes; full attention first, then by cost."""

    def cost(mode: str) -> tuple[float, int, float]:
        return recompute_of(mode), _WAYS.index(_parts(mode)[0]), -budget_share_of(mode)

    return sorted(set(modes), key=cost)


def _parts(mode: str) -> tuple[str, str | None, str | None]:
    match = _MODE.fullmatch(mode)
    assert match is not None, mode
    way, kept, recomputed = match.groups()
    return way, kept, recomputed
