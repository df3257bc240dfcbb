# SPDX-License-Identifier: Apache-2.0
"""Names of the ways to answer over chunks: full, shared, offset, parallel, link-16, offset@0.9."""

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
_LINK: Final = re.compile(r"link-([1-9]\d{0,3})")
_LEAST, _MOST = TEMPERATURES


def is_mode(name: str) -> bool:
    """Whether a mode exists.

    ``link-N`` is ``offset`` with N link tokens; ``@T`` behind a mode that reuses chunks is a temperature other than 1.
    """
    way, at, temperature = name.partition("@")
    if at and (way == "full" or not _is_temperature(temperature)):
        return False
    return way in _WAYS or 0 < link_tokens(way) <= MAX_LINK_TOKENS


def evaluated(calibrates: bool, attends: bool) -> tuple[str, ...]:
    """Modes of an evaluation or a calibration; ``attends``: whether the server can give chunks a temperature."""
    if not calibrates:
        return MODES
    return tuple(in_order((*CALIBRATED, TEMPERED))) if attends else CALIBRATED


def link_tokens(mode: str) -> int:
    """Number of link tokens of a mode."""
    match = _LINK.fullmatch(_way(mode))
    return int(match[1]) if match else 0


def temperature_of(mode: str) -> float:
    """Temperature of attention to the chunks in a mode."""
    return float(mode.partition("@")[2] or 1)


def strategy_of(mode: str) -> PositionStrategy:
    """The position strategy of a mode that reuses chunks."""
    return PositionStrategy.OFFSET if link_tokens(mode) else PositionStrategy(_way(mode))


def cache_field(mode: str) -> dict[str, Any]:
    """The ``cache`` field of a request in the mode."""
    if mode == "full":
        return {"mode": "full"}
    options = {"position_strategy": strategy_of(mode).value, "link_tokens": link_tokens(mode)}
    return {**options, "temperature": temperature_of(mode)}


def mode_of(report: Mapping[str, Any]) -> str:
    """The mode of an answer with this cache report."""
    if report["mode"] == "full":
        return "full"
    way = f"link-{links['tokens']}" if (links := report.get("links")) else str(report["position_strategy"])
    temperature = report.get("temperature", 1)
    return way if temperature == 1 else f"{way}@{temperature:g}"


def in_order(modes: Iterable[str]) -> list[str]:
    """Distinct modes; full attention first, then by cost."""

    def cost(mode: str) -> tuple[int, int, float]:
        way = _way(mode)
        return link_tokens(way), _WAYS.index(way) if way in _WAYS else 0, -temperature_of(mode)

    return sorted(set(modes), key=cost)


def _way(mode: str) -> str:
    return mode.partition("@")[0]


def _is_temperature(text: str) -> bool:
    """Whether ``text`` is the shortest form of a temperature that changes anything."""
    try:
        number = float(text)
    except ValueError:
        return False
    return _LEAST <= number <= _MOST and number != 1 and text == f"{number:g}"
