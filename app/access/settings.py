# SPDX-License-Identifier: Apache-2.0
"""Access settings that `tessera serve` and `tessera route` share."""

from pydantic import ByteSize, Field
from pydantic_settings import BaseSettings


class AccessSettings(BaseSettings):
    """Access to a server."""

    tenants: str | None = Field(
        None,
        description="file with tenants and the hashes of their API keys (made by tessera key); default: no keys",
    )
    allow_anonymous: bool = Field(
        False, description="listen on addresses beyond this machine without requiring an API key"
    )
    max_body_size: ByteSize = Field(ByteSize(64 << 20), gt=0, description="largest request body, e.g. 16MiB")
    client_timeout: float = Field(
        60.0, gt=0, description="seconds after which a client that neither sends nor reads is disconnected"
    )
