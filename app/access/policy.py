# SPDX-License-Identifier: Apache-2.0
"""The role that each endpoint needs: administrator, unless listed here."""

from typing import Literal

from app.access.tenants import Role

_OPEN = frozenset({"/", "/health", "/ping", "/ready", "/readyz"})
_OPEN_BELOW = "/web/"
"""The page's files."""
_PEERS_BELOW = "/peer/"
_CHAT = frozenset(
    {
        "/v1/models",
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/rag/chat",
        "/v1/rag/plan",
        "/tokenize",
        "/detokenize",
    }
)
_INGEST = ("/v1/rag/chunks", "/v1/rag/split")
_COLLECTIONS = "/v1/rag/collections"
"""Read by those who ask, changed by those who bring documents."""


def required_role(method: str, path: str) -> Role | Literal["peer"] | None:
    """The role that a request needs; ``None`` if it needs no key. ``path`` is relative to ``--root-path``.

    ``peer``: it needs the signature of another replica, and no key.
    """
    if path in _OPEN or path.startswith(_OPEN_BELOW):
        return None
    if path.startswith(_PEERS_BELOW):
        return "peer"
    if path in _CHAT:
        return "chat"
    if path in _INGEST or path.startswith(f"{_INGEST[0]}/"):
        return "ingest"
    if path == _COLLECTIONS or path.startswith(f"{_COLLECTIONS}/"):
        return "chat" if method in ("GET", "HEAD") else "ingest"
    return "admin"
