# SPDX-License-Identifier: Apache-2.0
"""The example of the page and `tessera demo`: documents, questions, orders of documents.

A model may have an example of its own in its folder.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

STATIC: Final = Path(__file__).parent / "static"
_OWN: Final = "tessera_example.json"


def example_file(model: str) -> Path:
    """The file with the example for a model, given by folder or name."""
    own = Path(model) / _OWN
    return own if own.is_file() else STATIC / "example.json"


@dataclass(frozen=True, slots=True)
class Example:
    """``orders`` has the document indices of each question, in the order of its prompt."""

    system: str
    documents: tuple[str, ...]
    questions: tuple[str, ...]
    orders: tuple[tuple[int, ...], ...]

    @classmethod
    def read(cls, path: Path) -> Self:
        """Reads an example."""
        fields = json.loads(path.read_bytes())
        orders = tuple(tuple(order) for order in fields["orders"])
        return cls(fields["system"], tuple(fields["documents"]), tuple(fields["questions"]), orders)
