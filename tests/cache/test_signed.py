# SPDX-License-Identifier: Apache-2.0
"""A writer to a keyed tier can make an answer slower, never different: no file but a signed one is even parsed."""

import logging
from collections.abc import Iterator

import pytest
import torch

from cache.tiers.chain import Events, TierChain
from cache.tiers.config import make_tier
from cache.tiers.directory import DirectoryTier
from cache.tiers.signed import SIGNATURE_BYTES, SignedTier, TierKey, UnsignedFileError
from cache.tiers.tier import Address, TierConfigError
from engine_ext.wire.chunk_file import FORMAT, ChunkFileLabel, pack_file
from engine_ext.wire.id_record import record_key, record_tensors
from engine_ext.wire.prefix import file_key, namespace_digest

KEY, OTHER = TierKey.of(b"a secret of servers"), TierKey.of(b"a secret of others")
ENGINE, MOST = "f" * 64, 1 << 20


def filed(key: str, tensors: dict[str, torch.Tensor], tokens: str = "", part: int = 0) -> tuple[Address, bytes]:
    return Address(key, part, 2), pack_file(ChunkFileLabel(ENGINE, key, "", tokens, part, 2), tensors)


def kv(number: float) -> dict[str, torch.Tensor]:
    return {f"0.{name}": torch.full((3, 2, 4), number) for name in ("key", "value")}


RECORD = b'{"id": "mill", "namespace": "default", "text": "It shows tools.", "segments": []}'
FILES = {
    "chunk": filed("ab" * 16, kv(1.0), "01" * 3),
    "id record": filed(record_key(ENGINE, "default", "mill").hex(), record_tensors(RECORD)),
    "blocks": filed(file_key(ENGINE, namespace_digest("default"), "cd" * 32), kv(2.0)),
}


def mutations(signed: bytes, file: bytes) -> Iterator[bytes]:
    """Bits flipped at many places and in the whole signature, parts cut off and added, forgeries without the key."""
    places = {*range(0, len(signed), 7), *range(len(signed) - SIGNATURE_BYTES, len(signed))}
    yield from (signed[:at] + bytes([signed[at] ^ bit]) + signed[at + 1 :] for at in places for bit in (1, 128))
    yield from (signed[:length] for length in (*range(0, len(signed), 61), len(file), len(signed) - 1))
    yield from (signed[1:], signed + b"\0", b"\0" + signed, signed + signed[-SIGNATURE_BYTES:])
    forged = file.replace(FORMAT.encode(), b"tessera-kv-0")
    yield from (file, forged, forged + signed[-SIGNATURE_BYTES:], file[:-1] + b"\1" + signed[-SIGNATURE_BYTES:])


@pytest.mark.parametrize("kind", FILES)
def test_no_change_of_a_file_is_taken(kind: str) -> None:
    address, file = FILES[kind]
    signed = KEY.signed(address, file)
    assert bytes(KEY.checked(address, signed)) == file
    for changed in mutations(signed, file):
        with pytest.raises(UnsignedFileError):
            KEY.checked(address, changed)
    for other in ({"key": address.key[:-2] + "00"}, {"part": 1}, {"parts": 21}, {"key": "", "part": 0}):
        with pytest.raises(UnsignedFileError):  # of another segment, worker or cluster
            KEY.checked(address._replace(**other), signed)
    with pytest.raises(UnsignedFileError):
        KEY.checked(address, OTHER.signed(address, file))


@pytest.fixture(params=["file", "s3"])
def url(request: pytest.FixtureRequest, tmp_path) -> str:
    if request.param == "file":
        return f"file://{tmp_path}/kv?size=1GiB&timeout=60"
    return f"s3://bucket/{tmp_path.name}?size=1GiB&timeout=60&endpoint={request.getfixturevalue('s3')}"


def test_whatever_is_written_to_a_tier_is_a_miss_and_makes_room_for_a_right_one(url, caplog) -> None:
    """With every kind of file beside the others, swapped, moved and replaced by any bytes."""
    tier, raw, parsed = make_tier(url, None, KEY), make_tier(url), []
    assert isinstance(tier, SignedTier)
    chain = TierChain([tier])
    for address, file in FILES.values():
        chain.put(address, file, Events())
    addresses = [address for address, _ in FILES.values()]
    stored = {address: bytes(raw.get(address, MOST)) for address in addresses}
    evil = [b"", b"{}", *(file for _, file in FILES.values()), *stored.values()]
    evil += [signed[:-1] + b"\0" for signed in stored.values()]

    def check(data):
        parsed.append(bytes(data))
        return bytes(data)

    events, misses = Events(), 0
    with caplog.at_level(logging.WARNING):
        for address, file in FILES.values():
            for written in evil:
                raw.delete([address])
                raw.put(address, written)
                found = chain.get(address, MOST, [tier.name], check, events)
                if written == stored[address]:
                    assert found == (tier.name, file)
                    continue
                misses += 1
                assert found is None
                assert raw.stat(address) is None  # set aside
                chain.put(address, file, Events())
                assert chain.get(address, MOST, [tier.name], check, Events()) == (tier.name, file)
    assert set(parsed) == {file for _, file in FILES.values()}
    assert events.happened.count((tier.name, "unsigned")) == misses
    assert len([each for each in caplog.records if each.name == "cache.tiers.chain"]) == 1


def test_a_file_without_a_signature_is_passed_over_for_the_next_tier_and_copies_are_signed(tmp_path) -> None:
    urls = ("host://?size=1MiB", f"file://{tmp_path}/a?size=1MiB", f"file://{tmp_path}/b?size=1MiB&name=shared")
    tiers = [make_tier(each, None, KEY) for each in urls]
    chain, (address, file) = TierChain(tiers), FILES["chunk"]
    assert not isinstance(tiers[0], SignedTier)  # nobody else writes there
    make_tier(urls[1]).put(address, file)
    tiers[2].put(address, file)
    assert chain.get(address, len(file), [each.name for each in tiers], bytes, events := Events()) == ("shared", file)
    assert events.happened == [("file", "unsigned"), ("shared", "loaded")]
    assert bytes(tiers[1].get(address, len(file))) == file
    assert bytes(make_tier(urls[1]).get(address, MOST)) == KEY.signed(address, file)
    assert chain.get(address, len(file) - 1, ["file"], bytes, events) is None  # longer than it may be


def test_a_secret_is_a_file_of_some_length(tmp_path) -> None:
    path = tmp_path / "key"
    with pytest.raises(TierConfigError, match="No such file"):
        TierKey.read(path)
    path.write_bytes(b"too short\n")
    with pytest.raises(TierConfigError, match="less than 16 bytes"):
        TierKey.read(path)
    path.write_bytes(b"a secret of servers\n")
    assert TierKey.read(path).key == KEY.key
    with pytest.raises(TierConfigError) as raised:
        TierKey.read(tmp_path / "a secret instead of a file")
    assert "instead" not in str(raised.value)


def test_a_directory_without_the_key_is_as_it_was(tmp_path) -> None:
    tier = make_tier(f"file://{tmp_path}?size=1MiB")
    assert isinstance(tier, DirectoryTier)
    tier.put(*FILES["chunk"])
    assert tier.path(FILES["chunk"][0]).read_bytes() == FILES["chunk"][1]
