# SPDX-License-Identifier: Apache-2.0
"""Collections keep their files whole, also when the disk is full."""

import sqlite3
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path

import pytest

from app.collections.passages import FileRecord, dropped_ids, passages_of
from app.collections.store import (
    About,
    CollectionConflictError,
    CollectionQuotaError,
    Collections,
    CollectionStorageError,
    DamagedCollectionError,
    UnknownCollectionError,
    digest_of,
)
from app.documents.document import Document
from app.documents.readers import Text
from app.documents.splitting import Piece, split

ROOT = Path(__file__).parents[3]


def count(document: Document) -> int:
    return len(document.render())


def record(file: str, text: str, max_tokens: int = 60) -> FileRecord:
    passages = passages_of(split(Text(text, is_markdown=file.endswith(".md")), max_tokens, count), file, "birds")
    return FileRecord(file, "digest", len(text), max_tokens, passages)


def begun(collections: Collections, namespace: str = "default", name: str = "birds") -> About:
    return collections.begin(namespace, name, "You know birds.", None, 60)


def test_another_process_finds_what_was_stored(collections):
    about, stored = begun(collections), record("owls.md", f"# Owls\n\n{'They hunt at night. ' * 30}")
    collections.put(about, stored)
    corpus = Collections(collections.root).corpus("default", "birds")
    assert (corpus.about, corpus.files) == (about, {"owls.md": stored})
    assert {passage.title for passage in corpus.passages} == {"Owls"}
    assert len(corpus.passages) > 1
    assert collections.summaries("default") == [corpus.summary()]


def test_a_question_after_a_change_reads_the_files_that_changed(collections):
    about = begun(collections)
    for name in "ab":
        collections.put(about, record(name, f"{name}."))
    before = collections.corpus("default", "birds")
    assert collections.corpus("default", "birds") is before
    for name in "bd":
        collections.put(about, record(name, f"New {name}."))
    after = collections.corpus("default", "birds")
    assert after.files["a"] is before.files["a"]
    assert [passage.text for passage in after.passages] == ["a.", "New b.", "New d."]


def test_collections_of_a_namespace_never_have_more_bytes_than_they_may(collections):
    """Of many collections, in many threads; what is refused leaves nothing behind."""
    most, text = 1 << 20, "word " * 1000

    def is_stored(name, file):
        with suppress(CollectionQuotaError):
            collections.put(begun(collections, name=name), record(file, text), most)
            return True

    with ThreadPoolExecutor(8) as threads:
        stored = [*threads.map(lambda number: is_stored(f"c{number % 7}", f"{number}.txt"), range(40))].count(True)
    assert 5 < stored < 40
    assert sum(each["files"] for each in collections.summaries("default")) == stored
    for number in range(200):  # refused ones make no databases
        is_stored("c3", f"{number}.txt")
        is_stored(f"new{number}", "a.txt")
    assert sum(path.stat().st_size for path in collections.root.rglob("*") if path.is_file()) <= most
    collections.put(begun(collections, "other"), record("a.txt", text), most)  # another namespace
    collections.put(begun(collections, name="c0"), record("b.txt", text))  # nobody's quota


def test_who_has_too_much_may_still_have_less(collections):
    about = begun(collections)
    for name in "ab":
        collections.put(about, record(f"{name}.txt", "word " * 1000))
    with pytest.raises(CollectionQuotaError, match="may have 1000 bytes"):
        collections.put(about, record("c.txt", "word " * 1000), 1000)
    with pytest.raises(CollectionQuotaError):
        collections.put(about, record("b.txt", "word " * 2000), 1000)
    collections.put(about, record("b.txt", "word"), 1000)
    collections.delete("default", "birds", "a.txt")
    assert [passage.text for passage in collections.corpus("default", "birds").passages] == ["word"]


def test_system_prompt_and_lengths_stay(collections):
    about = collections.begin("default", "birds", "You know birds.", None, 60, 256)
    collections.put(about, record("owls.txt", "Owls."))
    assert collections.begin("default", "birds", None, None, 99) == about
    for given, message in (
        (("Other.", None, 60), "another system prompt"),
        ((None, 61, 60), "60 tokens at most"),
        ((None, None, 60, 0), "256 tokens of context"),
    ):
        with pytest.raises(CollectionConflictError, match=message):
            collections.begin("default", "birds", *given)


