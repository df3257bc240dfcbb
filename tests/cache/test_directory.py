# SPDX-License-Identifier: Apache-2.0
"""A tier's directory with foreign files."""

import os
import shutil
import stat
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.tiers import locked_file as locked_file_module
from cache.tiers.directory import DirectoryTier
from cache.tiers.locked_file import locked_file
from cache.tiers.tier import TierConfigError, TierError
from tests.fuzzing import ends
from tests.support.tier_files import MOST, address, held

KINDS = ("folder", "pipe", "link", "broken link")


def test_what_others_have_in_the_directory_is_neither_counted_nor_deleted(tmp_path):
    theirs = [
        tmp_path / "model" / "model.safetensors",
        tmp_path / "model" / "download.tmp",
        tmp_path / "00" / f"{1:032x}.00-of-01.safetensors",  # no tier writes this
        tmp_path / "11" / f"{1:032x}.0-of-1.safetensors",  # nor this
        tmp_path / "ab" / "other.safetensors",
        tmp_path / "notes.txt",
    ]
    for path in theirs:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes(6000))
    tier = DirectoryTier(tmp_path, MOST)
    for number in range(8):
        tier.put(address(number), bytes(3000))
    assert len(held(tier)) == 3
    tier.shrink(0)
    tier.empty_quarantine()
    DirectoryTier(tmp_path, MOST)
    assert held(tier) == {}
    assert all(path.read_bytes() == bytes(6000) for path in theirs)


@pytest.mark.parametrize(("length", "found"), [(0, 0), (1 << 40, 1000)])
def test_a_file_that_lost_its_contents_is_read_and_a_sparse_one_takes_no_memory(tmp_path, length, found):
    tier = DirectoryTier(tmp_path, 1 << 50)
    tier.put(address(1), b"")
    os.truncate(tier.path(address(1)), length)
    assert len(tier.get(address(1), 1000)) == found


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_file_is_in_nobodys_way(tmp_path, kind):
    tier = DirectoryTier(tmp_path, MOST)
    path = tier.path(address(1))
    path.parent.mkdir()
    (tmp_path / "else").write_bytes(b"secret")
    for place in (path, path.with_suffix(".1-2.tmp"), tmp_path / "quarantine" / path.name):
        place.parent.mkdir(exist_ok=True)
        make(place, kind, tmp_path / "else")
    with ends():
        tier = DirectoryTier(tmp_path, MOST)
        with pytest.raises((TierError, OSError)):
            tier.get(address(1), MOST)
        assert held(tier) == {}
        for number in range(2, 9):
            tier.put(address(number), bytes(3000))
        tier.empty_quarantine()
        tier.delete([address(1)])
    assert path.is_symlink() or path.exists()
    assert (tmp_path / "else").read_bytes() == b"secret"


@pytest.mark.parametrize("kind", [*KINDS, "hard link"])
def test_a_lock_that_is_a_link_is_not_written_to(tmp_path, kind):
    target, root = tmp_path / "else", tmp_path / "tier"
    target.write_bytes(b"secret")
    root.mkdir()
    if kind == "hard link":
        (root / "lock").hardlink_to(target)
    else:
        make(root / "lock", kind, target)
    with ends(), pytest.raises(TierConfigError):
        DirectoryTier(root, MOST)
    assert target.read_bytes() == b"secret"


def test_a_lock_that_others_hold_is_told_and_waited_for_not_for_ever(tmp_path, monkeypatch, caplog):
    DirectoryTier(tmp_path, MOST)
    monkeypatch.setattr(locked_file_module, "TOLD_AFTER_S", 0.01)
    monkeypatch.setattr(locked_file_module, "LONGEST_WAIT_S", 0.2)
    with locked_file(tmp_path / "lock"), pytest.raises(TierConfigError, match="another process has locked"):
        DirectoryTier(tmp_path, MOST)
    assert f"waiting for {tmp_path}/lock, which another process has locked" in caplog.text
    DirectoryTier(tmp_path, MOST)


@pytest.mark.parametrize(
    ("of_folder", "of_files"), [(None, 0o600), (0o700, 0o600), (0o755, 0o600), (0o775, 0o660), (0o2770, 0o660)]
)
def test_files_are_read_by_their_owner_or_its_group(tmp_path, of_folder, of_files):
    """They have texts; and who may open the lock may hold it. A new folder is its owner's."""
    root = tmp_path / "tier"
    if of_folder is not None:
        root.mkdir()
        root.chmod(of_folder)
        (root / "lock").touch(0o666)
    tier = DirectoryTier(root, MOST)
    tier.put(address(1), b"KV")
    assert {stat.S_IMODE(path.stat().st_mode) for path in (root / "lock", tier.path(address(1)))} == {of_files}
    assert stat.S_IMODE(root.stat().st_mode) == (of_folder or 0o700)


