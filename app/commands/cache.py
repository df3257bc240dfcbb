# SPDX-License-Identifier: Apache-2.0
"""`tessera cache`: list, check, clean up and move chunks of a directory tier. Servers may be running."""

import argparse
import io
import os
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from pydantic import ByteSize, TypeAdapter, ValidationError
from rich.console import Console
from rich.progress import track
from rich.table import Table

from cache.positions.layout import packed_length
from cache.tiers.directory import DirectoryTier, address_of
from cache.tiers.signed import TierKey, UnsignedFileError, is_signed
from cache.tiers.tier import Address, Buffer, Stored, TierConfigError, TierError
from engine_ext.wire.chunk_file import ChunkFileError, ChunkFileLabel, label_of, unpack_file
from machine.progress import printable, say

Run = Callable[[DirectoryTier, argparse.Namespace], int]

_UNLIMITED = 1 << 62


def main(argv: Sequence[str]) -> int:
    """Runs the command. Returns the exit code: 1 for damaged files, 2 if the command fails."""
    args = _parser().parse_args(argv)
    if not args.directory.is_dir():
        say(f"{args.directory}: no such directory")
        return 2
    try:
        if args.tier_key is not None:
            args.tier_key = TierKey.read(args.tier_key)
        run: Run = args.run
        return run(DirectoryTier(args.directory, _UNLIMITED), args)
    except (TierConfigError, TierError, OSError, tarfile.TarError) as error:
        say(str(error))
        return 2
    except KeyboardInterrupt:
        say("interrupted")
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tessera cache", description=__doc__.partition(": ")[2])
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def command(name: str, run: Run, text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text)
        added.add_argument("directory", type=Path, help="directory of the tier, as in file:///… of --chunk-cache-tiers")
        added.set_defaults(run=run, tier_key=None)
        return added

    def keyed(name: str, run: Run, text: str) -> argparse.ArgumentParser:
        added = command(name, run, text)
        default = os.environ.get("TESSERA_TIER_KEY") or None
        words = "the servers' file with a secret: only files signed with it are taken (TESSERA_TIER_KEY)"
        added.add_argument("--tier-key", type=Path, default=default and Path(default), metavar="FILE", help=words)
        return added

    command("ls", _list, "list the stored files, the most recently used first")
    keyed("verify", _verify, "read every file, and move damaged files into quarantine")
    gc = command("gc", _collect, "delete the quarantine, leftovers of killed servers, and the oldest files")
    gc.add_argument("--size", type=_size, default=_UNLIMITED, help="size to shrink to, as in 100GiB; default: no limit")
    gc.add_argument("--idle-days", type=float, help="delete files that were not used for this long")
    keyed("export", _export, "write all files into an archive").add_argument("archive", type=Path, help="a .tar file")
    keyed("import", _import, "add files from an archive after checking each").add_argument("archive", type=Path)
    return parser


