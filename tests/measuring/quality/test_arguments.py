# SPDX-License-Identifier: Apache-2.0
"""The command line of `tessera eval`."""

import re
from pathlib import Path

import pytest

from app.models.default_model import DEFAULT_DTYPE
from app.modes import evaluated, special
from measuring.kit.arguments import UsageError
from measuring.quality.arguments import parse

DTYPE = ("--dtype", DEFAULT_DTYPE)
SERVER = ["--server", "http://localhost:8000"]


def test_what_is_not_given():
    args = parse(["m", "--questions", "data/q.jsonl"])
    assert (args.model, args.server, args.server_arguments) == ("m", None, DTYPE)
    assert (args.questions, args.format, args.demo, args.limit) == (Path("data/q.jsonl"), "auto", False, None)
    assert (args.modes, args.max_tokens, args.concurrency) == (None, 64, 1)
    assert evaluated(args.calibrates, ["offset%25"]) == ("full", "shared", "parallel", "offset")
    assert (args.output, args.overwrite, args.refusal) == (Path("results/eval-q"), False, "I don't know")
    assert args.chunks == (2, 4, 8, 16)


def test_arguments_for_the_server_follow_two_dashes():
    args = parse(["m", "--questions", "q", "--limit", "5", "--", "--max-tokens", "x", "--", "-y"])
    assert (args.limit, args.max_tokens) == (5, 64)
    assert args.server_arguments == (*DTYPE, "--max-tokens", "x", "--", "-y")


@pytest.mark.parametrize("given", [[], ["m"], SERVER])
def test_the_demo_can_have_any_model(given):
    args = parse(["--demo", *given])
    assert args.output == Path("results/eval-demo")


@pytest.mark.parametrize(
    ("given", "output"),
    [
        (["m"], "eval-plain-english"),
        ([*SERVER, "--long-chunks"], "eval-plain-english-long"),
        (["m", "--demo"], "eval-demo"),
    ],
)
def test_without_a_file_questions_are_in_plain_english(given, output):
    args = parse(given)
    assert args.questions is None
    assert args.output == Path("results", output)


def test_modes_are_in_their_own_order():
    modes = "offset+25%,offset%25,offset,offset+15%,full,offset"
    assert parse(["--demo", "--modes", modes]).modes == ("full", "offset", "offset%25", "offset+15%", "offset+25%")


def test_a_calibration_has_every_mode():
    args = parse(["m", "--questions", "data/q.jsonl"], "calibrate")
    everywhere = ("full", "shared", "parallel", "offset")
    assert args.modes is None
    assert evaluated(args.calibrates, special({"measures_attention": False})) == everywhere
    more = ("offset%50", "offset%25", "offset+15%", "offset%50+15%", "offset+25%")
    assert evaluated(args.calibrates, special({"measures_attention": True})) == (*everywhere, *more)
    assert (args.tolerance, args.profile, args.output) == (2.0, None, Path("results/calibrate-q"))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--demo", "--modes", "shared,offset"], "full attention is what others are compared with"),
        (["--demo", "--tolerance", "-1"], "argument --tolerance: must be from 0 to 100"),
        (["--demo", "--tolerance", "x"], "argument --tolerance: invalid number value: 'x'"),
        (["--demo", *SERVER], "unrecognized arguments: --server"),
    ],
    ids=str,
)
def test_what_is_wrong_with_a_calibration(argv, message):
    with pytest.raises(UsageError, match=re.escape(message)) as raised:
        parse(argv, "calibrate")
    assert "tessera calibrate --help" in str(raised.value)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "give MODEL, or --server URL"),
        (["m", "--long-chunks", "--demo"], "--long-chunks is for the questions in plain English"),
        (["--questions", "q"], "give MODEL, or --server URL"),
        (["m", *SERVER, "--questions", "q"], "give either MODEL or --server"),
        (["m", "--questions", "q", "--demo"], "give either --questions or --demo"),
        ([*SERVER, "--demo", "--", "--dtype", "float32"], "arguments after -- are for the server that MODEL starts"),
        (["--demo", "--limit", "0"], "argument --limit: must be at least 1"),
        (["--demo", "--concurrency", "x"], "argument --concurrency: invalid whole number value: 'x'"),
        (
            ["--demo", "--modes", "full,fast"],
            "argument --modes: unknown mode 'fast'; there are full, shared, parallel, offset",
        ),
        (["--demo", "--modes", ""], "argument --modes: unknown mode ''; there are full, shared, parallel, offset"),
        (["--demo", "--server", "localhost"], "argument --server: 'localhost' does not begin with http:// or https://"),
        (["--demo", "--refusal", "The"], "argument --refusal: needs a word besides a, an and the"),
        (["--demo", "--format", "csv"], "argument --format: invalid choice: 'csv'"),
        (["--demo", "--max-token", "5"], "unrecognized arguments: --max-token"),
        (["m", "n", "--demo"], "unrecognized arguments: n"),
        (
            ["m", "--questions", "q", "--chunks", "2"],
            "a question file has its own numbers of chunks: leave out --chunks",
        ),
        (["m", "--chunks", "2,1"], "argument --chunks: must be at least 2"),
        (["m", "--chunks", "2,x"], "argument --chunks: invalid list of numbers value: '2,x'"),
        (["m", "--long-chunks", "--chunks", "2,32"], "--long-chunks has at most 26 chunks"),
    ],
    ids=str,
)
def test_what_is_wrong_is_said_in_one_line(argv, message):
    with pytest.raises(UsageError) as raised:
        parse(argv)
    assert str(raised.value).startswith(message)
    assert str(raised.value).endswith("(tessera eval --help shows the options)")


def test_the_help_names_every_format_and_exit_status(capsys):
    with pytest.raises(SystemExit) as raised:
        parse(["--help"])
    text = capsys.readouterr().out
    assert raised.value.code == 0
    assert all(word in text for word in ("hotpotqa", "musique", "longbench", "130", "--chat-template", "results.jsonl"))