def test_a_folder_that_is_a_link_is_not_followed(tmp_path):
    elsewhere, root = tmp_path / "else", tmp_path / "tier"
    other = DirectoryTier(elsewhere, MOST)
    other.put(address(1), b"KV")
    tier = DirectoryTier(root, MOST)
    folder = tier.path(address(1)).parent
    folder.symlink_to(other.path(address(1)).parent)
    assert held(tier) == {}
    for call in (
        lambda: tier.put(address(2), b"KV"),
        lambda: tier.get(address(1), MOST),
        lambda: tier.open(address(1)),
        lambda: tier.stat(address(1)),
        lambda: tier.delete([address(1)]),
        lambda: tier.quarantine(address(1)),
    ):
        with pytest.raises(TierError, match="is a link"):
            call()
    tier.shrink(0)
    assert list(held(other)) == [address(1)]


def test_a_quarantine_that_is_a_link_gets_and_loses_nothing(tmp_path):
    elsewhere, tier = tmp_path / "else", DirectoryTier(tmp_path / "tier", MOST)
    tier.put(address(1), b"KV")
    elsewhere.mkdir()
    theirs = elsewhere / tier.path(address(2)).name
    theirs.write_bytes(b"theirs")
    (tier.root / "quarantine").symlink_to(elsewhere)
    with pytest.raises(TierError, match="is a link"):
        tier.quarantine(address(1))
    tier.empty_quarantine()
    assert list(held(tier)) == [address(1)]
    assert list(elsewhere.iterdir()) == [theirs]


def test_the_time_of_a_file_that_has_other_names_stays(tmp_path):
    tier, theirs = DirectoryTier(tmp_path / "tier", MOST), tmp_path / "theirs"
    theirs.write_bytes(b"KV")
    os.utime(theirs, (1, 1))
    path = tier.path(address(1))
    path.parent.mkdir()
    path.hardlink_to(theirs)
    assert bytes(tier.get(address(1), MOST)) == b"KV"
    assert theirs.stat().st_mtime == 1


def make(path, kind, target):
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(target if kind == "link" else target / "nowhere")


fragments = st.one_of(
    st.sampled_from([f"{n:032x}.0-of-1.safetensors" for n in range(3)]),
    st.sampled_from([".tmp", ".safetensors", "ab.0-of-1.safetensors", "a.٣-of-٣.safetensors", "x" * 250, "\udcff"]),
    st.text(st.characters(codec="utf-8", exclude_characters="/\0"), min_size=1, max_size=20),
).filter(lambda name: name not in (".", "..", "lock"))
kinds = st.sampled_from(["file", "file", "sparse", *KINDS])
folders = st.sampled_from(["00", "ab", "quarantine", ""]) | fragments
garbage = st.lists(st.tuples(folders, fragments, kinds), max_size=6)
verbs = st.sampled_from(["put", "get", "delete", "quarantine", "list", "shrink", "empty_quarantine", "open"])
calls = st.lists(st.tuples(verbs, st.integers(0, 3)), max_size=12)


@given(garbage, st.binary(max_size=40), calls)
def test_whatever_lies_in_the_directory_it_is_refused_or_passed_over(tmp_path_factory, litter, lock, calls):
    root = tmp_path_factory.mktemp("tier")
    (root / "lock").write_bytes(lock)
    for folder, name, kind in litter:
        path = root / folder / name
        with suppress(OSError):  # two files of one name
            path.parent.mkdir(exist_ok=True)
            make(path, kind, root / "lock") if kind in KINDS else path.write_bytes(b"x" * 100)
            if kind == "sparse":
                os.truncate(path, 1 << 40)
    with ends():
        try:
            tier = DirectoryTier(root, MOST)
        except TierConfigError:
            return
        for verb, number in calls:
            given = {"put": [address(number), b"good" * 500], "get": [address(number), MOST]}
            given |= {"delete": [[address(number)]], "shrink": [1000 * number], "list": [], "empty_quarantine": []}
            with suppress(TierError, OSError):
                if verb == "open":
                    tier = DirectoryTier(root, MOST)
                    continue
                got = getattr(tier, verb)(*given.get(verb, [address(number)]))
                if verb == "get" and got is not None:
                    assert len(got) <= MOST
                    assert set(bytes(got)) <= set(b"goodx\0")
                if verb == "list":
                    assert all(tier.path(each.address).is_file() for each in got)
    shutil.rmtree(root)