def test_deleted_files_and_collections_are_gone(collections):
    about = begun(collections)
    for file in ("a.txt", "b.txt"):
        collections.put(about, record(file, f"Text of {file}."))
    ids = [passage.id for passage in collections.corpus("default", "birds").file("a.txt").passages]
    assert collections.delete("default", "birds", "a.txt") == (about, ids)
    corpus = collections.corpus("default", "birds")
    assert list(corpus.files) == ["b.txt"]
    for call in (lambda: corpus.file("a.txt"), lambda: collections.delete("default", "birds", "a.txt")):
        with pytest.raises(UnknownCollectionError, match=r"no file 'a\.txt'"):
            call()
    collections.delete("default", "birds")
    assert collections.summaries("default") == []
    with pytest.raises(UnknownCollectionError, match="no collection 'birds'"):
        collections.delete("default", "birds")
    assert b"Text of" not in b"".join(path.read_bytes() for path in collections.root.rglob("*") if path.is_file())


def test_a_file_of_a_collection_deleted_meanwhile_is_refused(collections, monkeypatch):
    """Also of one that was begun again, even if the clock was set back."""
    about = begun(collections)
    collections.put(about, record("a.txt", "A."))
    collections.delete("default", "birds")
    with pytest.raises(CollectionConflictError, match="deleted meanwhile: send its files again"):
        collections.put(about, record("b.txt", "B."))
    assert collections.summaries("default") == []
    monkeypatch.setattr("time.time", lambda: about.created_at - 3600)
    collections.put(begun(collections), record("b.txt", "B."))
    with pytest.raises(CollectionConflictError, match="deleted meanwhile"):
        collections.put(about, record("c.txt", "C."))
    assert list(collections.corpus("default", "birds").files) == ["b.txt"]


def test_two_calls_that_begin_a_collection_differently_do_not_mix(collections):
    one, two = begun(collections), collections.begin("default", "birds", "Another.", None, 60)
    collections.put(one, record("a.txt", "A."))
    with pytest.raises(CollectionConflictError, match="another system prompt"):
        collections.put(two, record("b.txt", "B."))


@pytest.mark.parametrize("name", ["", ".", "..", "../birds", "a/b", "a\x00", "a\n", "x" * 65, "ä", "-a"])
def test_other_names_than_a_collections_touch_nothing(collections, name):
    for call, *given in ((collections.begin, None, None, 60), (collections.corpus,), (collections.delete,)):
        with pytest.raises(UnknownCollectionError, match="no collection can be called"):
            call("default", name, *given)
    assert not collections.root.exists()


def test_vectors_stay_as_long_as_their_text_does(collections):
    about = begun(collections)
    stored = [record("a.txt", "Same."), record("b.txt", "Same."), record("c.txt", "Other.")]
    for each in stored:
        collections.put(about, each)
    vectors = collections.vectors(about)
    same, _, other = (digest_of(each.passages[0]) for each in stored)
    vectors.save("m", {same: b"1", other: b"2", "of no passage": b"3"})
    vectors.save("n", {same: b"4"})
    assert (vectors.load("m"), vectors.load("n")) == ({same: b"1", other: b"2"}, {same: b"4"})
    assert vectors.missing("n", [same, other]) == {other}
    collections.delete("default", "birds", "a.txt")
    collections.put(about, record("c.txt", "Changed."))
    assert (vectors.load("m"), vectors.load("n")) == ({same: b"1"}, {same: b"4"})  # b.txt has the text too
    collections.delete("default", "birds")
    assert vectors.load("m") == {}


def spoil(path: Path, how: str) -> None:
    data = path.read_bytes()
    if how == "json":
        with closing(sqlite3.connect(path)) as database, database:
            database.execute("UPDATE files SET fields = '{}'")
    else:
        path.write_bytes({"other": b"x" * 9000, "empty": b"", "zeroes": data[:4096] + bytes(len(data) - 4096)}[how])


@pytest.mark.parametrize("how", ["other", "empty", "zeroes", "json"])
def test_a_damaged_database_is_set_aside_and_can_be_replaced(collections, how):
    collections.put(begun(collections), record("owls.txt", "Owls."))
    for other in ("fish", "sound"):
        collections.put(begun(collections, name=other), record("owls.txt", "Owls."))
    for name, damage in (("birds", how), ("fish", "other")):
        (path,) = collections.root.rglob(f"{name}.sqlite3")
        spoil(path, damage)
    words = r"'birds' is damaged.*set aside as .*damaged-.*ingest again"
    with pytest.raises(DamagedCollectionError, match=words) as said:
        Collections(collections.root).corpus("default", "birds")
    assert str(collections.root) not in str(said.value)  # where a server keeps its files is none of a tenant's business
    with pytest.raises(UnknownCollectionError, match="no collection 'birds'; its damaged database was set aside as"):
        collections.corpus("default", "birds")
    assert [each["name"] for each in collections.summaries("default")] == ["sound"]
    collections.put(begun(collections), record("emu.txt", "Emu."))
    assert list(collections.corpus("default", "birds").files) == ["emu.txt"]


