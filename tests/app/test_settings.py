# SPDX-License-Identifier: Apache-2.0
"""Precedence of settings: flags, then environment, then defaults."""

import argparse
import os
import re

import pytest
from pydantic import ValidationError

from app.arguments import parse
from app.settings import VLLM_FLAGS, Settings, UnknownSettingError, add_flags, add_missing_flags, flag, load_settings
from cache.positions.layout import PositionStrategy
from machine.server_process import ROOT


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch):
    for name in list(os.environ):
        if name.startswith("TESSERA_"):
            monkeypatch.delenv(name)


def load(*flags: str) -> Settings:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return load_settings(parser.parse_args(flags))


def test_defaults():
    settings = load()
    assert settings.chunk_cache == "on"
    assert settings.chunk_cache_memory is None
    assert settings.chunk_cache_eviction == "s3fifo"
    assert settings.chunk_position_strategy is None
    assert settings.chunk_separator is None


def test_the_environment_is_read(monkeypatch):
    monkeypatch.setenv("TESSERA_CHUNK_CACHE", "off")
    monkeypatch.setenv("TESSERA_CHUNK_MAX_TOKENS", "32")
    monkeypatch.setenv("TESSERA_CHUNK_POSITION_STRATEGY", "offset")
    monkeypatch.setenv("TESSERA_HOME", "/somewhere")
    settings = load()
    assert (settings.chunk_cache, settings.chunk_max_tokens) == ("off", 32)
    assert settings.chunk_position_strategy is PositionStrategy.OFFSET


def test_flags_override_the_environment(monkeypatch):
    monkeypatch.setenv("TESSERA_CHUNK_CACHE", "off")
    monkeypatch.setenv("TESSERA_CHUNK_CACHE_EVICTION", "lru")
    monkeypatch.setenv("TESSERA_CHUNK_SEPARATOR", "|")
    settings = load("--chunk-cache", "require", "--chunk-separator", " # # ")
    assert (settings.chunk_cache, settings.chunk_separator) == ("require", " # # ")
    assert settings.chunk_cache_eviction == "lru"


@pytest.mark.parametrize(
    ("flags", "use"),
    [
        (["--chunk-cache", "on"], "on"),
        (["--chunk-cache=off"], "off"),
        (["--chunk-cache"], "on"),  # "chunk-cache: on" in a YAML file is true
        (["--no-chunk-cache"], "off"),
        (["--no-chunk-cache", "--chunk-cache", "require"], "require"),
    ],
)
def test_the_cache_is_on_off_or_required(flags, use):
    assert load(*flags).chunk_cache == use


def test_vllms_log_level_is_ours_too(monkeypatch):
    monkeypatch.setenv("TESSERA_LOG_LEVEL", "ERROR")
    assert load().log_level == "ERROR"
    assert load_settings(argparse.Namespace(log_level="INFO")).log_level == "INFO"


@pytest.mark.parametrize("has_it", [False, True])
def test_there_is_a_log_level_also_where_vllm_has_none(has_it):
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
    ("flag", "value"),
    [
        ("chunk-cache", "0"),
        ("chunk-cache-memory", "lots"),
        ("chunk-cache-memory", "0"),
        ("chunk-max-tokens", "0"),
        ("chunk-max-tokens", "many"),
        ("chunk-cache-eviction", "fifo"),
        ("chunk-position-strategy", "random"),
        ("chunk-cache-tier-timeout", "-1"),
        ("log-format", "xml"),
    ],
)
def test_bad_values_are_named(flag, value, monkeypatch):
    name = flag.replace("-", "_")
    with pytest.raises(ValidationError) as by_flag:
        load(f"--{flag}", value)
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


def test_a_secret_is_not_shown(monkeypatch):
    monkeypatch.setenv("TESSERA_PEER_SECRET", "sixteen letters or more")
    assert load().peer_secret.get_secret_value() == "sixteen letters or more"
    assert "sixteen" not in repr(load()) + str(load().model_dump())


def test_unknown_variables_are_errors_that_list_the_known(monkeypatch):
    monkeypatch.setenv("TESSERA_CHUNK_CASH", "1")
    monkeypatch.setenv("TESSERAE", "not ours")
    with pytest.raises(UnknownSettingError) as raised:
        load()
    message = str(raised.value)
    assert message.startswith("unknown TESSERA_CHUNK_CASH; there are ")
    assert all(f"TESSERA_{name.upper()}" in message for name in Settings.model_fields)


def test_unknown_keys_are_errors_and_settings_do_not_change():
    with pytest.raises(ValidationError, match="chunk_cash"):
        Settings(chunk_cash=1)
    with pytest.raises(ValidationError, match="frozen"):
        Settings().chunk_cache = False


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
