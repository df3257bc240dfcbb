# SPDX-License-Identifier: Apache-2.0
"""What `tessera serve` and `tessera route` both have to be told about those who may come in."""

from pydantic import ByteSize, Field
from pydantic_settings import BaseSettings


class AccessSettings(BaseSettings):
    """Settings of the doors of a server."""

    tenants: str | None = Field(
        None,
        description="file with tenants and the hashes of their API keys (tessera key makes them); default: no keys",
    )
    allow_anonymous: bool = Field(
        False, description="listen on addresses beyond this machine although no API key is asked for"
    )
    max_body_size: ByteSize = Field(ByteSize(64 << 20), gt=0, description="largest body of a request, e.g. 16MiB")
    client_timeout: float = Field(
        60.0, gt=0, description="seconds after which a client that neither sends nor reads what is due is cut off"
    )
