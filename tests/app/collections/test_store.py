# SPDX-License-Identifier: Apache-2.0
"""Collections keep their files whole, also when the disk is full."""

import json
import subprocess
from pathlib import Path

import pytest

from app.collections.passages import FileRecord, dropped_ids, split_into_passages
from app.collections.store import (
    About,
    CollectionConflictError,
    Collections,
    CollectionStorageError,
    UnknownCollectionError,
)
from app.documents.document import Document


def count(document: Document) -> int:
    return len(document.render())


def record(file: str, text: str, max_tokens: int = 60) -> FileRecord:
    passages = split_into_passages(text, file, max_tokens, count, collection="birds")
    return FileRecord(file, "digest", len(text), max_tokens, passages)


@pytest.fixture
def collections(tmp_path: Path) -> Collections:
    return Collections(tmp_path / "collections")


def begun(collections: Collections, namespace: str = "default", name: str = "birds") -> About:
    return collections.begin(namespace, name, "You know birds.", None, 60)


def test_another_process_finds_what_was_stored(collections: Collections) -> None:
    about, stored = begun(collections), record("owls.md", "# Owls\n\nThey hunt at night.")
    collections.put(about, stored)
    corpus = Collections(collections.root).corpus("default", "birds")
    assert (corpus.about, corpus.files) == (about, {"owls.md": stored})
    assert [passage.title for passage in corpus.passages] == ["Owls"]


def test_a_corpus_is_the_same_object_until_a_file_changes(collections: Collections) -> None:
    about = begun(collections)
    collections.put(about, record("owls.txt", "Owls."))
    corpus = collections.corpus("default", "birds")
    assert collections.corpus("default", "birds") is corpus
    collections.put(about, record("owls.txt", "Barn owls."))
    changed = collections.corpus("default", "birds")
    assert [passage.text for passage in changed.passages] == ["Barn owls."]


def test_namespaces_have_collections_of_their_own(collections: Collections) -> None:
    collections.put(begun(collections, "a"), record("owls.txt", "Owls."))
    assert [each.about.name for each in collections.all_of("a")] == ["birds"]
    assert collections.all_of("b") == []
    with pytest.raises(UnknownCollectionError, match="no collection 'birds'"):
        collections.corpus("b", "birds")


def test_system_prompt_and_length_stay(collections: Collections) -> None:
    about = begun(collections)
    collections.put(about, record("owls.txt", "Owls."))
    assert collections.begin("default", "birds", None, None, 99) == about
    with pytest.raises(CollectionConflictError, match="another system prompt"):
        collections.begin("default", "birds", "Other.", None, 60)
    with pytest.raises(CollectionConflictError, match="60 tokens at most"):
        collections.begin("default", "birds", None, 61, 60)


def test_deleted_files_and_collections_are_gone(collections: Collections) -> None:
    about = begun(collections)
    for file in ("a.txt", "b.txt"):
        collections.put(about, record(file, f"Text of {file}."))
    collections.delete_file("default", "birds", "a.txt")
    corpus = collections.corpus("default", "birds")
    assert list(corpus.files) == ["b.txt"]
    with pytest.raises(UnknownCollectionError, match=r"no file 'a\.txt'"):
        corpus.file("a.txt")
    collections.delete("default", "birds")
    assert collections.all_of("default") == []


def test_a_full_disk_loses_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "small"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)], check=False).returncode:
        pytest.skip("may not mount a file system")
    try:
        collections = Collections(folder)
        about, before = begun(collections), record("owls.txt", "Owls.")
        collections.put(about, before)
        with pytest.raises(CollectionStorageError, match="No space left"):
            collections.put(about, record("owls.txt", "word " * 40_000))
        assert collections.corpus("default", "birds").files == {"owls.txt": before}
        assert not list(folder.rglob("*.tmp"))
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_records_survive_json() -> None:
    given = record("owls.txt", "Owls.\n\n" + "They hunt at night. " * 5)
    assert FileRecord.of_json(json.loads(json.dumps(given.to_dict()))) == given


def test_pages_are_found_by_form_feeds() -> None:
    text = "First page.\n\n\fSecond page.\n\nIts end.\n\n\f\n\n\fFourth page."
    passages = split_into_passages(text, "a.pdf", 18, count, collection="birds")
    assert [(passage.text, passage.page) for passage in passages] == [
        ("First page.", 1),
        ("Second page.", 2),
        ("Its end.", 2),
        ("Fourth page.", 4),
    ]
    assert {each.page for each in split_into_passages("No pages.", "a.txt", 18, count, collection="birds")} == {None}


def test_only_passages_that_differ_are_dropped() -> None:
    before = record(
        "owls.txt", "Owls hunt at night, and sleep by day in barns.\n\nThe barn owl has a white face, like a heart."
    )
    after = record(
        "owls.txt", "Owls hunt at night, and sleep by day in barns.\n\nThe barn owl has a pale face, like a heart."
    )
    first, second = (passage.id for passage in before.passages)
    assert dropped_ids(before, after) == [second]
    assert first in {passage.id for passage in after.passages}
    assert dropped_ids(before, None) == [first, second]
