# SPDX-License-Identifier: Apache-2.0
"""The position strategy of requests that name none."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from cache.positions.layout import PositionStrategy

TRAINED_FOR: Final = "chunk_attention"
"""Field of a model's ``config.json`` with the modes it was trained for."""

_COST: Final = (
    "; what reuse costs it was not measured, and Qwen2.5-Coder-1.5B lost 5 points of accuracy over 2 chunks and "
    "17 over 16, which --chunk-mode offset~15% mostly gives back: see docs/quality.md and tessera calibrate"
)


@dataclass(frozen=True, slots=True)
class DefaultStrategy:
    """A strategy, and a short reason for the log."""

    strategy: PositionStrategy
    why: str
    is_known: bool = True
    """Whether training, a measurement or a flag justifies the strategy."""

    def described(self) -> str:
        """The strategy and its reason; advice if there is no justification."""
        return f"{self.strategy} ({self.why}{'' if self.is_known else _COST})"


UNKNOWN: Final = DefaultStrategy(PositionStrategy.OFFSET, "the model was not trained for chunk reuse", is_known=False)
"""For models not trained for chunk reuse: the strategy that loses least quality (docs/quality.md)."""


def strategy_for(trained_for: Collection[str]) -> DefaultStrategy:
    """The default strategy for a model that was trained for the modes ``trained_for``."""
    trained = (each for each in PositionStrategy if each.value in trained_for)
    return next((DefaultStrategy(each, "the model was trained for it") for each in trained), UNKNOWN)
