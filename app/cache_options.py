# SPDX-License-Identifier: Apache-2.0
"""The request field ``cache``."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from app.documents import BadRequestError
from cache.layout import PositionStrategy
from engine_ext.caller import NamespaceRefusedError, own_namespace
from engine_ext.request import CacheMode, CacheOptions, ScopeName


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
    namespace: str | None = Field(
        None,
        min_length=1,
        max_length=128,
        pattern=r"^[^\x00-\x1f]+$",
        description="chunks never match across namespaces; default: that of the API key's tenant, else 'default'",
    )
    explain: bool = Field(False, strict=True, description="report each segment's token ids and first position")

    def options(self, default_strategy: PositionStrategy = PositionStrategy.SHARED) -> CacheOptions:
        """The options as the engine takes them; raises :class:`BadRequestError` for another's namespace."""
        strategy = self.position_strategy or default_strategy
        try:
            namespace = own_namespace(self.namespace)
        except NamespaceRefusedError as error:
            raise BadRequestError(str(error), "cache.namespace") from error
        return CacheOptions(self.mode, strategy, self.scope, namespace, self.explain)


def parse_cache_field(value: Any) -> CacheField:
    """The field from JSON; raises :class:`BadRequestError` naming what is wrong in it."""
    try:
        return CacheField.model_validate({} if value is None else value)
    except ValidationError as error:
        first = error.errors()[0]
        raise BadRequestError(first["msg"], ".".join(["cache", *map(str, first["loc"])])) from error
