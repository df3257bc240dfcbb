# SPDX-License-Identifier: Apache-2.0
"""Tessera's own settings: environment variables ``TESSERA_*``, overridden by command-line flags."""

import argparse
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import ByteSize, Field, SecretStr, field_validator, model_validator
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, SettingsConfigDict

from app.access.settings import AccessSettings
from cache.config import ChunkCacheUse, HashAlgorithm
from cache.eviction.policies import EvictionPolicyName
from cache.positions.layout import PlacementName, PositionStrategy
from cache.positions.strategy import UNKNOWN
from cache.report import ScopeName
from cache.selection import DecodingBudget, PolicyName, Scoring, Sparse
from cache.tiers.config import parse_tiers
from engine_ext.wire.request import MAX_LINK_TOKENS, TEMPERATURES, CacheOptions
from replicas.registry import Role

LogFormat = Literal["text", "json"]
LogLevel = Literal["CRITICAL", "ERROR", "WARNING", "INFO", "DEBUG", "NOTSET"]
VLLM_FLAGS = frozenset({"log_level"})
"""Settings that share a flag with vLLM, where vLLM has it; their variables are Tessera's alone."""


class UnknownSettingError(ValueError):
    """An unknown environment variable ``TESSERA_…``; the message lists the known ones."""


class Settings(AccessSettings):
    """Unknown keys are errors. Every field is also a flag of ``tessera serve``."""

    model_config = SettingsConfigDict(env_prefix="TESSERA_", env_ignore_empty=True, extra="forbid", frozen=True)

    chunk_cache: ChunkCacheUse = Field(
        "on",
        description="on: reuse chunk KV; where that is impossible, serve every request in full attention; require: do "
        "not start there; off (or --no-chunk-cache): reuse nothing",
    )
    chunk_cache_memory: ByteSize = Field(
        ByteSize(1 << 30), gt=0, description="memory of the chunk pool on each worker's device, e.g. 8GiB"
    )
    chunk_cache_page_tokens: int = Field(
        32, ge=1, le=1024, description="tokens in a page of the pool; a chunk takes whole pages"
    )
    chunk_cache_placement: PlacementName = Field(
        "copy",
        description="copy: each request gets copies of its chunks; in-place: requests with positions parallel share "
        "vLLM's own blocks of a chunk, which white space pads to whole blocks; attend: requests read chunks in the "
        "pool (docs/chunk-attention.md)",
    )
    chunk_cache_eviction: EvictionPolicyName = Field(
        "s3fifo", description="eviction policy; docs/eviction.md compares them"
    )
    chunk_cache_max_pinned: float = Field(0.9, ge=0, le=1, description="share of the pool that may be pinned")
    chunk_cache_max_fills: int = Field(16, ge=1, description="missing chunks that are computed at once; others wait")
    chunk_cache_max_queued_fills: int = Field(
        1024, ge=1, description="missing chunks that may wait; beyond that, requests are refused with status 503"
    )
    chunk_max_tokens: int = Field(
        4096, ge=1, description="longer documents are split into chunks of this many tokens, each cached on its own"
    )
    chunk_max_per_call: int = Field(5000, ge=1, description="documents that one request may bring")
    split_max_bytes: ByteSize = Field(
        ByteSize(16 << 20), gt=0, description="largest file for POST /v1/rag/split, e.g. 64MiB"
    )
    chunk_cache_hash: HashAlgorithm = Field("xxh3_128", description="hash function of chunk keys")
    chunk_position_strategy: PositionStrategy | None = Field(
        None,
        description="default position strategy of requests: offset, shared, parallel, or window, with which "
        "--max-model-len may exceed the model's own length (docs/quality.md); "
        "default: the profile's, else the one in the model's config.json that it was trained for, else offset",
    )
    chunk_window: int | None = Field(
        None,
        ge=1,
        description="window of positions window, in tokens, at least the longest chunk: no chunk starts farther from "
        "the question (docs/quality.md); default: half of the positions that the model was trained for",
    )
    chunk_scope: ScopeName = Field(
        "system",
        description="default scope of requests: system, or isolated, in which chunks are reused behind any system "
        "prompt, also one with a date or a name in it (docs/quality.md); routers need the same",
    )
    chunk_link_tokens: int = Field(
        0,
        ge=0,
        le=MAX_LINK_TOKENS,
        description="default number of link tokens, for requests that don't ask for shared positions: first tokens "
        "of each chunk, recomputed in their context, which costs time and recovers quality (docs/quality.md)",
    )
    chunk_temperature: float = Field(
        1.0,
        ge=TEMPERATURES[0],
        le=TEMPERATURES[1],
        description="default temperature of attention to the chunks, for --chunk-cache-placement attend "
        "(docs/chunk-attention.md)",
    )
    chunk_sparse_budget: int | None = Field(
        None,
        ge=1,
        description="default tokens of chunks that an answer may use, the chunks that the question attends to most "
        "(docs/sparse.md); default: all, and requests can't ask for fewer",
    )
    chunk_sparse_policy: PolicyName = Field(
        "attention", description="what chunks are scored by, for --chunk-sparse-budget (docs/sparse.md)"
    )
    chunk_sparse_layers: str | None = Field(
        None,
        pattern=r"^\d+(,\d+)*$",
        description="layers whose attention scores chunks, for --chunk-sparse-budget, e.g. 14,17; default: the one at "
        "three fifths of the model's depth",
    )
    decode_sparse_budget: int | None = Field(
        None,
        ge=1,
        description="tokens of any prompt that a generated token attends to, chosen anew in each layer and step in "
        "whole blocks, for long contexts (docs/sparse.md); default: all",
    )
    decode_sparse_policy: PolicyName = Field(
        "channels", description="what blocks are scored by, for --decode-sparse-budget (docs/sparse.md)"
    )
    profile: Path | None = Field(
        None,
        description="profile of tessera calibrate, for requests that leave positions and link tokens open: the "
        "cheapest mode that answers as well as full attention, by number of chunks",
    )
    chunk_cache_tiers: str | None = Field(
        None,
        description="storage of chunks beside the pool, the fastest first: "
        "host://?size=4GiB,file:///var/cache/tessera?size=100GiB; default: none",
    )
    chunk_cache_tier_timeout: float = Field(
        1.0, gt=0, le=60, description="seconds to wait for a chunk from a tier before computing it"
    )
    collections: Path | None = Field(
        None,
        description="folder of the collections (POST /v1/rag/collections/NAME); replicas share one; default: below the "
        "first directory tier, else below TESSERA_HOME",
    )
    retriever: str = Field(
        "bm25",
        min_length=1,
        description="retriever of the collections' passages, by its entry point (docs/collections.md)",
    )
    role: Role = Field(
        "both",
        description="this replica's part in a cluster: prefill computes chunks for replicas with the part decode, "
        "which get the requests",
    )
    registry: str | None = Field(
        None, description="Redis or Valkey that replicas register in, e.g. redis://host:6379/0; default: none"
    )
    registry_prefix: str = Field("tessera:", description="prefix of all keys in the registry")
    registry_timeout: float = Field(
        0.1, gt=0, le=10, description="seconds to wait for the registry before continuing without it"
    )
    registry_lease: float = Field(
        5.0, ge=2, le=600, description="seconds without a heartbeat after which a replica counts as gone"
    )
    peer_secret: SecretStr | None = Field(
        None,
        min_length=16,
        description="shared secret of replicas that fetch chunks from each other, best set as TESSERA_PEER_SECRET; "
        "default: none, and chunks are not fetched",
    )
    peer_wait: float = Field(
        5.0, ge=0, le=600, description="seconds at most to wait for a chunk that another replica has or is computing"
    )
    advertise_url: str | None = Field(
        None, description="URL at which routers reach this replica; default: from --host and --port"
    )
    replica_name: str | None = Field(
        None, min_length=1, description="this replica's name, stable across restarts; default: host name and port"
    )
    log_format: LogFormat = Field("text", description="format of Tessera's own log on standard error: text or json")
    log_level: LogLevel = Field("WARNING", description="lowest level of Tessera's own log; INFO: a line per request")
    chunk_separator: str | None = Field(
        None,
        min_length=1,
        description="text that splits prompts on vLLM's own endpoints into chunks, e.g. ' # # '; default: none",
    )

    @model_validator(mode="after")
    def _roles_need_peers(self) -> "Settings":
        if self.role != "both" and (self.registry is None or self.peer_secret is None):
            raise ValueError(
                f"--role {self.role} needs --registry and --peer-secret, by which replicas reach one another"
            )
        return self

    @field_validator("chunk_cache_tiers")
    @classmethod
    def _tiers_can_be_read(cls, text: str | None) -> str | None:
        parse_tiers(text or "")
        return text

    def scoring(self) -> Scoring | None:
        """How chunks are scored; ``None`` without sparse requests."""
        if self.chunk_sparse_budget is None:
            return None
        layers = self.chunk_sparse_layers
        return Scoring(self.chunk_sparse_policy, tuple(map(int, layers.split(","))) if layers else None)

    def decoding(self) -> DecodingBudget | None:
        """The budget of generated tokens; ``None``: they attend to everything."""
        tokens = self.decode_sparse_budget
        return None if tokens is None else DecodingBudget(tokens, self.decode_sparse_policy)

    def cache_defaults(self) -> CacheOptions:
        """The default cache options of requests."""
        strategy = self.chunk_position_strategy or UNKNOWN.strategy
        return CacheOptions(
            position_strategy=strategy,
            scope=self.chunk_scope,
            link_tokens=self.chunk_link_tokens,
            temperature=self.chunk_temperature,
            sparse=Sparse(self.chunk_sparse_budget) if self.chunk_sparse_budget else None,
        )


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds a flag for each setting without a vLLM flag."""
    group = parser.add_argument_group(
        "Tessera", "The chunk cache. Each flag is also TESSERA_<NAME> in the environment."
    )
    add_flags_of(Settings, group)


def add_flags_of(settings: type[BaseSettings], group: argparse._ActionsContainer) -> None:
    """Adds a flag for each setting; flags not given stay absent from the parsed arguments."""
    for name, field in settings.model_fields.items():
        if name not in VLLM_FLAGS:
            _add_flag(group, name, field)


def add_missing_flags(parser: argparse.ArgumentParser) -> None:
    """Adds flags that vLLM's parser lacks in this version."""
    for name in VLLM_FLAGS:
        with suppress(argparse.ArgumentError):
            _add_flag(parser, name, Settings.model_fields[name])


