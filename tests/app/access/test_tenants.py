# SPDX-License-Identifier: Apache-2.0
"""Tenants and their keys."""

import os

import pytest

from app.access.tenants import Tenants, TenantsFile, TenantsFileError, hash_of, new_key, parse_tenants
from cache.eviction.quotas import Quota
from tests.cache.helpers import Clock

KEY, OTHER = "tsr-one", "tsr-other"


def section(name="acme", *keys, rest=""):
    return f"[{name}]\nkeys = {[hash_of(key) for key in keys or (KEY,)]}\n{rest}\n"


def test_a_key_is_its_tenants():
    tenants = Tenants(parse_tenants(section("acme", KEY) + section("beta", OTHER)))
    assert tenants.of_key(KEY).name == "acme"
    assert tenants.of_key(OTHER).name == "beta"
    assert tenants.of_key(new_key()) is None
    assert tenants.of_key(hash_of(KEY)) is None
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100  # every one is another
    assert all(len(key) > 40 for key in keys)


def test_two_keys_while_one_replaces_the_other_of_a_tenant_that_may_do_little_unless_told_otherwise():
    tenants = Tenants(parse_tenants(section("acme", KEY, OTHER)))
    tenant = tenants.of_key(KEY)
    assert tenants.of_key(OTHER) is tenant
    assert (tenant.roles, tenant.namespaces) == ({"chat"}, frozenset())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "it has no tenant"),
        ("keys = 1", "keys is not a section"),
        ("[acme]", r"\[acme\] keys: Field required"),
        ("[acme]\nkeys = []", r"\[acme\] keys: Tuple should have at least 1 item"),
        (f'[acme]\nkeys = ["{KEY}"]', r"\[acme\] keys.0: String should match pattern"),
        (section(rest="role = ['chat']"), r"\[acme\] role: Extra inputs are not permitted"),
        (section(rest="roles = ['root']"), r"\[acme\] roles.0: Input should be 'chat', 'ingest' or 'admin'"),
        (section(rest="requests_per_minute = 0"), r"\[acme\] requests_per_minute: .* greater than or equal to 1"),
        (section('"a/b"'), r"\[a/b\] name: String should match pattern"),
        (section("acme") + section("beta"), "acme and beta have a key in common"),
        ("[acme", "Expected"),
    ],
)
def test_what_is_wrong_is_said_with_its_place_and_without_a_key(text, words):
    with pytest.raises(TenantsFileError, match=words) as caught:
        parse_tenants(text)
    assert KEY not in str(caught.value)


class TestAChangedFile:
    @pytest.fixture
    def clock(self):
        return Clock()

    @pytest.fixture
    def file(self, tmp_path):
        path = tmp_path / "tenants.toml"
        path.write_text(section())
        return path

    @pytest.fixture
    def tenants(self, file, clock):
        return TenantsFile(file, clock)

    def test_is_read_again(self, file, clock, tenants):
        file.write_text(section("acme", OTHER))
        assert tenants.of_key(KEY) is not None
        clock.now += 1
        assert tenants.of_key(KEY) is None
        assert tenants.of_key(OTHER).name == "acme"

    def test_is_noticed_when_another_takes_its_place(self, file, clock, tenants):
        """As on Kubernetes, the new file has the old file's size and time."""
        replacement = file.with_suffix(".new")
        replacement.write_text(section("acme", OTHER))
        times = file.stat()
        os.utime(replacement, ns=(times.st_atime_ns, times.st_mtime_ns))
        replacement.rename(file)
        clock.now += 1
        assert tenants.of_key(OTHER) is not None

    @pytest.mark.parametrize("damage", [lambda file: file.write_text("[acme"), lambda file: file.unlink()])
    def test_of_no_use_changes_nothing_until_it_is_mended(self, damage, file, clock, tenants, caplog):
        damage(file)
        clock.now += 1
        assert tenants.of_key(KEY) is not None
        assert "keeping the previous tenants" in caplog.text
        file.write_text(section("acme", OTHER))
        clock.now += 1
        assert tenants.of_key(KEY) is None


def test_quotas_are_in_whole_pages():
    limited = section("acme", rest="cache_memory = '1KiB'\ncache_segments = 7")
    tenants = Tenants(parse_tenants(limited + section("beta", OTHER)))
    assert tenants.quota_of("acme", 1000) == Quota(1, 7)
    assert tenants.quota_of("beta", 1000) == tenants.quota_of("public", 1000) == Quota()
