# SPDX-License-Identifier: Apache-2.0
"""Questions in plain English about invented facts, which no model knows by heart. Their kinds:

- ``plain``, and ``refers-back``, where the sentence with the answer names its subject by a pronoun only
- ``two-hop``, about two passages; ``chain``, where the second shares no word with the question
- ``comparison`` of what two passages say, and ``count`` of passages that say something
- ``paraphrased``: the passage has no word of the question
- ``unanswerable``: the passage that would have the answer is not there, or doesn't say

`passages/` has the written ones, a file for each topic; :mod:`.generated` makes the others. Passages that don't matter
to a question stand beside those that do, half of them from the same topic.
"""

import json
import random
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, Final, get_args

from measuring.quality.questions.generated import generated
from measuring.quality.questions.library import Asked, Kind, Library
from measuring.quality.questions.questions import Question

CHUNKS: Final = (2, 4, 8, 16)
MOST_LONG_CHUNKS: Final = 26
"""Of long chunks, there are no more of the written passages."""
_FOLDER: Final = Path(__file__).parent / "passages"


def plain_questions(count: int, *, long: bool = False, numbers: Sequence[int] = CHUNKS) -> list[Question]:
    """Up to ``count`` questions behind each of these ``numbers`` of chunks; always the same ones, all kinds by turns.

    A chunk is a passage, or, if ``long``, six of different topics: some 400 tokens. A question stands behind each
    number of chunks before the next one comes, so that the first results are of all numbers.
    """
    asked = [
        (library, each) for kind in zip_longest(*map(_of_kind, get_args(Kind))) for library, each in filter(None, kind)
    ]
    return [library.ask(each, number, long=long) for library, each in asked[:count] for number in numbers]


def _of_kind(kind: Kind) -> Iterator[tuple[Library, Asked]]:
    """The questions of a kind in random order, of both libraries by turns."""
    rng = random.Random(f"plain english {kind}")
    by_library = []
    for library in (written(), generated()):
        of_kind = [(library, each) for each in library.questions if each.kind == kind]
        by_library.append(rng.sample(of_kind, len(of_kind)))
    return filter(None, chain.from_iterable(zip_longest(*by_library)))


@cache
def written() -> Library:
    """The passages and questions of the folder."""
    records = {path.stem: json.loads(path.read_bytes()) for path in sorted(_FOLDER.glob("*.json"))}
    topics = {topic: tuple(passage["text"] for passage in record["passages"]) for topic, record in records.items()}
    return Library(topics, tuple(chain.from_iterable(_questions(*record) for record in records.items())))


def _questions(topic: str, record: dict[str, Any]) -> Iterator[Asked]:
    texts = {passage["id"]: passage["text"] for passage in record["passages"]}
    for number, asked in enumerate(record["questions"]):
        kind, passages = asked["kind"], tuple(texts[id] for id in asked["passages"])
        name = f"{kind}/{topic}-{number}"
        yield Asked(kind, name, topic, asked["question"], tuple(asked["answers"]), passages)