def test_a_database_of_another_version_is_left_alone(collections):
    about = begun(collections)
    collections.put(about, record("a.txt", "A."))
    (path,) = collections.root.rglob("birds.sqlite3")
    with closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA user_version = 99")
    with pytest.raises(CollectionStorageError, match="another version of Tessera"):
        collections.put(about, record("b.txt", "B."))
    assert path.exists()


def test_a_full_disk_loses_nothing(tmp_path):
    folder = tmp_path / "small"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(folder)], check=False).returncode:
        pytest.skip("may not mount a file system")
    try:
        collections = Collections(folder)
        about, before = begun(collections), record("owls.txt", "Owls.")
        collections.put(about, before)
        with pytest.raises(CollectionStorageError, match=r"(disk|space)"):
            collections.put(about, record("owls.txt", "word " * 200_000, max_tokens=10_000_000))
        assert Collections(folder).corpus("default", "birds").files == {"owls.txt": before}
        with pytest.raises(CollectionStorageError, match=r"(disk|space)"):
            [collections.put(begun(collections, name=f"c{number}"), before) for number in range(99)]
        assert not list(folder.rglob(".new-*"))
    finally:
        subprocess.run(["umount", str(folder)], check=True)


# Stores files until it is killed: of each number one file that says so, and one that is replaced every time.
_WRITER = """
import sys
from itertools import count
from pathlib import Path
from tests.app.collections.test_store import Collections, begun, record
collections, own = Collections(Path(sys.argv[1])), sys.argv[2]
about = begun(collections)
for number in count(int(sys.argv[3])):
    collections.put(about, record(f"{own}-{number}.txt", f"Passage {number} of {own}. " * 9))
    collections.put(about, record("shared.txt", f"Passage {number} of {own}. " * 9))
    print(number, flush=True)
"""


class Writer:
    """A replica in a process of its own, by what it has told to have stored."""

    def __init__(self, root: Path, own: str) -> None:
        self._root, self.own, self.stored = root, own, 0

    def start(self) -> None:
        command = [sys.executable, "-c", _WRITER, str(self._root), self.own, str(self.stored)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)

    def store(self, files: int) -> None:
        for _ in range(files):
            self.stored = int(self.process.stdout.readline()) + 1

    def kill(self) -> None:
        self.process.kill()
        for told in self.process.communicate()[0].split():
            self.stored = int(told) + 1


def test_two_replicas_on_one_folder_are_killed_and_lose_nothing(collections):
    """Both write and are killed again and again, while this process reads."""
    writers = [Writer(collections.root, own) for own in ("one", "two")]

    def begins(passages):
        return {passage.text.split(".")[0] for passage in passages}

    for round in range(2):
        for writer in writers:
            writer.start()
        for writer in writers:
            writer.store(3 + round)
            files = collections.corpus("default", "birds").files
            assert {f"{each.own}-{number}.txt" for each in writers for number in range(each.stored)} <= files.keys()
            possible = {f"Passage {number} of {each.own}" for each in writers for number in range(999)}
            assert begins(files["shared.txt"].passages) <= possible
        for writer in writers:
            writer.kill()
    corpus = Collections(collections.root).corpus("default", "birds")
    for writer in writers:
        for number in range(writer.stored):
            text = " ".join(passage.text for passage in corpus.file(f"{writer.own}-{number}.txt").passages)
            assert text == (f"Passage {number} of {writer.own}. " * 9).strip()
    assert len(begins(corpus.file("shared.txt").passages)) == 1
    (path,) = collections.root.rglob("birds.sqlite3")
    with closing(sqlite3.connect(path)) as database:
        assert database.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert database.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_only_passages_that_differ_are_dropped():
    before, after = (
        record("owls.txt", f"Owls hunt at night, and sleep by day in barns.\n\nThe barn owl has a {color} face.")
        for color in ("white", "pale")
    )
    first, second = (passage.id for passage in before.passages)
    assert dropped_ids(before, after) == [second]
    assert first in {passage.id for passage in after.passages}
    assert dropped_ids(before, None) == [first, second]


def test_passages_are_computed_behind_those_before_them():
    """Contexts grow until they are full, then start anew with their last half."""
    pieces = [Piece(f"Title {i}", f"Text {i}.", 10, 0, 7, None) for i in range(9)]
    passages = passages_of(pieces, "a.txt", "birds", 40)
    assert [each.context for each in passages] == [0, 1, 2, 3, 4, 2, 3, 4, 2]
    record = FileRecord("a.txt", "digest", 9, 60, passages)
    assert record.context_of(passages[5]) == "Title 3\nText 3.\n\nTitle 4\nText 4.\n\n"
    assert record.context_of(passages[0]) == ""
    alone = passages_of(pieces, "a.txt", "birds")
    assert {each.context for each in alone} == {0}
    assert alone[0].id == passages[0].id
    assert alone[1].id != passages[1].id, "an id stands for a text behind its context"
