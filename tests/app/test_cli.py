# SPDX-License-Identifier: Apache-2.0
"""The command's exit codes and messages."""

import argparse
import errno
import os
import sys
from contextlib import suppress

import pydantic
import pytest

pytest.importorskip("vllm")

from app import arguments, cli
from app.commands import serve as serve_command
from app.settings import Settings
from engine_ext.start.startup import RequiredCacheError
from engine_ext.start.support import UnsupportedFlagError


def test_serve_has_vllms_flags_and_ours():
    args = arguments.parse(["model", "--chunk-cache-memory", "1GiB", "--log-level", "INFO", "--max-model-len", "100"])
    assert (args.chunk_cache_memory, args.log_level, args.max_model_len) == ("1GiB", "INFO", 100)
    assert args.enable_prompt_tokens_details  # usage tells cached tokens unless told otherwise
    assert not arguments.parse(["model", "--no-enable-prompt-tokens-details"]).enable_prompt_tokens_details


COMMANDS = [*sorted(cli._COMMANDS.keys() - {"serve"}), "cache ls", "cache gc"]
"""Without ``serve``, which changes the process's logging first."""


@pytest.mark.parametrize("arguments", ["", "-h", "help", "--help", *(f"{command} --help" for command in COMMANDS)])
def test_help_is_on_standard_output(arguments, capsys):
    with suppress(SystemExit):  # argparse's own
        assert cli.main(arguments.split()) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("usage: tessera ")
    assert captured.err == ""


@pytest.mark.parametrize("command", ["server", "--port", ""])
def test_an_unknown_command_is_a_usage_error(command, capsys):
    assert cli.main([command]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"tessera: unknown command {command!r}\nusage: tessera serve")
    assert captured.out == ""


@pytest.fixture
def serve(monkeypatch):
    """Runs ``tessera serve`` with the server's ``run`` replaced; returns the exit code."""
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "WARNING")

    def serve(error: BaseException | None = None, *, code: int = 0, **settings) -> int:
        async def run(args, settings):
            if error is not None:
                raise error
            return code

        monkeypatch.setattr("app.server.run", run)
        args = argparse.Namespace(model_tag="some/model", port=8000, **settings)
        monkeypatch.setattr(serve_command, "parse", lambda _: args)
        return cli.main(["serve"])

    return serve


