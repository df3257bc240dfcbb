# SPDX-License-Identifier: Apache-2.0
"""Collections of short texts."""

import json
from collections.abc import Mapping
from pathlib import Path

from app.collections.passages import FileRecord, Passage
from app.collections.retrievers import Retriever
from app.collections.store import About, Corpus, Vectors

QUESTIONS = json.loads((Path(__file__).parent / "questions.json").read_text(encoding="utf-8"))
TOP_K = 4


def record_of(file: str, text: str) -> FileRecord:
    """A file of one passage."""
    return FileRecord(
        file, file, len(text), 99, (Passage(f"c/{file}#1", file, 1, None, text, len(text), 0, len(text), None),)
    )


def corpus_of(texts: Mapping[str, str], vectors: Vectors | None = None) -> Corpus:
    """A collection of files with one passage each."""
    files = {file: record_of(file, text) for file, text in texts.items()}
    return Corpus(About("c", "default", "", 99, 0.0), files, vectors)


async def files_found(retriever: Retriever, query: str, corpus: Corpus, top_k: int) -> list[str]:
    """The files of the passages found, the best first."""
    return [corpus.passages[place].file for place, _ in await retriever.rank(query, corpus, top_k)]


async def recall(retriever: Retriever) -> float:
    """Of the questions in five languages; documents of all are in one collection."""
    texts, asked = dict[str, str](), list[tuple[str, str]]()
    for language, each in QUESTIONS.items():
        texts |= {f"{language}-{number:02d}": text for number, text in enumerate(each["passages"])}
        asked += [(question, f"{language}-{number:02d}") for question, number in each["questions"]]
    assert len(asked) == 60
    corpus = corpus_of(texts)
    found = [file in await files_found(retriever, question, corpus, TOP_K) for question, file in asked]
    return sum(found) / len(found)
