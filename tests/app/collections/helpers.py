# SPDX-License-Identifier: Apache-2.0
"""Collections of short texts."""

from collections.abc import Mapping

from app.collections.passages import FileRecord, Passage
from app.collections.retrievers import Retriever
from app.collections.store import About, Corpus, Vectors


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