@pytest.mark.parametrize("code", [0, 1], ids=["until the end", "until the engine died"])
def test_the_servers_exit_code_is_the_commands(serve, capsys, code):
    assert serve(code=code) == code
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (UnsupportedFlagError("--x can't be used"), 2, "--x can't be used"),
        (OSError(errno.EADDRINUSE, "Address already in use"), 2, "port 8000 is in use; choose another with --port"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_what_ends_the_start_is_one_line(serve, capsys, error, code, words):
    assert serve(error) == code
    assert capsys.readouterr().err == f"tessera: {words}\n"


def test_a_bad_setting_names_its_flag(serve, capsys):
    assert serve(chunk_max_tokens="0") == 2
    err = capsys.readouterr().err
    assert err == "tessera: --chunk-max-tokens: Input should be greater than or equal to 1 (got '0')\n"


def test_an_unknown_variable_is_named_and_the_known_are_listed(serve, capsys, monkeypatch):
    monkeypatch.setenv("TESSERA_CHUNK_CASH", "1")
    monkeypatch.setenv("TESSERAE", "not ours")
    assert serve() == 2
    said = capsys.readouterr().err
    assert said.startswith("tessera: unknown TESSERA_CHUNK_CASH; there are ")
    assert all(f"TESSERA_{name.upper()}" in said for name in Settings.model_fields)


def test_a_start_without_the_required_cache_is_one_line(serve, capsys):
    assert serve(RequiredCacheError("layer 3 uses ALiBi")) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("tessera: not started (--chunk-cache require). CHUNK CACHE OFF: no chunk is reused, ")
    assert "Reason: layer 3 uses ALiBi. What helps: no flag changes that: take another model" in line


def test_other_errors_of_the_system_are_not_hidden(serve):
    with pytest.raises(OSError, match="full"):
        serve(OSError(errno.ENOSPC, "full"))


LOG = """
(EngineCore pid=7) ERROR 11-22 10:17:33 [core.py:953] Traceback (most recent call last):
(EngineCore pid=7) ERROR 11-22 10:17:33 [core.py:953] ValueError: To serve one request of max seq len 8192, take more.
(EngineCore pid=7) ERROR 11-22 10:17:33 [core.py:953] Exception: WorkerProc initialization failed due to another.
Traceback (most recent call last):
  raise ValueError("x")
ValueError: To serve one request of max seq len 8192, take more.
RuntimeError: Engine core initialization failed. See root cause above.
"""


def test_a_failed_start_says_why_and_where_vllms_log_is(serve, capsys, monkeypatch, tmp_path):
    log = tmp_path / "vllm.log"
    log.write_text(LOG)
    monkeypatch.setenv("_TESSERA_VLLM_LOG", str(log))
    assert serve(RuntimeError("Engine core initialization failed. See root cause above.")) == 1
    last, reason = capsys.readouterr().err.splitlines()[-1], "To serve one request of max seq len 8192, take more."
    assert last == f"tessera: failed: ValueError: {reason}; vLLM's log is in {log}"


def test_a_file_that_can_not_be_written_is_no_reason_not_to_start(serve, capsys, monkeypatch, tmp_path):
    (tmp_path / "vllm").touch()
    monkeypatch.setenv("TESSERA_HOME", str(tmp_path))
    monkeypatch.delenv("VLLM_LOGGING_LEVEL")
    assert serve() == 0
    assert "vLLM's log is left out: [Errno 17] File exists" in capsys.readouterr().err
    assert os.environ.pop("VLLM_LOGGING_LEVEL") == "WARNING"


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ModuleNotFoundError("No module named 'vllm'", name="vllm"), "needs vllm"),
        (
            ModuleNotFoundError("No module named 'vllm.a'", name="vllm.a"),
            "can't use vllm 9.9 (No module named 'vllm.a')",
        ),
        (ImportError("cannot import name 'x'", name="vllm.y"), "can't use vllm 9.9 (cannot import name 'x')"),
        (ImportError("libnuma.so.1: none", name="torch._C"), "can't use torch 9.9 (libnuma.so.1: none)"),
    ],
)
def test_without_the_engine_that_it_needs_a_start_says_what_is_missing(error, message, capsys, monkeypatch):
    def parse(_):
        raise error

    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "WARNING")
    monkeypatch.setattr(serve_command, "parse", parse)
    monkeypatch.setattr(cli, "version_of", lambda module: "9.9")
    assert cli.main(["serve"]) == 2
    requirement = "pip install 'tessera-rag[cpu]' (or [cuda], [ascend])"
    assert capsys.readouterr().err == f"tessera: tessera serve {message}: {requirement}\n"


def test_a_refused_engine_option_is_said_as_vllm_says_it(serve, capsys):
    """vLLM's configuration uses pydantic; errors of a whole configuration have no location."""

    @pydantic.dataclasses.dataclass
    class ModelConfig:
        max_model_len: int

        @pydantic.model_validator(mode="after")
        def check(self):
            raise ValueError("max_model_len is greater than the model's")

    with pytest.raises(pydantic.ValidationError) as refusal:
        ModelConfig(10)
    assert serve(refusal.value) == 2
    assert "max_model_len is greater than the model's" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("module", "extra"), [("torch", "'tessera-rag[cpu]' (or [cuda], [ascend])"), ("peft", "'tessera-rag[adapt]'")]
)
def test_a_command_whose_extra_is_not_installed_names_it(module, extra, capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, "training.adapt.student", raising=False)
    (tmp_path / "manuals").mkdir()
    flags = [
        f"--{name}={tmp_path / file}" for name, file in {"documents": "manuals", "output": "o", "work": "w"}.items()
    ]
    assert cli.main(["adapt", "some/model", *flags]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == f"tessera: tessera adapt needs {module}: pip install {extra}"


def test_other_missing_modules_are_defects(monkeypatch):
    monkeypatch.setitem(sys.modules, "app.commands.key", None)
    with pytest.raises(ModuleNotFoundError):
        cli.main(["key"])
