# SPDX-License-Identifier: Apache-2.0
"""Asks a router about one document twice; fails unless both answers are right and the second one reuses the document.

python3 scripts/ask_router.py http://127.0.0.1:8080
"""

import json
import sys
from typing import Any
from urllib.request import ProxyHandler, Request, build_opener

CODE = "7342"
ASKED = {
    "chunks": [f"The access code of Falcon is {CODE}."],
    "question": "What is the access code of Falcon?",
    "max_tokens": 24,
    "temperature": 0,
}
HEADERS = {"content-type": "application/json"}
REPLICAS = 2


def call(url: str, body: dict[str, Any] | None = None) -> tuple[dict[str, Any], str]:
    """The answer to a GET, or to a POST of ``body``, and the replica that gave it."""
    request = Request(url, json.dumps(body).encode() if body else None, HEADERS)
    with build_opener(ProxyHandler({})).open(request, timeout=120) as response:
        return json.load(response), response.headers.get("x-tessera-replica", "")


def main(router: str) -> int:
    """Returns 0, or 1 with a message."""
    names = [replica["name"] for replica in call(f"{router}/v1/cluster")[0]["replicas"]]
    print(f"replicas at {router}: {', '.join(names)}")
    print(ASKED["question"])
    for _ in range(2):
        answer, replica = call(f"{router}/v1/rag/chat", ASKED)
        text = answer["choices"][0]["message"]["content"]
        cache = answer["cache"]
        statuses = [chunk["status"] for chunk in cache["chunks"]]
        print(
            f"  {text.strip()}  ({replica}; chunks: {', '.join(statuses)}; {cache['tokens']['reused']} tokens reused)"
        )
        if CODE not in text:
            sys.exit(f"the right answer is {CODE}")
    if statuses != ["hit"]:
        sys.exit("the second request did not reuse the document")
    if len(names) != REPLICAS:
        sys.exit(f"the router knows {len(names)} replicas, not {REPLICAS}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
