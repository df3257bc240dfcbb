# SPDX-License-Identifier: Apache-2.0
"""Common and specific behaviour of tiers; the S3 tier runs against a local S3 server."""

import math
import os
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cache.tiers import chain as chain_module
from cache.tiers.chain import Events, TierChain
from cache.tiers.config import make_tier, parse_tiers
from cache.tiers.directory import DirectoryTier
from cache.tiers.kept import STAGED_BYTES
from cache.tiers.memory import MemoryTier
from cache.tiers.mooncake import MooncakeTier
from cache.tiers.tier import TierConfigError, TierError
from machine.server_process import ROOT
from tests.cache.helpers import Clock
from tests.support.tier_files import MOST, PinnedMemory, address, held
from tests.support.waiting import until


class FakeMooncake:
    """Fake of `MooncakeDistributedStore`, as observed with its package 0.3.13 over TCP."""

    def __init__(self):
        self.files = {}

    def setup(self, *arguments):
        return 0 if arguments[-1] == "master:1" else -1

    def put(self, name, data):
        self.files.setdefault(name, data)
        return 0

    def get(self, name):
        return self.files.get(name, b"")

    def get_size(self, name):
        return len(self.files[name])

    def is_exist(self, name):
        return int(name in self.files)

    def remove(self, name, force):
        return 0 if self.files.pop(name, None) is not None and force else -704


@pytest.fixture(params=["host", "file", "s3", "mooncake"])
def tier(request, tmp_path):
    if request.param == "mooncake":
        return MooncakeTier(urlsplit("mooncake://master:1"), MOST, {}, FakeMooncake())
    if request.param == "host":
        return MemoryTier(MOST)
    if request.param == "file":
        return DirectoryTier(tmp_path / "tier", MOST)
    endpoint = request.getfixturevalue("s3")
    return make_tier(f"s3://bucket/{tmp_path.name}?size={MOST}B&endpoint={endpoint}")


def test_a_file_comes_back_as_it_was_written_first(tier):
    assert tier.get(address(1), MOST) is None
    assert tier.stat(address(1)) is None
    tier.put(address(1, 1, 2), b"some bytes")
    tier.put(address(1, 1, 2), b"others")
    assert bytes(tier.get(address(1, 1, 2), MOST)) == b"some bytes"
    assert tier.stat(address(1, 1, 2))[:2] == (address(1, 1, 2), 10)
    assert tier.get(address(1, 0, 2), MOST) is None  # another part
    assert tier.get(address(1, 1, 1), MOST) is None  # of another number of parts
    assert held(tier) == {address(1, 1, 2): 10}
    tier.delete([address(1, 1, 2), address(7)])
    tier.delete([address(1, 1, 2), address(7)])
    assert (tier.get(address(1, 1, 2), MOST), held(tier)) == (None, {})


def test_it_never_holds_more_than_its_size(tier):
    for number in range(8):
        tier.put(address(number), bytes(3000))
        assert sum(held(tier).values()) <= MOST
        assert address(number) in held(tier)
    with pytest.raises(TierError, match="10001 bytes exceed"):
        tier.put(address(9), bytes(MOST + 1))
    assert len(held(tier)) == 3
    assert len(tier.get(address(7), 3000)) == 3000
    assert len(tier.get(address(7), 2999)) < 3000  # no more is read than a file may have


def test_what_was_used_least_recently_makes_room(tier):
    for number in range(3):
        tier.put(address(number), bytes(3000))
        time.sleep(0.02)
    assert tier.get(address(0), MOST) is not None
    tier.put(address(3), bytes(3000))
    assert address(0) in held(tier)
    assert address(1) not in held(tier)


def test_a_damaged_file_is_found_no_more(tier):
    tier.put(address(1), b"damaged")
    tier.quarantine(address(1))
    tier.quarantine(address(2))
    assert (tier.get(address(1), MOST), held(tier)) == (None, {})
    tier.put(address(1), b"whole")
    assert bytes(tier.get(address(1), MOST)) == b"whole"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(st.lists(st.tuples(st.sampled_from(["put", "get", "delete", "quarantine"]), st.integers(0, 5)), max_size=40))
