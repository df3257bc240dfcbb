# SPDX-License-Identifier: Apache-2.0
"""Names of the ways to answer over chunks: full, shared, offset, parallel, offset~25%, offset+15%, offset%25+15%."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Annotated, Any, Final, NamedTuple

from pydantic import AfterValidator

from cache.positions.layout import PositionStrategy
from cache.sparse import Sparse
from engine_ext.client.request import CacheOptions

MODES: Final = ("full", "shared", "parallel", "offset")
"""Modes of an evaluation by default."""
_WAYS: Final = ("full", *(strategy.value for strategy in PositionStrategy))
MEASURING: Final = ("offset~15%", "offset+15%", "offset%25", "offset%50", "offset%50+15%")
"""Calibrated as well where attention to chunks can be measured."""
_MODE: Final = re.compile(rf"({'|'.join(_WAYS)})(?:%([1-9]\d?))?(?:([+~])([1-9]\d?|100)%)?")


def is_mode(name: str) -> bool:
    """Whether a mode exists.

    ``%P`` behind a strategy keeps P percent of the chunks' tokens, ``~P%`` repeats P percent before the question, and
    ``+P%`` behind ``offset`` computes P percent anew.
    """
    if (match := _MODE.fullmatch(name)) is None:
        return False
    way, kept, anew, _ = match.groups()
    return (way != "full" or not (kept or anew)) and (way == "offset" or anew != "+")


def _known(name: str) -> str:
    if not is_mode(name):
        raise ValueError(f"there is no mode {name!r}: {', '.join(PositionStrategy)}, also with %P, ~P% or +P%")
    return name


Mode = Annotated[str, AfterValidator(_known)]
"""The name of a mode, where pydantic checks it."""


def special(stats: Mapping[str, Any]) -> tuple[str, ...]:
    """Calibrated modes that not every server has, of a server with these statistics."""
    return MEASURING if stats.get("measures_attention") else ()


def evaluated(calibrates: bool, special: Iterable[str]) -> tuple[str, ...]:
    """Modes of an evaluation or a calibration of a server with these :func:`special` ones."""
    return tuple(in_order((*MODES, *special))) if calibrates else MODES


def needs_attention(mode: str) -> bool:
    """Whether the mode needs a server that measures attention to chunks."""
    _, kept, recompute, reread = _parts(mode)
    return recompute + reread > 0 or kept < 1


def strategy_of(mode: str) -> PositionStrategy:
    """The position strategy of a mode that reuses chunks."""
    return PositionStrategy(_parts(mode).way)


def in_mode(options: CacheOptions, mode: str) -> CacheOptions:
    """The options of a request in a mode that reuses chunks."""
    way, kept, recompute, reread = _parts(mode)
    sparse = Sparse(budget_share=kept) if kept < 1 else None
    strategy = PositionStrategy(way)
    return replace(options, position_strategy=strategy, recompute=recompute, reread=reread, sparse=sparse)


def cache_field(mode: str) -> dict[str, Any]:
    """The ``cache`` field of a request in the mode."""
    if mode == "full":
        return {"mode": "full"}
    way, kept, recompute, reread = _parts(mode)
    sparse = {"sparse": {"budget_share": kept}} if kept < 1 else {}
    return {"position_strategy": way, "recompute": recompute, "reread": reread, **sparse}


def mode_of(report: Mapping[str, Any]) -> str:
    """The mode of an answer with this cache report."""
    if report["mode"] == "full":
        return "full"
    kept, recomputed, reread = (report.get(*each) for each in (("budget_share", 1), ("recompute", 0), ("reread", 0)))
    name = str(report["position_strategy"])
    name += f"%{100 * kept:.0f}" if kept < 1 else ""
    name += f"+{100 * recomputed:.0f}%" if recomputed else ""
    return name + (f"~{100 * reread:.0f}%" if reread else "")


def in_order(modes: Iterable[str]) -> list[str]:
    """Distinct modes; full attention first, then by cost."""

    def cost(mode: str) -> tuple[float, int, float, float]:
        way, kept, recompute, reread = _parts(mode)
        return recompute + reread, _WAYS.index(way), -kept, recompute

    return sorted(set(modes), key=cost)


class _Parts(NamedTuple):
    """The way, and the shares of the chunks' tokens that are kept, computed anew in place, and repeated."""

    way: str
    kept: float
    recompute: float
    reread: float


def _parts(mode: str) -> _Parts:
    match = _MODE.fullmatch(mode)
    assert match is not None, mode
    way, kept, sign, percent = match.groups()
    anew = int(percent or 0) / 100
    return _Parts(way, int(kept or 100) / 100, anew if sign == "+" else 0.0, anew if sign == "~" else 0.0)
