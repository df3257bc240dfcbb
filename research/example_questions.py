# SPDX-License-Identifier: Apache-2.0
"""Print the web page's example questions as a question file of `tessera eval`, in several orders of its documents.

Each is asked behind all documents, whose order full attention sees.

    python research/example_questions.py > questions.jsonl
    tessera eval adapted --questions questions.jsonl --modes full,parallel -- --chunk-cache-placement in-place
"""

import json
import random
from pathlib import Path
from typing import Final

ORDERS: Final = 20
_EXAMPLE: Final = Path(__file__).parents[1] / "web" / "static" / "example.json"
_ANSWERS: Final = ("320", "1987", "veterinarian", "11", "6")
"""The right answers of its questions, in order."""


def main() -> None:
    example = json.loads(_EXAMPLE.read_text())
    rng = random.Random("orders")
    for order in range(ORDERS):
        chunks = rng.sample(example["documents"], len(example["documents"]))
        for number, (question, answer) in enumerate(zip(example["questions"], _ANSWERS, strict=True)):
            line = {"id": f"{order}-{number}", "system": example["system"], "chunks": chunks}
            print(json.dumps({**line, "question": question, "answers": [answer]}))


if __name__ == "__main__":
    main()
