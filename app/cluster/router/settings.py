# SPDX-License-Identifier: Apache-2.0
"""The router's settings: environment variables ``TESSERA_*``, overridden by command-line flags."""

from pydantic import Field, SecretStr
from pydantic_settings import SettingsConfigDict

from app.access.settings import AccessSettings
from cache.report import ScopeName


class RouterSettings(AccessSettings):
    """Every field is also a flag of ``tessera route``. The registry's are those of ``tessera serve``."""

    model_config = SettingsConfigDict(env_prefix="TESSERA_", env_ignore_empty=True, extra="ignore", frozen=True)

    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(8080, ge=0, le=65535, description="port to listen on")
    registry: str = Field("redis://127.0.0.1:6379/0", description="Redis or Valkey that the replicas register in")
    peer_secret: SecretStr | None = Field(
        None,
        min_length=16,
        description="the replicas' secret, best set as TESSERA_PEER_SECRET; needed to split requests between replicas "
        "that prefill and replicas that decode (default: none)",
    )
    chunk_separator: str | None = Field(
        None, min_length=1, description="the replicas' --chunk-separator, if they have one; default: none"
    )
    chunk_scope: ScopeName = Field("system", description="the replicas' --chunk-scope")
    documents: str = Field("off", description="the replicas' --documents")
