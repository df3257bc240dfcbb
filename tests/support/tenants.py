# SPDX-License-Identifier: Apache-2.0
"""Tenants and their keys."""

from pathlib import Path

from app.access.tenants import hash_of

LIMITED = [f"limited-{number}" for number in range(11)]
"""Each for one test, since what one has used up stays so."""
KEYS = {name: f"{name}-key" for name in ("acme", "beta", "tiny", "two", "three", "root", *LIMITED)}
_MAY = {
    **dict.fromkeys(("acme", "beta"), 'roles = ["chat", "ingest"]\nnamespaces = ["public"]'),
    **dict.fromkeys(LIMITED, 'roles = ["chat", "ingest"]\ntokens_per_minute = 100'),
    "two": "concurrent_requests = 2",
    "three": "requests_per_minute = 3",
    "tiny": 'roles = ["chat", "ingest"]\ncache_segments = 3',
    "root": 'roles = ["chat", "ingest", "admin"]',
}


def tenants_file(folder: Path) -> str:
    """Writes the file of all of them; returns its path."""
    path = folder / "tenants.toml"
    path.write_text("".join(f'[{name}]\nkeys = ["{hash_of(KEYS[name])}"]\n{_MAY[name]}\n' for name in KEYS))
    return str(path)


def key_of(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {KEYS[name]}"}
