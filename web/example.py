# SPDX-License-Identifier: Apache-2.0
"""The example of the web page and `tessera demo`: documents, questions and document orders.

The default is in plain English; a model for other text has its own example in its folder.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

STATIC: Final = Path(__file__).parent / "static"
_OWN: Final = "tessera_example.json"


def example_file(model: str) -> Path:
    """The example file for a model, given as a folder or a name."""
    own = Path(model) / _OWN
    return own if own.is_file() else STATIC / "example.json"


@dataclass(frozen=True, slots=True)
class Example:
    """``orders``: for each question, the indices of its documents in order."""

    system: str
    documents: tuple[str, ...]
    questions: tuple[str, ...]
    orders: tuple[tuple[int, ...], ...]

    @classmethod
    def read(cls, path: Path) -> Self:
        """Reads an example from a file."""
        fields = json.loads(path.read_bytes())
        orders = tuple(tuple(order) for order in fields["orders"])
        return cls(fields["system"], tuple(fields["documents"]), tuple(fields["questions"]), orders)
