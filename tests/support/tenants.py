# SPDX-License-Identifier: Apache-2.0
"""Tenants and their keys."""

KEYS = {name: f"{name}-key" for name in ("acme", "beta", "small", "tiny", "root")}
TENANTS = """
[acme]
keys = ["{acme}"]
roles = ["chat", "ingest"]
namespaces = ["public"]

[beta]
keys = ["{beta}"]
roles = ["chat", "ingest"]
namespaces = ["public"]

[small]
keys = ["{small}"]
tokens_per_minute = 100

[tiny]
keys = ["{tiny}"]
roles = ["chat", "ingest"]
cache_segments = 3

[root]
keys = ["{root}"]
roles = ["chat", "ingest", "admin"]
"""


def key_of(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {KEYS[name]}"}
