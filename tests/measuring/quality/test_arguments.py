# SPDX-License-Identifier: Apache-2.0
"""The command lines of `tessera eval` and `tessera calibrate`."""

from pathlib import Path

import pytest

from app.models.default_model import DEFAULT_DTYPE
from app.modes import evaluated, special
from measuring.kit.arguments import UsageError
from measuring.quality.arguments import parse

DTYPE = ("--dtype", DEFAULT_DTYPE)
SERVER = ["--server", "http://localhost:8000"]


def test_arguments_for_the_server_follow_two_dashes_and_modes_are_in_their_own_order():
    args = parse(["m", "--questions", "q", "--limit", "5", "--", "--max-tokens", "x", "--", "-y"])
    assert (args.limit, args.max_tokens) == (5, 64)
    assert args.server_arguments == (*DTYPE, "--max-tokens", "x", "--", "-y")
    modes = "offset+25%,offset%25,offset,offset+15%,full,offset"
    assert parse(["--demo", "--modes", modes]).modes == ("full", "offset", "offset%25", "offset+15%", "offset+25%")


@pytest.mark.parametrize(
    ("given", "output"),
    [
        (["m"], "eval-plain-english"),
        ([*SERVER, "--long-chunks"], "eval-plain-english-long"),
        (["--demo"], "eval-demo"),
        (["m", "--demo"], "eval-demo"),
        ([*SERVER, "--demo"], "eval-demo"),
    ],
)
def test_results_are_named_after_the_questions(given, output):
    assert parse(given).output == Path("results", output)


def test_a_calibration_has_every_mode():
    args = parse(["m", "--questions", "data/q.jsonl"], "calibrate")
    everywhere = ("full", "shared", "parallel", "offset")
    assert evaluated(args.calibrates, special({"measures_attention": False})) == everywhere
    more = ("offset%50", "offset%25", "offset~15%", "offset+15%", "offset%50+15%")
    assert evaluated(args.calibrates, special({"measures_attention": True})) == (*everywhere, *more)
    assert (args.tolerance, args.profile, args.output) == (2.0, None, Path("results/calibrate-q"))


@pytest.mark.parametrize(
    ("command", "argv", "message"),
    [
        ("calibrate", ["--demo", "--modes", "shared,offset"], "full attention is what others are compared with"),
        ("calibrate", ["--demo", "--tolerance", "-1"], "argument --tolerance: must be from 0 to 100"),
        ("calibrate", ["--demo", "--tolerance", "x"], "argument --tolerance: invalid number value: 'x'"),
        ("calibrate", ["--demo", *SERVER], "unrecognized arguments: --server"),
        ("eval", ["--questions", "q"], "give MODEL, or --server URL"),
        ("eval", ["m", "--long-chunks", "--demo"], "--long-chunks is for the questions in plain English"),
        ("eval", ["m", *SERVER, "--questions", "q"], "give either MODEL or --server"),
        ("eval", ["m", "--questions", "q", "--demo"], "give either --questions or --demo"),
        ("eval", [*SERVER, "--", "--dtype", "x"], "arguments after -- are for the server that MODEL starts"),
        ("eval", ["--demo", "--limit", "0"], "argument --limit: must be at least 1"),
        ("eval", ["--demo", "--concurrency", "x"], "argument --concurrency: invalid whole number value: 'x'"),
        ("eval", ["--demo", "--modes", "full,fast"], "argument --modes: unknown mode 'fast'; there are full, shared, "),
        ("eval", ["--demo", "--modes", ""], "argument --modes: unknown mode ''; there are full, shared, parallel, off"),
        ("eval", ["--server", "localhost"], "argument --server: 'localhost' does not begin with http:// or https://"),
        ("eval", ["--demo", "--refusal", "The"], "argument --refusal: needs a word besides a, an and the"),
        ("eval", ["--demo", "--max-token", "5"], "unrecognized arguments: --max-token"),
        ("eval", ["m", "n", "--demo"], "unrecognized arguments: n"),
        (
            "eval",
            ["m", "--questions", "q", "--chunks", "2"],
            "a question file has its own numbers of chunks: leave out",
        ),
        ("eval", ["m", "--chunks", "2,1"], "argument --chunks: must be at least 2"),
        ("eval", ["m", "--chunks", "2,x"], "argument --chunks: invalid list of numbers value: '2,x'"),
        ("eval", ["m", "--long-chunks", "--chunks", "2,32"], "--long-chunks has at most 26 chunks"),
    ],
    ids=str,
)
def test_what_is_wrong_is_said_in_one_line(command, argv, message):
    with pytest.raises(UsageError) as raised:
        parse(argv, command)
    assert str(raised.value).startswith(message)
    assert str(raised.value).endswith(f"(tessera {command} --help shows the options)")


@pytest.mark.parametrize("command", ["eval", "calibrate"])
def test_the_help_can_be_formatted_and_names_exit_statuses(command, capsys):
    with pytest.raises(SystemExit) as raised:
        parse(["--help"], command)
    assert raised.value.code == 0
    assert "130 when interrupted" in capsys.readouterr().out
