# SPDX-License-Identifier: Apache-2.0
"""The request field ``cache``."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from app.documents.document import BadRequestError, parsed_field
from cache.positions.layout import PositionStrategy
from cache.report import ScopeName
from cache.sparse import Sparse
from engine_ext.client.request import (
    CacheMode,
    CacheOptions,
    NamespaceRefusedError,
    own_namespace,
    salted_namespace,
)

NAMESPACE: Final = r"^[^\x00-\x1f]+$"


class SparseField(BaseModel):
    """Which chunks an answer may use."""

    model_config = ConfigDict(extra="forbid")

    budget_tokens: int | None = Field(
        None, ge=1, strict=True, description="tokens of the chunks that are kept, at most; default: the share alone"
    )
    budget_share: float | None = Field(
        None,
        gt=0,
        le=1,
        strict=True,
        description="share of the chunks' tokens that is kept, at most; default: the "
        "server's share, or all if there is none or budget_tokens is given",
    )
    mass: float = Field(
        1.0, gt=0, le=1, strict=True, description="keep no more chunks than get this share of the question's attention"
    )
    gaps: Literal["keep", "close"] = Field(
        "keep",
        description="keep: positions stay; close: the chunks kept follow one another, as if there were no others",
    )

    def completed(self, default: Sparse | None) -> Sparse:
        """The budget, with the server's share if the request names none."""
        share = self.budget_share
        if share is None:
            share = default.budget_share if self.budget_tokens is None and default is not None else 1.0
        return Sparse(self.budget_tokens, share, self.mass, closes_gaps=self.gaps == "close")


class CacheField(BaseModel):
    """How a request uses the chunk cache."""

    model_config = ConfigDict(extra="forbid")

    mode: CacheMode = Field(
        "auto",
        description="auto: reuse chunks, or fall back to full attention and report why; chunked: fail instead of "
        "falling back; full: full attention over the same tokens",
    )
    position_strategy: PositionStrategy | None = Field(
        None,
        description="offset: chunks one after another; shared: chunks overlap in position, the question follows them; "
        "parallel: chunks overlap, the question stays at its index; window: as offset, but chunks far from the "
        "question overlap; default: the server's",
    )
    scope: ScopeName | None = Field(
        None,
        description="system: a chunk is computed and reused behind the same system segment only; isolated: computed "
        "behind the chat template's constant opening, and reused behind any system segment; default: the server's",
    )
    namespace: str | None = Field(
        None,
        min_length=1,
        max_length=128,
        pattern=NAMESPACE,
        description="chunks never match across namespaces; default: that of the API key's tenant, else 'default'",
    )
    explain: bool = Field(False, strict=True, description="report each segment's token ids and first position")
    cite: bool = Field(
        False,
        strict=True,
        description="report which chunks each sentence of the answer rests on, by the model's attention to them while "
        "it wrote the sentence",
    )
    recompute: float | None = Field(
        None,
        ge=0,
        le=1,
        strict=True,
        description="share of the chunks' tokens that is computed anew behind everything before them, in windows that "
        "the question attends to, with chunks one after another (offset); 0: none; default: the server's",
    )
    reread: float | None = Field(
        None,
        ge=0,
        le=1,
        strict=True,
        description="share of the chunks' tokens that the prompt has once more before the question, as whole chunks "
        "that the question attends to; 0: none; default: the server's",
    )
    sparse: SparseField | None = Field(
        None,
        description="keep the chunks that the question attends to most, and leave out the others (docs/sparse.md). "
        "The share of a server with --chunk-mode offset%25 is the default",
    )

    @property
    def leaves_the_choice(self) -> bool:
        """Whether a profile may decide: the request sets none of the profile's options."""
        is_open = all(each is None for each in (self.position_strategy, self.recompute, self.reread, self.sparse))
        return is_open and (self.mode, self.scope or "system") == ("auto", "system")

    def salted_namespace(self, cache_salt: str | None) -> str:
        """The namespace of the request's chunks; raises :class:`BadRequestError` for a foreign one."""
        try:
            return salted_namespace(own_namespace(self.namespace), cache_salt)
        except NamespaceRefusedError as error:
            raise BadRequestError(str(error), "cache.namespace") from error

    def options(self, cache_salt: str | None, defaults: CacheOptions | None = None) -> CacheOptions:
        """The options for the engine; ``defaults`` fill in what the request leaves out.

        ``cache_salt`` is the request's field of that name.

        Raises :class:`BadRequestError` for a foreign namespace, and for windows of chunks that overlap.
        """
        defaults = defaults or CacheOptions()
        recompute, overlap = self.recompute, self.position_strategy not in (None, PositionStrategy.OFFSET)
        if recompute is None:
            recompute = 0.0 if overlap else defaults.recompute
        if recompute and overlap:
            raise BadRequestError("recomputing needs the position strategy offset", "cache.recompute")
        strategy = PositionStrategy.OFFSET if recompute else self.position_strategy or defaults.position_strategy
        return CacheOptions(
            self.mode,
            strategy,
            self.scope or defaults.scope,
            self.salted_namespace(cache_salt),
            self.explain,
            self.cite,
            recompute,
            defaults.reread if self.reread is None else self.reread,
            defaults.sparse if self.sparse is None else self.sparse.completed(defaults.sparse),
        )

    def as_found(self, options: CacheOptions) -> CacheOptions:
        """The options of a request whose documents were found in its prompt: they keep their order and positions.

        Left open, the scope is the one that other text before them doesn't change.
        """
        strategy = self.position_strategy or PositionStrategy.OFFSET
        return replace(options, position_strategy=strategy, scope=self.scope or "isolated")


def parse_cache_field(value: Any) -> CacheField:
    """Validates the field; raises :class:`BadRequestError` naming the value at fault."""
    return parsed_field(CacheField, "cache", {} if value is None else value)


def namespace_of(body: Mapping[str, Any], cache_salt: str | None = None) -> str:
    """The namespace that the field names, whatever else is in it; raises :class:`BadRequestError`."""
    cache = body.get("cache")
    field = parse_cache_field({"namespace": cache.get("namespace")} if isinstance(cache, Mapping) else None)
    return field.salted_namespace(cache_salt)


def cache_salt_of(body: Mapping[str, Any]) -> str | None:
    """The client's own ``cache_salt``, a field of vLLM's."""
    salt = body.get("cache_salt")
    return salt if isinstance(salt, str) else None
