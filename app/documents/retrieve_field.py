# SPDX-License-Identifier: Apache-2.0
"""The request field ``retrieve``."""

from typing import Final

from pydantic import BaseModel, ConfigDict, Field

COLLECTION_NAME: Final = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"


class RetrieveField(BaseModel):
    """The passages that a question needs, from a collection."""

    model_config = ConfigDict(extra="forbid")

    collection: str = Field(pattern=COLLECTION_NAME, description="name of the collection")
    top_k: int = Field(8, ge=1, le=1000, strict=True, description="passages at most")
    query: str | None = Field(
        None, min_length=1, description="text to search for; default: the last two messages of the user"
    )
