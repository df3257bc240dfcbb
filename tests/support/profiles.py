# SPDX-License-Identifier: Apache-2.0
"""Profiles of models."""

from app.profile import Kind, Profile


def make_profile(**modes: str) -> Profile:
    """``up_to_4="shared"``, and so on."""
    kinds = tuple(
        Kind(min_chunks=2, max_chunks=int(name.removeprefix("up_to_")), mode=mode, is_certain=True, measured=())
        for name, mode in modes.items()
    )
    origin = {"model": "m", "weights": "w", "trained_for": (), "questions": "q.jsonl", "questions_sha256": "ab"}
    return Profile(**origin, tolerance=0.02, tessera="0.1.0", vllm="0.32.0", kinds=kinds)
