# SPDX-License-Identifier: Apache-2.0
"""Precedence of settings: flags, then environment, then defaults."""

import argparse
import re

import pytest
from pydantic import ValidationError

from app.arguments import parse
from app.settings import VLLM_FLAGS, Settings, add_flags, add_missing_flags, flag, load_settings
from cache.sparse import Sparse
from machine.server_process import ROOT

pytestmark = pytest.mark.usefixtures("clean_environment")


def load(*flags: str) -> Settings:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return load_settings(parser.parse_args(flags))


def test_defaults():
    settings = load()
    assert (settings.chunk_cache, settings.chunk_cache_eviction) == ("on", "s3fifo")
    assert settings.chunk_cache_memory is settings.chunk_mode is settings.chunk_separator is None
    with pytest.raises(ValidationError, match="chunk_cash"):
        Settings(chunk_cash=1)
    with pytest.raises(ValidationError, match="frozen"):
        settings.chunk_cache = "off"


def test_flags_override_the_environment(monkeypatch):
    monkeypatch.setenv("TESSERA_CHUNK_CACHE", "off")
    monkeypatch.setenv("TESSERA_CHUNK_SEPARATOR", "|")
    monkeypatch.setenv("TESSERA_CHUNK_MAX_TOKENS", "32")
    monkeypatch.setenv("TESSERA_CHUNK_MODE", "offset")
    monkeypatch.setenv("TESSERA_PEER_SECRET", "sixteen letters or more")
    monkeypatch.setenv("TESSERA_HOME", "/somewhere")
    settings = load("--chunk-cache", "require", "--chunk-separator", " # # ")
    assert (settings.chunk_cache, settings.chunk_separator) == ("require", " # # ")
    assert (settings.chunk_max_tokens, settings.chunk_mode) == (32, "offset")
    assert settings.peer_secret.get_secret_value() == "sixteen letters or more"
    assert "sixteen" not in repr(settings) + str(settings.model_dump())


def test_a_mode_decides_what_requests_leave_open():
    settings = load("--chunk-mode", "offset%25~15%")
    options = settings.cache_defaults()
    assert (options.position_strategy, options.reread, options.recompute) == ("offset", 0.15, 0)
    assert options.sparse == Sparse(budget_share=0.25)
    assert settings.needs_attention
    assert not load("--chunk-mode", "parallel").needs_attention
    with pytest.raises(ValidationError, match="reuses no chunks"):
        load("--chunk-mode", "full")


@pytest.mark.parametrize(
    ("flags", "use"),
    [
        (["--chunk-cache=off"], "off"),
        (["--chunk-cache"], "on"),  # "chunk-cache: on" in a YAML file is true
        (["--no-chunk-cache"], "off"),
        (["--no-chunk-cache", "--chunk-cache", "require"], "require"),
    ],
)
def test_the_cache_is_on_off_or_required(flags, use):
    assert load(*flags).chunk_cache == use


@pytest.mark.parametrize("has_it", [False, True])
def test_there_is_a_log_level_also_where_vllm_has_none(has_it, monkeypatch):
    monkeypatch.setenv("TESSERA_LOG_LEVEL", "ERROR")
    assert load().log_level == "ERROR"
    parser = argparse.ArgumentParser()
    add_flags(parser)
    if has_it:
        parser.add_argument("--log-level", help="vLLM's")
    add_missing_flags(parser)
    assert load_settings(parser.parse_args(["--log-level", "INFO"])).log_level == "INFO"


@pytest.mark.parametrize(
    ("text", "size"), [("8GiB", 8 << 30), ("512MiB", 512 << 20), ("1.5GB", 1_500_000_000), ("4096", 4096)]
)
def test_memory_takes_units(text, size, monkeypatch):
    assert load("--chunk-cache-memory", text).chunk_cache_memory == size
    monkeypatch.setenv("TESSERA_CHUNK_CACHE_MEMORY", text)
    assert load().chunk_cache_memory == size


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("chunk_cache", "0"), ("chunk_cache_memory", "lots"), ("chunk_cache_memory", "0"), ("chunk_max_tokens", "0")),
        *(("chunk_cache_eviction", "fifo"), ("chunk_mode", "random"), ("log_format", "xml")),
        ("chunk_cache_tiers", "host://?size=1GiB&timeout=-1"),
    ],
)
def test_bad_values_are_named(name, value, monkeypatch):
    with pytest.raises(ValidationError) as by_flag:
        load(flag(name), value)
    monkeypatch.setenv(f"TESSERA_{name.upper()}", value)
    with pytest.raises(ValidationError) as by_environment:
        load()
    for raised in (by_flag, by_environment):
        (error,) = raised.value.errors()
        assert (error["loc"], error["input"]) == ((name,), value)


def test_an_empty_variable_counts_as_none_and_an_empty_flag_does_not(monkeypatch):
    monkeypatch.setenv("TESSERA_CHUNK_SEPARATOR", "")
    assert load().chunk_separator is None
    with pytest.raises(ValidationError, match="chunk_separator"):
        load("--chunk-separator", "")


def test_every_setting_is_a_flag_with_help_unless_the_flag_is_vllms():
    parser = argparse.ArgumentParser()
    add_flags(parser)
    assert vars(parser.parse_args([])) == {}  # omitted flags don't override the environment
    text = parser.format_help()
    for name in Settings.model_fields:
        assert (f"--{name.replace('_', '-')} " in text) == (name not in VLLM_FLAGS)
    assert "64.0MiB" in text
    assert "15 %" in text


def test_help_shows_all_flags_on_one_screen(capsys):
    with pytest.raises(SystemExit) as ended:
        parse(["--help"])
    assert ended.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    shown = [line.split()[0] for line in lines if line.startswith("  --")]
    assert shown == [flag(name) for name in Settings.model_fields]
    assert len(lines) <= 50
    assert max(map(len, lines)) <= 110


def test_every_setting_has_a_user_story_in_the_order_of_the_help():
    table = (ROOT / "docs" / "operations.md").read_text().partition("## Settings")[2].partition("\n## ")[0]
    told = re.findall(r"^\| `(--[\w-]+)` \| [^|]+ \| [^|]+ \|$", table, re.MULTILINE)
    assert told == [flag(name) for name in Settings.model_fields]