def _size(text: str) -> int:
    try:
        return int(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 100GiB") from error


def _list(tier: DirectoryTier, _: argparse.Namespace) -> int:
    table = Table("key", "part", "tokens", "MiB", "unused for", "engine")
    stored = sorted(tier.list(), key=lambda each: -each.used_at)
    for each in stored:
        label = _label(tier, each.address)
        about = (str(_num_tokens(label)), printable(label.fingerprint[:12])) if label is not None else ("?", "damaged")
        part, idle = f"{each.address.part} of {each.address.parts}", _duration(time.time() - each.used_at)
        table.add_row(each.address.key, part, about[0], f"{each.num_bytes / 2**20:.1f}", idle, about[1])
    Console(soft_wrap=True, markup=False).print(table)  # a file says what it likes of itself
    say(f"{len(stored)} files, {sum(each.num_bytes for each in stored) / 2**20:.1f} MiB")
    return 0


def _verify(tier: DirectoryTier, args: argparse.Namespace) -> int:
    damaged = unknown = 0
    for each in _tracked(tier):
        file = tier.get(each.address, each.num_bytes)
        if args.tier_key is None and file is not None and is_signed(file):
            unknown += 1  # a server with the key may read it
        elif (reason := _fault(file, each.address, args.tier_key)) is not None:
            say(f"{tier.path(each.address)}: {reason}; moved into quarantine")
            tier.quarantine(each.address)
            damaged += 1
    if unknown:
        say(f"{unknown} files are signed: they can be checked with --tier-key")
    say(f"{damaged} damaged files" if damaged or unknown else "every file is whole")
    return int(damaged + unknown > 0)


def _collect(tier: DirectoryTier, args: argparse.Namespace) -> int:
    before = tier.num_bytes
    tier.empty_quarantine()
    if args.idle_days is not None:
        oldest = time.time() - 86_400 * args.idle_days
        tier.delete([each.address for each in tier.list() if each.used_at < oldest])
    left = tier.shrink(args.size)
    say(f"{(before - left) / 2**20:.1f} MiB dropped, {left / 2**20:.1f} MiB left")
    return 0


def _export(tier: DirectoryTier, args: argparse.Namespace) -> int:
    count = left_out = 0
    with tarfile.open(args.archive, "w") as archive:
        for each in _tracked(tier):
            if (file := tier.get(each.address, each.num_bytes)) is None:
                continue  # evicted meanwhile
            if args.tier_key is not None and (reason := _fault(file, each.address, args.tier_key)) is not None:
                say(f"{tier.path(each.address)}: {reason}; left out")
                left_out += 1
                continue
            info = tarfile.TarInfo(tier.path(each.address).name)
            info.size, info.mtime = len(file), int(each.used_at)
            archive.addfile(info, io.BytesIO(file))
            count += 1
    say(f"{count} files in {args.archive}")
    return int(left_out > 0)


def _import(tier: DirectoryTier, args: argparse.Namespace) -> int:
    count = refused = 0
    for name, file in _members(args.archive):
        address = address_of(name)
        reason = "not a file of a tier" if address is None else _fault(file, address, args.tier_key)
        if reason is not None or address is None or file is None:
            say(f"{printable(name)}: {reason}; left out")
            refused += 1
            continue
        tier.put(address, file)
        count += 1
    say(f"{count} files taken, {refused} left out")
    return int(refused > 0)


def _members(archive: Path) -> Iterator[tuple[str, bytes | None]]:
    """Names and bytes of what is in an archive; ``None`` for what is no file that it has whole."""
    num_bytes = archive.stat().st_size
    try:
        with tarfile.open(archive, "r:") as opened:  # not compressed: no file is larger than the archive
            for info in opened:
                is_whole = info.isfile() and not info.issparse() and info.size <= num_bytes
                content = opened.extractfile(info) if is_whole else None
                yield info.name, content.read() if content is not None else None
    except ValueError as error:  # tarfile takes its headers' numbers for granted
        raise tarfile.ReadError(f"the archive is damaged: {error}") from error


def _fault(file: Buffer | None, address: Address, key: TierKey | None) -> str | None:
    """Why a file is unusable, by servers with ``key``; ``None`` if it is fine."""
    if file is None:
        return "it is gone"
    if key is None and is_signed(file):
        return "it is signed, for servers with a --tier-key"
    try:
        content = file if key is None else key.checked(address, file)
        label = label_of(content)
        unpack_file(content, label)
    except (UnsignedFileError, ChunkFileError) as error:
        return str(error)
    found = Address(label.key, label.part, label.parts)
    return None if found == address else f"it has the KV of {found.key}, part {found.part} of {found.parts}"


def _label(tier: DirectoryTier, address: Address) -> ChunkFileLabel | None:
    try:
        with tier.open(address) as file:
            length = int.from_bytes(file.read(8), "little")
            file.seek(0)
            return label_of(file.read(8 + min(length, 1 << 24)))
    except (TierError, OSError, ChunkFileError):
        return None


def _num_tokens(label: ChunkFileLabel) -> int:
    return packed_length(bytes.fromhex(label.tokens))


def _duration(seconds: float) -> str:
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def _tracked(tier: DirectoryTier) -> Iterator[Stored]:
    yield from track(list(tier.list()), "files", console=Console(stderr=True), disable=not sys.stderr.isatty())
