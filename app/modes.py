# SPDX-License-Identifier: Apache-2.0
"""Names of the ways to answer over chunks: full, shared, offset, parallel, link-16, offset@0.9, offset%25."""

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from cache.positions.layout import PositionStrategy
from engine_ext.wire.request import MAX_LINK_TOKENS, TEMPERATURES

MODES: Final = ("full", "shared", "parallel", "offset")
"""Modes of an evaluation by default."""
_WAYS: Final = ("full", *(strategy.value for strategy in PositionStrategy))
CALIBRATED: Final = (*MODES, "link-8", "link-16", "link-32")
TEMPERED: Final = "offset@0.9"
"""Calibrated as well where chunks are attended to in the pool."""
SPARSE: Final = ("offset%25", "offset%50")
"""Likewise where chunks can be left out."""
_LINK: Final = re.compile(r"link-([1-9]\d{0,3})")
_SHARE: Final = re.compile(r"[1-9]\d?")
_LEAST, _MOST = TEMPERATURES


def is_mode(name: str) -> bool:
    """Whether a mode exists.

    ``link-N`` is ``offset`` with N link tokens. Behind a mode that reuses chunks, ``@T`` is a temperature other than 1,
    and ``%P`` behind that keeps P percent of the chunks' tokens.
    """
    tempered, percent, share = name.partition("%")
    way, at, temperature = tempered.partition("@")
    if (at or percent) and way == "full":
        return False
    if (at and not _is_temperature(temperature)) or (percent and not _SHARE.fullmatch(share)):
        return False
    if percent and link_tokens(way):
        return False
    return way in _WAYS or 0 < link_tokens(way) <= MAX_LINK_TOKENS


def special(stats: Mapping[str, Any]) -> tuple[str, ...]:
    """Calibrated modes that not every server has, of a server with these statistics."""
    tempered = (TEMPERED,) if stats.get("placement") == "attend" else ()
    return (*tempered, *SPARSE) if stats.get("leaves_out") else tempered


def evaluated(calibrates: bool, special: Iterable[str]) -> tuple[str, ...]:
    """Modes of an evaluation or a calibration of a server with these :func:`special` ones."""
    return tuple(in_order((*CALIBRATED, *special))) if calibrates else MODES


def link_tokens(mode: str) -> int:
    """Number of link tokens of a mode."""
    match = _LINK.fullmatch(_way(mode))
    return int(match[1]) if match else 0


def temperature_of(mode: str) -> float:
    """Temperature of attention to the chunks in a mode."""
    return float(mode.partition("%")[0].partition("@")[2] or 1)


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
    options = {"position_strategy": strategy_of(mode).value, "link_tokens": link_tokens(mode)}
    sparse = {"sparse": {"budget_share": budget_share_of(mode)}} if budget_share_of(mode) < 1 else {}
    return {**options, "temperature": temperature_of(mode), **sparse}


def mode_of(report: Mapping[str, Any]) -> str:
    """The mode of an answer with this cache report."""
    if report["mode"] == "full":
        return "full"
    way = f"link-{links['tokens']}" if (links := report.get("links")) else str(report["position_strategy"])
    temperature, share = report.get("temperature", 1), report.get("budget_share", 1)
    return way + (f"@{temperature:g}" if temperature != 1 else "") + (f"%{100 * share:.0f}" if share < 1 else "")


def in_order(modes: Iterable[str]) -> list[str]:
    """Distinct modes; full attention first, then by cost."""

    def cost(mode: str) -> tuple[int, int, float, float]:
        way = _way(mode)
        place = _WAYS.index(way) if way in _WAYS else 0
        return link_tokens(way), place, -temperature_of(mode), -budget_share_of(mode)

    return sorted(set(modes), key=cost)


def _way(mode: str) -> str:
    return mode.partition("%")[0].partition("@")[0]


def _is_temperature(text: str) -> bool:
    """Whether ``text`` is the shortest form of a temperature that changes anything."""
    try:
        number = float(text)
    except ValueError:
        return False
    return _LEAST <= number <= _MOST and number != 1 and text == f"{number:g}"
