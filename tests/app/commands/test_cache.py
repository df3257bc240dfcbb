# SPDX-License-Identifier: Apache-2.0
"""`tessera cache` on a directory with files of a tier."""

import io
import os
import subprocess
import tarfile
import time

import pytest
import torch

from app.commands.cache import main
from cache.positions.layout import pack
from cache.tiers.directory import DirectoryTier
from cache.tiers.signed import SignedTier, TierKey
from cache.tiers.tier import Address
from engine_ext.wire.chunk_file import ChunkFileLabel, pack_file


def file_of(number):
    label = ChunkFileLabel("f" * 64, f"{number:032x}", "", pack(tuple(range(7))).hex(), 0, 1)
    return Address(label.key, 0, 1), pack_file(label, {"0.key": torch.full((7, 2, 4), float(number))})


@pytest.fixture
def tier(tmp_path):
    made = DirectoryTier(tmp_path / "kv", 1 << 30)
    for number in range(3):
        made.put(*file_of(number))
    return made


def said(capsys):
    captured = capsys.readouterr()
    return captured.out + captured.err


def test_ls_shows_what_is_there_and_what_a_file_says_of_itself_without_the_terminals_markup(tier, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    tier.path(file_of(1)[0]).write_bytes(b"damaged")
    label = ChunkFileLabel("[/bold] [x]", "00" * 16, "", "", 0, 1)
    tier.put(Address("00ff" * 8, 0, 1), pack_file(label, {}))
    assert main(["ls", str(tier.root)]) == 0
    shown = said(capsys)
    assert shown.count("0 of 1") == 4
    for words in (f"{2:032x}", "ffffffffffff", "damaged", "[/bold] [x]", "4 files"):
        assert words in shown


def keyed(tmp_path):
    path = tmp_path / "key"
    path.write_text("a secret of servers")
    return TierKey.read(path), ["--tier-key", str(path)]


def test_with_a_key_only_signed_files_are_whole_and_move(tier, tmp_path, capsys, monkeypatch):
    key, flags = keyed(tmp_path)
    signed = SignedTier(tier, key)
    for number in (7, 8):
        signed.put(*file_of(number))
    address = file_of(9)[0]
    tier.put(address, tier.path(file_of(7)[0]).read_bytes())  # another's, with its right signature
    archive, other = tmp_path / "kv.tar", tmp_path / "other"
    other.mkdir()
    assert main(["export", str(tier.root), str(archive), *flags]) == 1
    assert main(["export", str(tier.root), str(tmp_path / "all.tar")]) == 0
    assert said(capsys).count("left out") == 4
    assert main(["import", str(other), str(archive)]) == 1  # for servers without a key: none of them
    assert "it is signed, for servers with a --tier-key; left out" in said(capsys)
    monkeypatch.setenv("TESSERA_TIER_KEY", flags[1])
    assert main(["import", str(other), str(tmp_path / "all.tar")]) == 1
    taken = DirectoryTier(other, 1 << 30)
    assert {stored.address for stored in taken.list()} == {file_of(number)[0] for number in (7, 8)}
    assert bytes(SignedTier(taken, key).get(file_of(7)[0], 1 << 20)) == file_of(7)[1]
    assert main(["verify", str(other)]) == 0
    assert main(["verify", str(tier.root)]) == 1
    assert {stored.address for stored in tier.list()} == {stored.address for stored in taken.list()}


def test_without_the_key_signed_files_are_left_alone(tier, tmp_path, capsys):
    key, _ = keyed(tmp_path)
    SignedTier(tier, key).put(*file_of(7))
    assert main(["verify", str(tier.root)]) == 1
    assert "1 files are signed" in said(capsys)
    assert len(list(tier.list())) == 4
    assert main(["verify", str(tier.root), "--tier-key", str(tmp_path / "none")]) == 2


def test_verify_puts_damaged_and_misnamed_files_into_quarantine(tier, capsys):
    assert main(["verify", str(tier.root)]) == 0
    path, other = tier.path(file_of(0)[0]), tier.path(file_of(1)[0])
    path.write_bytes(other.read_bytes())
    other.write_bytes(other.read_bytes()[:-1])
    assert main(["verify", str(tier.root)]) == 1
    shown = said(capsys)
    assert f"it has the KV of {1:032x}, part 0 of 1" in shown
    assert "2 damaged files" in shown
    assert {each.name for each in (tier.root / "quarantine").iterdir()} == {path.name, other.name}
    assert [stored.address for stored in tier.list()] == [file_of(2)[0]]


def test_gc_tidies_up(tier, capsys):
    tier.quarantine(file_of(0)[0])
    old = tier.path(file_of(1)[0])
    os.utime(old, (time.time() - 10 * 86_400,) * 2)
    tier.path(file_of(3)[0]).with_suffix(".1-2.tmp").write_bytes(b"left behind")
    assert main(["gc", str(tier.root), "--idle-days", "5"]) == 0
    assert [stored.address for stored in tier.list()] == [file_of(2)[0]]
    assert not list((tier.root / "quarantine").iterdir())
    assert not list(tier.root.rglob("*.tmp"))
    assert main(["gc", str(tier.root), "--size", "1B"]) == 0
    assert not list(tier.list())
    assert "0.0 MiB left" in said(capsys)


def test_what_is_exported_can_be_imported_elsewhere(tier, tmp_path, capsys):
    archive, other = tmp_path / "kv.tar", tmp_path / "other"
    other.mkdir()
    assert main(["export", str(tier.root), str(archive)]) == 0
    with tarfile.open(archive, "a") as opened:
        for name in ("../evil.safetensors", f"{9:032x}.0-of-1.safetensors"):
            info = tarfile.TarInfo(name)
            info.size = 1
            opened.addfile(info, io.BytesIO(b"x"))
    assert main(["import", str(other), str(archive)]) == 1
    taken = DirectoryTier(other, 1 << 30)
    assert {stored.address for stored in taken.list()} == {file_of(number)[0] for number in range(3)}
    assert all(taken.get(stored.address, 1 << 20) == tier.get(stored.address, 1 << 20) for stored in tier.list())
    shown = said(capsys)
    assert "3 files taken, 2 left out" in shown
    assert "../evil.safetensors: not a file of a tier" in shown
    assert not (tmp_path / "evil.safetensors").exists()


def test_what_is_not_there_is_said(capsys, tmp_path):
    for wrong in (["ls", "/nowhere/at/all"], ["import", str(tmp_path), "/nowhere.tar"]):
        assert main(wrong) == 2
        assert "nowhere" in said(capsys)


@pytest.mark.parametrize("wrong", [[], ["gc", "x", "--size", "much"], ["paint", "x"]])
def test_wrong_usage_exits_with_2(wrong):
    with pytest.raises(SystemExit) as ended:
        main(wrong)
    assert ended.value.code == 2


def test_an_archive_takes_no_more_memory_than_its_size(tier, tmp_path, capsys):
    """Compressed, or with holes, it could take any."""
    packed, sparse = tmp_path / "packed.tar.gz", tmp_path / "sparse.tar"
    file = tmp_path / f"{1:032x}.0-of-1.safetensors"
    file.touch()
    os.truncate(file, 1 << 20)
    subprocess.run(["tar", "-C", tmp_path, "-czf", packed, file.name], check=True)
    assert main(["import", str(tier.root), str(packed)]) == 2
    os.truncate(file, 1 << 40)
    subprocess.run(["tar", "-C", tmp_path, "-Scf", sparse, file.name], check=True)
    assert main(["import", str(tier.root), str(sparse)]) == 1
    assert "it is gone; left out" in said(capsys)
    header = tarfile.TarInfo(f"{2:032x}.0-of-1.safetensors")
    header.size = 1 << 50
    claimed = tmp_path / "claimed.tar"
    claimed.write_bytes(header.tobuf(tarfile.GNU_FORMAT))
    assert main(["import", str(tier.root), str(claimed)]) in (1, 2)


def test_an_archive_speaks_no_lines_of_its_own(tier, tmp_path, capsys):
    archive = tmp_path / "kv.tar"
    with tarfile.open(archive, "w") as opened:
        opened.addfile(tarfile.TarInfo("a\x1b[2J\nfake: line"))
    assert main(["import", str(tier.root), str(archive)]) == 1
    assert r"tessera: a\x1b[2J\nfake: line: not a file of a tier; left out" in said(capsys).splitlines()


def test_headers_of_an_archive_that_are_no_headers_are_said(tier, tmp_path, capsys):
    archive = tmp_path / "kv.tar"
    with tarfile.open(archive, "w", format=tarfile.PAX_FORMAT) as opened:
        info = tarfile.TarInfo("a")
        info.pax_headers = {"GNU.sparse.map": "0,x"}
        opened.addfile(info)
    assert main(["import", str(tier.root), str(archive)]) == 2
    assert "the archive is damaged" in said(capsys)
