# SPDX-License-Identifier: Apache-2.0
"""Keys: equal for equal content, different for any different field."""

from array import array

import pytest
import xxhash
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cache.positions.layout import pack
from cache.segments.hashing import CacheScope, ChunkHash, ChunkHasher

TOKENS = pack((1, 2, 3))


def chunk_key(hasher, scope, prefix, tokens):
    (key,) = hasher.chunk_keys(scope, prefix, [tokens])
    return key


token_ids = st.lists(st.integers(0, 2**31 - 1), max_size=4).map(lambda ids: pack(tuple(ids)))
names = st.text(max_size=4)


@pytest.fixture
def hasher():
    return ChunkHasher("engine")


def test_keys_do_not_change_between_processes(hasher):
    """Framed by hand, to detect changes of the framing or the algorithm."""
    fields = [b"engine", b"system", b"7:default", b"", array("i", (1, 2, 3)).tobytes()]
    framed = b"".join(len(field).to_bytes(8, "little") + field for field in fields)
    assert hasher.system_key(CacheScope(), TOKENS) == ChunkHash(xxhash.xxh3_128(framed).digest())


def test_kind_namespace_adapter_system_tokens_and_fingerprint_separate_keys(hasher):
    base, lora, tenant = CacheScope(), CacheScope(adapter="lora"), CacheScope("tenant")
    system, other_system = hasher.system_key(base, TOKENS), hasher.system_key(base, pack((1, 2)))
    keys = [system, other_system, hasher.system_key(base, b"")]
    keys += [each.system_key(base, TOKENS) for each in (ChunkHasher("other"), ChunkHasher(""))]
    for scope in (lora, tenant):
        keys += [hasher.system_key(scope, TOKENS), chunk_key(hasher, scope, system, TOKENS)]
    for prefix, chunk in ((system, TOKENS), (other_system, TOKENS), (system, pack((3, 2, 1)))):
        keys.append(chunk_key(hasher, base, prefix, chunk))
    assert len(set(keys)) == len(keys)


@given(st.tuples(names, names), st.tuples(names, names))
@example(("ab", "c"), ("a", "bc"))
@example(("abc", ""), ("", "abc"))
@example(("1:a", "b"), ("1", ":ab"))
@settings(derandomize=True, deadline=None)
def test_two_scopes_print_differently(one, other):
    assert (str(CacheScope(*one)) == str(CacheScope(*other))) == (one == other)


@given(st.lists(st.binary(max_size=10), max_size=4), st.lists(st.binary(max_size=10), max_size=4))
@example([b"ab"], [b"a", b"b"])
@example([b"", b"a"], [b"a", b""])
@example([], [b""])
@example([b"\1" + bytes(7) + b"a"], [b"", b"a"])
@settings(derandomize=True, deadline=None)
def test_no_two_field_lists_are_hashed_as_the_same_bytes(one, other):
    framed = ChunkHasher("engine")._framed
    assert (framed(one) == framed(other)) == (one == other)


@given(token_ids, token_ids, token_ids, token_ids)
@settings(derandomize=True, deadline=None)
def test_tokens_never_move_between_system_and_chunk_unnoticed(system, chunk, other_system, other_chunk):
    hasher, scope = ChunkHasher("engine"), CacheScope()
    one = chunk_key(hasher, scope, hasher.system_key(scope, system), chunk)
    other = chunk_key(hasher, scope, hasher.system_key(scope, other_system), other_chunk)
    assert (one == other) == ((system, chunk) == (other_system, other_chunk))


def test_a_layout_salt_depends_on_engine_scope_and_each_part(hasher):
    scope = CacheScope()
    parts = ["shared", 3, 12]
    salts = [hasher.layout_salt(scope, each) for each in (parts, ["shared", 31, 2], ["shared", 3, 1, 2])]
    salts += [hasher.layout_salt(each, parts) for each in (CacheScope("tenant"), CacheScope(adapter="lora"))]
    salts += [hasher.layout_salt(scope, ["offset", 3, 12]), ChunkHasher("other").layout_salt(scope, parts)]
    assert len(set(salts)) == len(salts)
    assert all(salt.startswith("tessera-") for salt in salts)
    assert salts[0] == ChunkHasher("engine").layout_salt(scope, ["shared", 3, 12])
