# SPDX-License-Identifier: Apache-2.0
"""The position strategy of requests that name none."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Final

from cache.positions.layout import PackedTokens, PositionStrategy, pack, packed_length

TRAINED_FOR: Final = "chunk_attention"
"""Field of a model's ``config.json`` with the modes it was trained for."""
CHUNK_TOKENS: Final = "chunk_tokens"
"""Field of a model's ``config.json``: the ids of its :class:`ChunkTokens`."""


@dataclass(frozen=True, slots=True)
class ChunkTokens:
    """Tokens around each chunk, which a model was trained for; packed."""

    before: PackedTokens = b""
    behind: PackedTokens = b""

    @classmethod
    def of(cls, config: Any) -> "ChunkTokens":
        """The tokens that a model's configuration names; none for most models."""
        ids = getattr(config, CHUNK_TOKENS, None) or {}
        return cls(*(pack(tuple(ids.get(name, ()))) for name in ("before", "behind")))

    @property
    def number(self) -> int:
        """Number of tokens around a chunk."""
        return packed_length(self.before + self.behind)

    def around(self, chunk: PackedTokens) -> PackedTokens:
        """The chunk with the tokens around it."""
        return self.before + chunk + self.behind


@dataclass(frozen=True, slots=True)
class DefaultStrategy:
    """A strategy, and a short reason for the log."""

    strategy: PositionStrategy
    why: str
    is_known: bool = True
    """Whether training, a measurement or a flag justifies the strategy."""

    def described(self) -> str:
        """The strategy and its reason; advice if there is no justification."""
        unknown = "" if self.is_known else "; what reuse costs it was not measured: see tessera calibrate"
        return f"{self.strategy} ({self.why}{unknown})"


UNKNOWN: Final = DefaultStrategy(PositionStrategy.OFFSET, "the model was not trained for chunk reuse", is_known=False)
"""For models not trained for chunk reuse: the strategy that loses least quality (docs/quality.md)."""


def strategy_for(trained_for: Collection[str]) -> DefaultStrategy:
    """The default strategy for a model that was trained for the modes ``trained_for``."""
    trained = (each for each in PositionStrategy if each.value in trained_for)
    return next((DefaultStrategy(each, "the model was trained for it") for each in trained), UNKNOWN)