def _add_flag(group: argparse._ActionsContainer, name: str, field: FieldInfo) -> None:
    default = field.default.human_readable() if isinstance(field.default, ByteSize) else field.default
    text = f"{field.description} (default: {default})" if default is not None else field.description
    if field.annotation is bool:
        group.add_argument(_flag(name), action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text)
    elif {"on", "off"} <= {*get_args(field.annotation)}:
        # Also as a switch: YAML files have true and false for on and off.
        shared: dict[str, Any] = {"default": argparse.SUPPRESS, "dest": name}
        group.add_argument(_flag(name), nargs="?", const="on", metavar="VALUE", help=text, **shared)
        group.add_argument(_flag(f"no_{name}"), action="store_const", const="off", help=argparse.SUPPRESS, **shared)
    else:
        group.add_argument(_flag(name), default=argparse.SUPPRESS, metavar="VALUE", help=text)


def load_settings(args: argparse.Namespace, environment: Mapping[str, str] = os.environ) -> Settings:
    """Reads the settings from the environment and the parsed flags.

    Raises :class:`UnknownSettingError` or ``pydantic.ValidationError`` (which names the setting).
    """
    known = {"TESSERA_HOME", *(f"TESSERA_{name.upper()}" for name in Settings.model_fields)}
    if unknown := sorted(name for name in environment if name.startswith("TESSERA_") and name not in known):
        raise UnknownSettingError(f"unknown {', '.join(unknown)}; there are {', '.join(sorted(known))}")
    given: dict[str, Any] = {name: vars(args)[name] for name in Settings.model_fields if name in vars(args)}
    return Settings(**given)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