def test_whatever_is_done_it_has_what_it_says_and_not_too_much(tmp_path_factory, calls):
    for tier in (MemoryTier(9000), DirectoryTier(tmp_path_factory.mktemp("tier"), 9000)):
        for verb, number in calls:
            given = {"put": [address(number), bytes([number]) * (1000 + 700 * number)], "get": [address(number), MOST]}
            given["delete"] = [[address(number), address(9)]]
            getattr(tier, verb)(*given.get(verb, [address(number)]))
            assert sum(held(tier).values()) <= 9000
        for found, size in held(tier).items():
            file = tier.get(found, 1 << 20)
            assert len(file) == size
            assert bytes(file) == bytes([int(found.key, 16)]) * size


def test_a_directory_is_found_again_and_leftovers_of_the_killed_are_collected(tmp_path):
    tier = DirectoryTier(tmp_path, MOST)
    tier.put(address(1), bytes(3000))
    leftover = tier.path(address(2)).with_suffix(".123-456.tmp")
    leftover.parent.mkdir(exist_ok=True)
    leftover.write_bytes(bytes(5000))
    (tmp_path / "lock").write_text("999999")  # as after a kill between reservation and file
    again = DirectoryTier(tmp_path, MOST)
    assert not leftover.exists()
    assert held(again) == {address(1): 3000}
    again.put(address(2), bytes(3000))
    assert len(held(again)) == 2


def test_files_of_a_directory_are_read_into_memory_that_is_allocated_when_it_is_made(tmp_path):
    pinned = PinnedMemory()
    tier = DirectoryTier(tmp_path, MOST, pinned.allocate)
    for number, size in ((1, 3000), (2, 2000)):
        tier.put(address(number), bytes([number]) * size)
    assert [bytes(tier.get(address(number), MOST))[-3:] for number in (1, 2, 1)] == [b"\1\1\1", b"\2\2\2", b"\1\1\1"]
    assert pinned.taken == [STAGED_BYTES]


def test_a_directory_that_became_smaller_is_shrunk_at_the_start(tmp_path):
    for number in range(3):
        DirectoryTier(tmp_path, MOST).put(address(number), bytes(3000))
        time.sleep(0.02)
    assert set(held(DirectoryTier(tmp_path, 6500))) == {address(1), address(2)}


def test_what_is_quarantined_counts_and_goes_first(tmp_path):
    tier = DirectoryTier(tmp_path, MOST)
    tier.put(address(1), bytes(4000))
    tier.quarantine(address(1))
    assert [path.name for path in (tmp_path / "quarantine").iterdir()] == [tier.path(address(1)).name]
    tier.put(address(2), bytes(4000))
    tier.put(address(3), bytes(4000))
    assert list((tmp_path / "quarantine").iterdir()) == []
    assert len(held(tier)) == 2


WRITER = """
import sys
from pathlib import Path
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit
from cache.tiers.directory import DirectoryTier
from cache.tiers.tier import Address
tier = DirectoryTier(Path(sys.argv[1]), 1 << 30)
for number in range(200):
    tier.put(Address(f"{number:032x}", 0, 1), (b"%032x" % number) * 10_000)
    print(number, flush=True)
"""


def test_whoever_is_killed_while_writing_leaves_whole_files_only(tmp_path):
    """50 kills at various moments; two writers share each directory."""
    for attempt in range(25):
        folder = tmp_path / str(attempt)
        command = [sys.executable, "-c", WRITER, str(folder)]
        writers = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) for _ in range(2)]
        for writer in writers:
            writer.stdout.readline()  # it has started
        time.sleep(0.002 * attempt)
        for writer in writers:
            writer.kill()
        said = {int(line) for writer in writers for line in writer.communicate()[0].split()}
        tier = DirectoryTier(folder, 1 << 30)
        assert not list(folder.rglob("*.tmp"))
        stored = held(tier)
        assert {address(number) for number in said} <= stored.keys()
        for found in stored:
            assert bytes(tier.get(found, 1 << 20)) == found.key.encode() * 10_000
        assert int((folder / "lock").read_text()) == sum(stored.values())
        shutil.rmtree(folder)


def whole(file):
    if bytes(file) == b"damaged":
        raise ValueError("it is damaged")
    return bytes(file)


class Chain:
    """A chain of two tiers in memory."""

    def __init__(self, timeout_s=60.0):
        self.first, self.second = MemoryTier(MOST), MemoryTier(MOST)
        self.first.name, self.second.name = "first", "second"
        self.first.timeout_s = self.second.timeout_s = timeout_s
        self.chain = TierChain([self.first, self.second])
        self.happened = []

    def get(self, number=1, limit_s=math.inf):
        events = Events()
        found = self.chain.get(address(number), MOST, ["first", "second"], whole, events, limit_s)
        self.happened += events.happened
        return found

    def hang(self):
        """The first tier has the file, but reads hang until the event is set, and writes do nothing."""
        may_answer, read = threading.Event(), self.first.get
        self.first.put(address(1), b"file")
        self.second.put(address(1), b"file")
        self.first.put = lambda *_: None
        self.first.get = lambda *given: may_answer.wait(30) and read(*given)
        return may_answer


