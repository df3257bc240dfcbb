# SPDX-License-Identifier: Apache-2.0
"""The request field ``cache``."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from app.documents import BadRequestError
from cache.layout import PositionStrategy
from engine_ext.request import DEFAULT_NAMESPACE, CacheMode, CacheOptions, ScopeName


class CacheField(BaseModel):
    """How a request uses the chunk cache."""

    model_config = ConfigDict(extra="forbid")

    mode: CacheMode = Field(
        "auto",
        description="auto: reuse chunks, fall back to full attention and say why; chunked: fail instead of falling "
        "back; full: full attention over the same tokens",
    )
    position_strategy: PositionStrategy | None = Field(
        None,
        description="shared: chunks overlap in position; offset: one after another; default: the server's",
    )
    scope: ScopeName = Field(
        "system",
        description="system: a chunk is computed and reused behind the same system segment only; isolated: computed "
        "behind the chat template's constant opening, and reused behind any system segment",
    )
    namespace: str = Field(
        DEFAULT_NAMESPACE,
        min_length=1,
        max_length=128,
        pattern=r"^[^\x00-\x1f]+$",
        description="chunks never match across namespaces",
    )
    explain: bool = Field(False, description="report each segment's token ids and first position")

    def options(self, default_strategy: PositionStrategy = PositionStrategy.SHARED) -> CacheOptions:
        """The options as the engine takes them."""
        strategy = self.position_strategy or default_strategy
        return CacheOptions(self.mode, strategy, self.scope, self.namespace, self.explain)


def parse_cache_field(value: Any) -> CacheField:
    """The field from JSON; raises :class:`BadRequestError` naming what is wrong in it."""
    try:
        return CacheField.model_validate({} if value is None else value)
    except ValidationError as error:
        first = error.errors()[0]
        raise BadRequestError(first["msg"], ".".join(["cache", *map(str, first["loc"])])) from error
