# SPDX-License-Identifier: Apache-2.0
"""Access settings that `tessera serve` and `tessera route` share."""

from pydantic import ByteSize, Field
from pydantic_settings import BaseSettings


class AccessSettings(BaseSettings):
    """Access."""

    tenants: str | None = Field(None, description="file of tenants and hashes of their API keys, made by tessera key")
    allow_anonymous: bool = Field(False, description="listen beyond this machine without API keys")
    allowed_host: str | None = Field(None, description="further names of a server without keys, with commas; *: any")
    max_body_size: ByteSize = Field(ByteSize(64 << 20), gt=0, description="largest request, uploaded files included")

    def names(self) -> list[str]:
        """The names of ``allowed_host``."""
        return [name for name in (self.allowed_host or "").replace(" ", "").split(",") if name]