def test_a_chain_takes_the_first_that_has_it_and_tells_the_faster():
    both = Chain()
    both.second.put(address(1), b"file")
    assert [both.get(), both.get(), both.get(2)] == [("second", b"file"), ("first", b"file"), None]
    assert both.chain.get(address(1), MOST, ["nothing"], whole, Events()) is None
    assert both.happened == [("second", "loaded"), ("first", "loaded")]
    both.chain.put(address(3), b"new", stored := Events())
    assert stored.happened == [("first", "stored"), ("second", "stored")]


def test_what_is_deleted_while_a_slow_tier_reads_it_is_in_no_faster_one_afterwards():
    fast, slow = MemoryTier(MOST), MemoryTier(MOST)
    slow.name = "slow"
    chain, get = TierChain([fast, slow]), slow.get
    slow.put(address(1), b"file")

    def get_while_it_is_deleted(*arguments):
        found = get(*arguments)
        chain.delete([address(1)], Events())
        return found

    slow.get = get_while_it_is_deleted
    assert chain.get(address(1), MOST, ["host", "slow"], bytes, Events()) == ("slow", b"file")
    assert held(fast) == held(slow) == {}


def test_a_chain_quarantines_what_is_damaged_and_asks_the_next():
    both = Chain()
    both.first.put(address(1), b"damaged")
    both.second.put(address(1), b"whole")
    assert both.get() == ("second", b"whole")
    assert both.happened == [("first", "corrupt"), ("second", "loaded")]
    assert bytes(both.first.get(address(1), MOST)) == b"whole"


def test_errors_of_a_tier_are_counted_and_passed_over():
    def fails(*_):
        raise OSError(28, "No space left on device")

    both = Chain()
    both.first.put = both.first.get = fails
    both.chain.put(address(1), b"file", stored := Events())
    assert stored.happened == [("first", "store_failed"), ("second", "stored")]
    assert both.get() == ("second", b"file")
    assert ("first", "load_failed") in both.happened


def test_a_tier_that_hangs_is_waited_for_once_and_left_alone(monkeypatch):
    clock, both = Clock(), Chain(timeout_s=0.1)
    monkeypatch.setattr(chain_module, "time", SimpleNamespace(monotonic=clock))
    may_answer = both.hang()
    for _ in range(3):
        assert both.get() == ("second", b"file")
    assert [word for name, word in both.happened if name == "first"] == ["timeout", "suspended", "suspended"]
    may_answer.set()
    until(lambda: not both.chain._readers["first"]._still_hanging())
    assert both.get() == ("second", b"file"), "it is still suspended"
    clock.now += chain_module.SUSPENDED_S
    until(lambda: both.get() == ("first", b"file"))


def test_a_tier_that_is_slower_than_the_limit_is_passed_over_until_it_answers():
    both = Chain()
    may_answer = both.hang()
    for _ in range(2):
        assert both.get(limit_s=0.05) == ("second", b"file")
    assert [word for name, word in both.happened if name == "first"] == ["late", "suspended"]
    may_answer.set()  # the call that was given up ends
    until(lambda: both.get(limit_s=50) == ("first", b"file"))


def test_several_files_are_read_at_once_with_the_priority_of_whoever_made_the_chain():
    """Each read waits for all others. A reader that waits for a core would look like a tier that hangs."""

    def priority():
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    def get(wanted, max_bytes):
        all_read.wait(30)
        priorities.append(priority())
        return read(wanted, max_bytes)

    all_read, priorities, both, own = threading.Barrier(5), [], Chain(), priority()
    for number in range(5):
        both.first.put(address(number), b"file")
    read, both.first.get = both.first.get, get
    with ThreadPoolExecutor(5, initializer=lambda: os.nice(5)) as threads:
        assert list(threads.map(both.get, range(5))) == [("first", b"file")] * 5
    assert priorities == [own] * 5


