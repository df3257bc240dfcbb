# SPDX-License-Identifier: Apache-2.0
"""Lengths in words."""

from app.documents.document import Document


def words(document: Document) -> int:
    """Counts tokens as words of title and text."""
    return len(document.render().split())
