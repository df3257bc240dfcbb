# SPDX-License-Identifier: Apache-2.0
"""Collections of a real server."""

import json
from typing import Any

from tests.engine.server import TesseraServer

FALCON = "# Falcon\n\nThe access code of Falcon is 7342.\n\n# Heron\n\nHeron lives near the lake, in the reeds.\n"
OWLS = "Owls hunt at night.\n\nThe barn owl has a white face.\n"


def put(server: TesseraServer, collection: str, files: dict[str, str | bytes], **fields: str) -> tuple[list[Any], Any]:
    """The lines of an ingestion, and its summary."""
    given = [("files", (name, content)) for name, content in files.items()]
    answer = server.client.post(f"/v1/rag/collections/{collection}", files=given, data=fields)
    assert answer.status_code == 200, answer.text
    *lines, last = map(json.loads, answer.text.splitlines())
    return lines, last["summary"]


def ask(server: TesseraServer, collection: str, question: str, top_k: int = 2, **fields: Any) -> dict[str, Any]:
    return server.chat(
        retrieve={"collection": collection, "top_k": top_k},
        question=question,
        max_tokens=8,
        temperature=0,
        ignore_eos=True,
        logprobs=True,
        return_token_ids=True,
        cache={"explain": True},
        **fields,
    )