def test_host_memory_counts_right_while_files_are_read_and_dropped():
    tier, done = MemoryTier(10 * 100), threading.Event()

    def read():
        while not done.is_set():
            for number in range(40):
                found = tier.get(address(number), MOST)
                assert found is None or bytes(found) == bytes([number]) * 100

    with ThreadPoolExecutor(4) as threads:
        reading = [threads.submit(read) for _ in range(4)]
        for number in list(range(40)) * 50:
            tier.put(address(number), bytes([number]) * 100)
        done.set()
        for each in reading:
            each.result()
    assert tier.num_bytes == sum(stored.num_bytes for stored in tier.list()) <= tier.max_bytes


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("disk:///tmp/x?size=1GiB", "no tier is called 'disk'; there are .*file.*host.*s3"),
        ("/tmp/x", "no tier is called ''"),
        ("file:///tmp/x", "needs a size"),
        ("host://?size=100", "size=100 has no unit"),
        ("host://?size=much", "size=much is no size"),
        ("host://?size=0GiB", "holds nothing"),
        ("host://?size=1GiB&timeout=0", "timeout=0 is not a number of seconds"),
        ("host://?size=1GiB&timeout=1e1", "timeout=1e1 is not a number"),
        ("host://?size=1GiB&timeout=61", "up to 60"),
        ("host://?size=1GiB,host://?size=2GiB", "there is one host memory"),
        ("file:///a?size=1GiB,file:///b?size=2GiB", "two tiers are called file: name one of them, as in &name=shared"),
        ("file:///a?size=1GiB&name=A B", "is no name"),
        ("file:///a?size=1GiB&name=host", "is no name"),
        ("host://?size=1GiB&name=ram", "is no name"),
    ],
)
def test_what_is_wrong_in_a_configuration_is_said(text, message):
    with pytest.raises(TierConfigError, match=message):
        parse_tiers(text)
    assert parse_tiers("host://?size=4GiB , file:///x?size=1TiB") == ["host://?size=4GiB", "file:///x?size=1TiB"]
    assert parse_tiers("") == []


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("file://relative/path?size=1GiB", "absolute path"),
        ("file:///tmp/x?size=1GiB&colour=red", "absolute path .* a size"),
        ("file:///proc/nowhere?size=1GiB", "/proc/nowhere: No such file or directory"),
        ("host://there?size=1GiB", "nothing but a size"),
        ("mooncake://?size=1GiB", "takes the master's address"),
        ("mooncake://master:1?size=1GiB&colour=red", "colour is no option"),
        ("s3://no-such-bucket/x?size=1GiB&endpoint={s3}", "no-such-bucket"),
        # Where the store's Rust code panics, which Python does not see as an Exception.
        ("s3://bucket/x?size=1GiB&endpoint={s3}&proxy_url=http://127.0.0.1:9", r"tier s3://bucket.*: \w+"),
        ("s3://bucket/x?size=1GiB&endpoint={s3}&bogus=1", r"tier s3://bucket.*: \w+"),
    ],
)
def test_what_can_not_be_made_is_said(request, url, message):
    if "{s3}" in url:
        url = url.format(s3=request.getfixturevalue("s3"))
    with pytest.raises(TierConfigError, match=message):
        make_tier(url)
    with pytest.raises(TierConfigError, match="master at other:1 can't be reached"):
        MooncakeTier(urlsplit("mooncake://other:1"), MOST, {}, FakeMooncake())


@pytest.mark.parametrize(
    ("options", "environment"),
    [
        ("", {"AWS_ENDPOINT_URL": "http://{}"}),
        ("", {"AWS_ENDPOINT_URL_S3": "http://{}"}),
        ("&endpoint=HTTP://{}", {}),
        ("&endpoint=http://{}&allow_http=true", {}),
        ("&aws_endpoint=http://{}", {"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}),
        ("&endpoint=http://{}", {"HTTP_PROXY": "http://127.0.0.1:9", "http_proxy": "http://127.0.0.1:9"}),
        ("", {"AWS_ENDPOINT_URL": "http://{}", "http_proxy": "http://127.0.0.1:9"}),
    ],
)
def test_a_store_that_speaks_plain_http_is_found(s3, tmp_path, monkeypatch, options, environment):
    host = s3.removeprefix("http://")
    for name, value in environment.items():
        monkeypatch.setenv(name, value.format(host))
    tier = make_tier(f"s3://bucket/{tmp_path.name}?size=1MiB{options.format(host)}")
    tier.put(address(1), b"file")
    assert bytes(tier.get(address(1), MOST)) == b"file"
