# SPDX-License-Identifier: Apache-2.0
"""Servers with chunks in place."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from tests.engine.server import TesseraServer

BLOCK = 32
LOADED, HITS = "tessera_load_tokens_total", "vllm:prefix_cache_hits_total"
IN_PLACE = ("--chunk-cache-placement", "in-place", "--block-size", str(BLOCK))
DRAFTS = (
    "--speculative-config",
    '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}',
)


@contextmanager
def most(server: TesseraServer, *metrics: str) -> Iterator[dict[str, float]]:
    """Yields the highest values of metrics seen during the block."""
    seen, stopping = dict.fromkeys(metrics, 0.0), threading.Event()

    def look() -> None:
        while not stopping.wait(0.01):
            for name in metrics:
                seen[name] = max(seen[name], server.metric(name))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield seen
    finally:
        stopping.set()
        thread.join()
