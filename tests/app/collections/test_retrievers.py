# SPDX-License-Identifier: Apache-2.0
"""Retrievers find passages by words, in scripts with and without spaces."""

import pytest

from app.collections.passages import FileRecord, split_into_passages
from app.collections.retrievers import Bm25, UnknownRetrieverError, make_retriever
from app.collections.store import About, Corpus

TEXTS = {
    "falcon": "The access code of Falcon is 7342.",
    "heron": "Heron lives near the lake, in the reeds.",
    "owl": "The barn owl hunts at night.",
    "zh": "猫头鹰在夜间捕猎。",
    "sea": "Пингвин живёт у моря.",
}


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    def of(name: str, text: str) -> FileRecord:
        passages = split_into_passages(text, f"{name}.txt", 99, lambda d: len(d.render()), collection="c")
        return FileRecord(f"{name}.txt", name, len(text), 99, passages)

    return Corpus(About("c", "default", "", 99, 0.0), {f"{name}.txt": of(name, text) for name, text in TEXTS.items()})


@pytest.mark.parametrize(
    ("query", "file"),
    [
        ("What is the access code of Falcon?", "falcon.txt"),
        ("who lives in the REEDS", "heron.txt"),
        ("7342", "falcon.txt"),
        ("什么鸟在夜间捕猎？", "zh.txt"),
        ("Где живёт пингвин?", "sea.txt"),
    ],
)
async def test_the_passage_with_the_words_is_first(corpus: Corpus, query: str, file: str) -> None:
    best, *others = await make_retriever("bm25").rank(query, corpus, 3)
    assert corpus.passages[best.place].file == file
    assert all(0 < other.score <= best.score for other in others)


@pytest.mark.parametrize("query", ["the of a", "?!", "unheard"])
async def test_nothing_is_found_without_a_common_word(corpus: Corpus, query: str) -> None:
    assert list(await Bm25().rank(query, corpus, 3)) == []


async def test_an_empty_collection_has_nothing() -> None:
    assert list(await Bm25().rank("owl", Corpus(About("c", "default", "", 99, 0.0), {}), 3)) == []


def test_an_unknown_retriever_is_refused_with_those_there_are() -> None:
    with pytest.raises(UnknownRetrieverError, match=r"no retriever 'psychic'; there are .*bm25"):
        make_retriever("psychic")
