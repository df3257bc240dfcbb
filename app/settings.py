# SPDX-License-Identifier: Apache-2.0
"""Tessera's own settings: environment variables ``TESSERA_*``, overridden by command-line flags."""

import argparse
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Literal, get_args

from pydantic import ByteSize, Field, SecretStr, field_validator, model_validator
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, SettingsConfigDict

from app.access.settings import AccessSettings
from app.modes import Mode, in_mode, needs_attention
from cache.config import ChunkCacheUse
from cache.eviction.policies import EvictionPolicyName
from cache.positions.layout import PlacementName
from cache.positions.strategy import UNKNOWN
from cache.report import ScopeName
from cache.tiers.config import parse_tiers
from engine_ext.client.request import CacheOptions
from replicas.registry import Role, origin_of

LogFormat = Literal["text", "json"]
LogLevel = Literal["CRITICAL", "ERROR", "WARNING", "INFO", "DEBUG", "NOTSET"]
VLLM_FLAGS = frozenset({"log_level"})
"""Settings that share a flag with vLLM, where vLLM has it; their variables are Tessera's alone."""


class UnknownSettingError(ValueError):
    """An unknown environment variable ``TESSERA_…``; the message lists the known ones."""


class ChunkSettings(BaseSettings):
    """Chunks."""

    chunk_cache: ChunkCacheUse = Field(
        "on", description="require: don't start where chunks can't be reused; off: reuse none"
    )
    chunk_cache_memory: ByteSize | None = Field(
        None,
        gt=0,
        description="each worker's chunk pool (default: 15 % of a device's share for vLLM, or 1GiB)",
    )
    profile: Path | None = Field(None, description="file of tessera calibrate; decides what requests leave open")
    chunk_adapter: Path | None = Field(None, description="folder of tessera adapt; runs only where chunks are computed")
    chunk_mode: Mode | None = Field(
        None, description="how chunks are reused: offset~15% … as in eval (default: profile's or model's)"
    )
    chunk_scope: ScopeName = Field("system", description="isolated: reuse chunks behind any system prompt")
    chunk_separator: str | None = Field(
        None, min_length=1, description="text that splits prompts on vLLM's endpoints, e.g. ' # # '"
    )
    documents: str = Field("off", description="auto: find documents in any prompt; or a file of further forms")
    chunk_max_tokens: int = Field(4096, ge=1, description="longer documents are split into chunks of this size")
    collections: Path | None = Field(None, description="folder of the collections of files")
    retriever: SecretStr = Field(
        SecretStr("bm25"),
        min_length=1,
        description="bm25 (default), embeddings' URL, http://host/v1?model=NAME, or a package's",
    )

    @field_validator("chunk_mode")
    @classmethod
    def _reuses_chunks(cls, mode: str | None) -> str | None:
        if mode == "full":
            raise ValueError("full attention reuses no chunks, as --chunk-cache off does")
        return mode


class ClusterSettings(BaseSettings):
    """Storage and cluster."""

    chunk_cache_tiers: str | None = Field(
        None, description="storage, fastest first: host://?size=4GiB,file:///kv?size=100GiB"
    )
    tier_key: Path | None = Field(None, description="file with a secret; only files signed with it are read from tiers")
    registry: str | None = Field(None, description="the cluster's Redis or Valkey, e.g. redis://host:6379/0")
    peer_secret: SecretStr | None = Field(
        None, min_length=16, description="lets replicas fetch chunks; best as TESSERA_PEER_SECRET"
    )
    role: Role = Field("both", description="prefill: compute chunks for replicas that decode")
    replica_name: str | None = Field(None, min_length=1, description="stable name (default: host name and port)")
    advertise_url: str | None = Field(None, description="address for routers (default: of --host and --port)")

    @model_validator(mode="after")
    def _roles_need_peers(self) -> "ClusterSettings":
        if self.role != "both" and (self.registry is None or self.peer_secret is None):
            raise ValueError(
                f"--role {self.role} needs --registry and --peer-secret, by which replicas reach one another"
            )
        return self

    @field_validator("advertise_url")
    @classmethod
    def _is_a_servers(cls, text: str | None) -> str | None:
        return origin_of(text) if text is not None else None

    @field_validator("chunk_cache_tiers")
    @classmethod
    def _tiers_can_be_read(cls, text: str | None) -> str | None:
        parse_tiers(text or "")
        return text


class LogSettings(BaseSettings):
    """Log."""

    log_level: LogLevel = Field("WARNING", description="INFO: a line per request")
    log_format: LogFormat = Field("text", description="text or json")


