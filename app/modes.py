# SPDX-License-Identifier: Apache-2.0
"""Names of the ways to answer over chunks: full, shared, offset, parallel, offset~25%, offset+15%, offset%25+15%."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Annotated, Any, Final

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


def recompute_of(mode: str) -> float:
    """Share of the chunks' tokens that a mode computes anew, in place."""
    return _share(mode, "+")


def reread_of(mode: str) -> float:
    """Share of the chunks' tokens that a mode repeats before the question."""
    return _share(mode, "~")


def budget_share_of(mode: str) -> float:
    """Share of the chunks' tokens that a mode keeps."""
    return int(_parts(mode)[1] or 100) / 100


def needs_attention(mode: str) -> bool:
    """Whether the mode needs a server that measures attention to chunks."""
    return recompute_of(mode) + reread_of(mode) > 0 or budget_share_of(mode) < 1


def strategy_of(mode: str) -> PositionStrategy:
    """The position strategy of a mode that reuses chunks."""
    return PositionStrategy(_parts(mode)[0])


def in_mode(options: CacheOptions, mode: str) -> CacheOptions:
    """The options of a request in a mode that reuses chunks."""
    share = budget_share_of(mode)
    return replace(
        options,
        position_strategy=strategy_of(mode),
        recompute=recompute_of(mode),
        reread=reread_of(mode),
        sparse=Sparse(budget_share=share) if share < 1 else None,
    )


def cache_field(mode: str) -> dict[str, Any]:
    """The ``cache`` field of a request in the mode."""
    if mode == "full":
        return {"mode": "full"}
    sparse = {"sparse": {"budget_share": budget_share_of(mode)}} if budget_share_of(mode) < 1 else {}
    anew = {"recompute": recompute_of(mode), "reread": reread_of(mode)}
    return {"position_strategy": strategy_of(mode).value, **anew, **sparse}


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
        anew = recompute_of(mode)
        return anew + reread_of(mode), _WAYS.index(_parts(mode)[0]), -budget_share_of(mode), anew

    return sorted(set(modes), key=cost)


def _share(mode: str, sign: str) -> float:
    _, _, anew, percent = _parts(mode)
    return int(percent or 0) / 100 if anew == sign else 0.0


def _parts(mode: str) -> tuple[str, str | None, str | None, str | None]:
    match = _MODE.fullmatch(mode)
    assert match is not None, mode
    way, kept, anew, percent = match.groups()
    return way, kept, anew, percent
