# SPDX-License-Identifier: Apache-2.0
"""The example that the page offers and `tessera demo` shows: documents, questions, and the documents' orders.

It is in plain English. A model that answers from other text only brings an example of its own in its folder.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

STATIC: Final = Path(__file__).parent / "static"
_OWN: Final = "tessera_example.json"


def example_file(model: str) -> Path:
    """The file with the example for a model, a folder or a name."""
    own = Path(model) / _OWN
    return own if own.is_file() else STATIC / "example.json"


@dataclass(frozen=True, slots=True)
class Example:
    """``orders`` has, for each question, the order that its documents stand in, by their indices."""

    system: str
    documents: tuple[str, ...]
    questions: tuple[str, ...]
    orders: tuple[tuple[int, ...], ...]

    @classmethod
    def read(cls, path: Path) -> Self:
        """The example in a file."""
        fields = json.loads(path.read_bytes())
        orders = tuple(tuple(order) for order in fields["orders"])
        return cls(fields["system"], tuple(fields["documents"]), tuple(fields["questions"]), orders)