class TuningSettings(BaseSettings):
    """Tuning."""

    chunk_cache_placement: PlacementName = Field(
        "copy", description="in-place: share vLLM's blocks; attend: read chunks in the pool"
    )
    chunk_cache_eviction: EvictionPolicyName = Field("s3fifo", description=" or ".join(get_args(EvictionPolicyName)))
    chunk_probe_layers: str | None = Field(
        None, pattern=r"^\d+(,\d+)*$", description="layers that measure attention to chunks (default: the middle third)"
    )
    decode_sparse_budget: int | None = Field(None, ge=1, description="tokens that a generated token attends to")


class Settings(TuningSettings, LogSettings, ClusterSettings, AccessSettings, ChunkSettings):
    """Unknown keys are errors. Every field is also a flag of ``tessera serve``."""

    model_config = SettingsConfigDict(env_prefix="TESSERA_", env_ignore_empty=True, extra="forbid", frozen=True)

    def most_tokens(self, wanted: int) -> int:
        """The most tokens of a passage for which so many are wanted: longer documents are split."""
        return min(wanted, self.chunk_max_tokens)

    def tiers(self) -> list[str]:
        """The tiers' URLs, fastest first."""
        return parse_tiers(self.chunk_cache_tiers or "")

    def probe_layers(self) -> tuple[int, ...]:
        """Layers that measure attention to chunks; empty for the default ones."""
        return tuple(map(int, self.chunk_probe_layers.split(","))) if self.chunk_probe_layers else ()

    @property
    def needs_attention(self) -> bool:
        """Whether requests choose chunks or windows by the attention to them, unless they say otherwise."""
        return self.chunk_mode is not None and needs_attention(self.chunk_mode)

    @property
    def leaves_the_choice(self) -> bool:
        """Whether a profile may decide how chunks are reused: no flag does."""
        return not {"chunk_adapter", "chunk_mode"} & self.model_fields_set

    def cache_defaults(self) -> CacheOptions:
        """The default cache options of requests."""
        return in_mode(CacheOptions(scope=self.chunk_scope), self.chunk_mode or UNKNOWN.strategy.value)


SECTIONS: Final = (ChunkSettings, AccessSettings, ClusterSettings, LogSettings, TuningSettings)
"""In the order in which a user needs them."""


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
    text = _help(field).replace("%", "%%")
    if field.annotation is bool:
        group.add_argument(flag(name), action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text)
    elif {"on", "off"} <= {*get_args(field.annotation)}:
        # Also as a switch: YAML files have true and false for on and off.
        shared: dict[str, Any] = {"default": argparse.SUPPRESS, "dest": name}
        group.add_argument(flag(name), nargs="?", const="on", metavar="VALUE", help=text, **shared)
        group.add_argument(flag(f"no_{name}"), action="store_const", const="off", help=argparse.SUPPRESS, **shared)
    else:
        group.add_argument(flag(name), default=argparse.SUPPRESS, metavar="VALUE", help=text)


def flag_lines() -> Iterator[str]:
    """A line for each section and flag of ``tessera serve``."""
    for section in SECTIONS:
        yield f"\n{(section.__doc__ or '').rstrip('.')}:"
        for name, field in section.model_fields.items():
            shown = f"--no-{name.replace('_', '-')}" if field.default is True else flag(name)
            yield f"  {shown:27} {_help(field)}"


def _help(field: FieldInfo) -> str:
    default = field.default.human_readable() if isinstance(field.default, ByteSize) else field.default
    tells = default is not None and not isinstance(default, bool | SecretStr)
    return f"{field.description} (default: {default})" if tells else str(field.description)


def load_settings(args: argparse.Namespace, environment: Mapping[str, str] = os.environ) -> Settings:
    """Reads the settings from the environment and the parsed flags.

    Raises :class:`UnknownSettingError` or ``pydantic.ValidationError`` (which names the setting).
    """
    known = {"TESSERA_HOME", *(f"TESSERA_{name.upper()}" for name in Settings.model_fields)}
    if unknown := sorted(name for name in environment if name.startswith("TESSERA_") and name not in known):
        raise UnknownSettingError(f"unknown {', '.join(unknown)}; there are {', '.join(sorted(known))}")
    given: dict[str, Any] = {name: vars(args)[name] for name in Settings.model_fields if name in vars(args)}
    return Settings(**given)


def flag(name: str) -> str:
    """The flag of a setting."""
    return "--" + name.replace("_", "-")
