# SPDX-License-Identifier: Apache-2.0
"""Retrievers find passages by words, in scripts with and without spaces."""

import pytest

from app.collections.retrieval import make_retriever
from app.collections.retrievers import Bm25, UnknownRetrieverError
from app.settings import Settings
from tests.app.collections.helpers import corpus_of, files_found, recall

TEXTS = {
    "falcon": "The access code of Falcon is 7342.",
    "heron": "Heron lives near the lake, in the reeds.",
    "owl": "The barn owl hunts at night.",
    "zh": "猫头鹰在夜间捕猎。",
    "sea": "Пингвин живёт у моря.",
    "it": "IT helps with laptops. Call IT at extension 4100.",
    "pump": "Set PUMP_MAX_PRESSURE to 5 before the start of E-1042/b.",
}


@pytest.fixture(scope="module")
def corpus():
    return corpus_of(TEXTS)


@pytest.mark.parametrize(
    ("query", "file"),
    [
        ("What is the access code of Falcon?", "falcon"),
        ("who lives in the REEDS", "heron"),
        ("7342", "falcon"),
        *(("什么鸟在夜间捕猎？", "zh"), ("Где живёт пингвин?", "sea"), ("Где живет пингвин?", "sea")),
        *(("IT", "it"), ("Who is in IT?", "it"), ("PUMP_MAX_PRESSURE", "pump"), ("e-1042/b", "pump")),
    ],
)
async def test_the_passage_with_the_words_is_first(corpus, query, file):
    best, *others = await make_retriever(Settings()).rank(query, corpus, 3)
    assert corpus.passages[best.place].file == file
    assert all(0 < other.score <= best.score for other in others)


async def test_nothing_is_found_without_a_common_word(corpus):
    for query in ("?!", "unheard", "", "\ud800", "the unheard of"):
        assert list(await Bm25().rank(query, corpus, 3)) == []
    for texts in ({}, {"scan": "…"}, {"scan": "…", "rule": "* * *"}):
        assert list(await Bm25().rank("owl", corpus_of(texts), 3)) == []
    assert await files_found(Bm25(), "owl", corpus_of({"scan": "…", **TEXTS}), 1) == ["owl"]


@pytest.mark.parametrize(
    ("retriever", "words"),
    [
        ("psychic", r"no retriever 'psychic'; there are .*bm25"),
        ("host/v1", "no retriever 'host/v1'"),
        ("file:///nowhere", "/nowhere has no model of embeddings"),
        *((url, "--retriever takes http") for url in ("ftp://host/v1", "http:///v1", "http://host/v1?modle=m")),
    ],
)
def test_what_is_no_retriever_is_told_at_the_start(retriever, words):
    with pytest.raises(UnknownRetrieverError, match=words):
        make_retriever(Settings(retriever=retriever))


@pytest.mark.parametrize(
    ("query", "files"), [("is it", ["it", "rain"]), ("Who is in IT?", ["it"]), ("IT is", ["it", "rain"])]
)
async def test_stop_words_count_where_there_are_no_others(query, files):
    corpus = corpus_of({"rain": "Is it in the rain?", "it": "IT is on call."})
    found = await files_found(Bm25(), query, corpus, 2)
    assert sorted(found) == files
    assert found[0] == "it" or "IT" not in query


async def test_words_find_most_answers_in_five_languages():
    assert await recall(Bm25()) >= 0.95
