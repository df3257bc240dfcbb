# SPDX-License-Identifier: Apache-2.0
"""`tessera ingest` against a server of a few lines: whatever a file is, the others go on."""

import errno
import json
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import httpx
import pytest

from app.commands import ingest
from machine.http_client import http_client


def stored(name, status="added", computed=1):
    """A server's answer about a file with one passage."""
    summary = {"files": {}, "hit": 0, "loaded": 0, "filled": computed, "waited": 0, "failed": 0, "displaced": 0}
    progress = {"index": 0, "file": name, "status": "filled", "progress": {"done": 1, "total": 1}}
    lines = [{"file": name, "status": status, "passages": 1}, *[progress] * computed, {"summary": summary}]
    return httpx.Response(200, text="".join(json.dumps(line) + "\n" for line in lines))


def refused(status, message):
    return httpx.Response(status, text=json.dumps({"error": {"message": message}}))


class Server:
    """Keeps the files that it got.

    For some, it gives other ``answers``: a response, an error, or a function that is called before it is kept.
    """

    def __init__(self):
        self.files = {}
        self.answers = {}

    def handle(self, request):
        if request.url.path == "/v1/rag/split":
            content = request.read()
            place = {"page": 2, "start": 0, "end": len(content)}
            chunk = {"id": "x", "title": "Guide › Setup", "text": content.decode(), "tokens": 7, "metadata": place}
            return httpx.Response(200, json={"chunks": [chunk]})
        found = re.search(rb'filename="(.*?)"\r\n.*?\r\n\r\n(.*)\r\n--', request.read(), re.DOTALL)
        name, content = found[1].decode(), found[2]
        answer = self.answers.get(name)
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, httpx.Response):
            return answer
        if answer is not None:
            answer()
        self.files[name] = content
        return stored(name)


@pytest.fixture
def server(monkeypatch):
    made = Server()
    transport = httpx.MockTransport(made.handle)
    monkeypatch.setattr(ingest, "http_client", partial(http_client, transport=transport))
    return made


@pytest.fixture
def run(capsys):
    def run(folder, *flags):
        """The exit code, and what was said."""
        code = ingest.main([str(folder), "--collection", "c", *flags])
        written = capsys.readouterr()
        return code, written.out + written.err

    return run


def write(folder, **files):
    for name, content in files.items():
        path = folder / name.replace("__", "/").replace("_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


def nest(folder, name, depth):
    """Makes folders within one another, which may be too deep for a path."""
    at = os.open(folder, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir(name, dir_fd=at)
        below = os.open(name, os.O_RDONLY, dir_fd=at)
        os.close(at)
        at = below
    os.close(at)


def test_files_of_all_folders_are_sent(server, run, tmp_path):
    assert run(tmp_path)[0] == 0  # an empty one
    code, said = run(tmp_path / "missing")
    assert (code, "failed: missing: " in said) == (1, True)
    write(tmp_path, a_md="A", b__c__d_txt="D", b__e_py="E")
    code, said = run(tmp_path)
    assert (code, server.files) == (0, {"a.md": b"A", "b/c/d.txt": b"D", "b/e.py": b"E"})
    assert "c: files: 3 added; passages: 3 computed, 0 already there" in said
    assert run(tmp_path / "b" / "e.py")[0] == 0
    assert list(server.files)[-1] == "e.py"
    server.answers["a.md"] = stored("a.md", "unchanged", 0)
    assert "files: 2 added, 1 unchanged; passages: 2 computed" in run(tmp_path)[1]


def test_what_is_left_out_is_listed_with_the_reason(server, run, tmp_path):
    outside, folder = tmp_path / "outside", tmp_path / "folder"
    write(outside, secret_txt="S")
    write(folder, a_txt="A", x_bin="x", _hidden__y_txt="y")
    for link, target in (("link.txt", outside / "secret.txt"), ("way", outside), ("gone.txt", "nowhere")):
        (folder / link).symlink_to(target)
    os.mkfifo(folder / "pipe.txt")
    code, said = run(folder)
    assert (code, list(server.files)) == (1, ["a.txt"])
    for line in (
        "left out: x.bin: its type can't be read",
        "left out: link.txt: a symbolic link",
        "left out: way: a symbolic link",
        "left out: gone.txt: a symbolic link",
        "failed: pipe.txt: not a regular file",
    ):
        assert line in said, said


def test_files_that_cannot_be_read_fail_alone_and_a_link_in_their_place_is_not_followed(server, run, tmp_path):
    folder = tmp_path / "folder"
    write(tmp_path, secret_txt="S")
    write(folder, a_txt="A", gone_txt="G", link_txt="L", z_txt="Z")
    for name in (b"caf\xe9.txt", b"new\nline.txt"):
        Path(os.fsdecode(os.fsencode(folder) + b"/" + name)).write_text("x")

    def vanish():
        (folder / "gone.txt").unlink()
        (folder / "link.txt").unlink()
        (folder / "link.txt").symlink_to(tmp_path / "secret.txt")

    server.answers["a.txt"] = vanish
    code, said = run(folder)
    assert (code, server.files) == (1, {"a.txt": b"A", "z.txt": b"Z"})
    for line in (
        "failed: gone.txt: No such file or directory",
        "failed: link.txt: Too many levels of symbolic links",
        "failed: caf\\xe9.txt: its name is not UTF-8",
        "failed: new\\nline.txt: its name has control characters",
    ):
        assert line in said, said


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads all files")
def test_files_without_permission_fail_alone(server, run, tmp_path):
    write(tmp_path, a_txt="A", b_txt="B")
    (tmp_path / "a.txt").chmod(0)
    assert "failed: a.txt: Permission denied" in run(tmp_path)[1]
    assert list(server.files) == ["b.txt"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root enters all folders")
def test_folders_that_cannot_be_entered_are_left_out(server, run, tmp_path):
    write(tmp_path, a_txt="A", b__b_txt="B", z_txt="Z")
    (tmp_path / "b").chmod(0o400)
    code, said = run(tmp_path)
    (tmp_path / "b").chmod(0o700)
    assert (code, list(server.files)) == (0, ["a.txt", "z.txt"])
    assert "left out: b/b.txt: Permission denied" in said


@pytest.mark.parametrize("flags", [(), ("--dry-run",)])
@pytest.mark.parametrize("number", [None, errno.EACCES])
def test_what_cannot_be_looked_at_is_left_out(server, run, tmp_path, monkeypatch, flags, number):
    """A tree that is deeper than any path, or entries without permission to look at them."""
    write(tmp_path, a_txt="A", z_txt="Z")
    reason = os.strerror(number or errno.ENAMETOOLONG)
    if number is None:
        nest(tmp_path, "d" * 200, 30)
    else:
        (tmp_path / "d").write_text("D")
        look = Path.lstat

        def refused(path):
            if path.name == "d":
                raise OSError(number, reason, str(path))
            return look(path)

        monkeypatch.setattr(Path, "lstat", refused)
    code, said = run(tmp_path, *flags)
    assert (code, len(re.findall(f"left out: d.*: {reason}", said))) == (0, 1)
    assert list(server.files) == ([] if flags else ["a.txt", "z.txt"])


def test_folders_may_be_nested_deeper_than_calls(server, run, tmp_path):
    write(tmp_path, z_txt="Z")
    nest(tmp_path, "d", sys.getrecursionlimit() + 100)
    code, _ = run(tmp_path)
    subprocess.run(["rm", "-r", tmp_path / "d"], check=True)  # Python's own removal is recursive
    assert (code, list(server.files)) == (0, ["z.txt"])


@pytest.mark.parametrize(
    "name", ["5.00\u202fPM.txt", "Bericht\u00a0Nr. 5.txt", "日本語\u3000資料.txt", "می\u200cخواهم.txt"]
)
def test_names_have_any_characters_but_control_characters(server, run, tmp_path, name):
    (tmp_path / name).write_text("x")
    assert run(tmp_path)[0] == 0
    assert list(server.files) == [name]


def test_a_name_with_the_terminals_markup_is_shown_as_it_is(server, run, tmp_path, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # as in a terminal, where a bar shows the name
    names = ["[] [x] [bold].txt", ":smile: [link=https:].txt", "[/x] [bold].txt"]
    (tmp_path / "[").mkdir()
    for name in names:
        (tmp_path / name).write_text("what looks like a closing tag: [/x]")
    code, said = run(tmp_path)
    assert (code, sorted(server.files)) == (0, sorted(names))
    assert "[/x] [bold].txt" in said


@pytest.mark.parametrize("shown", ["\\u2028", "\\u202e", "\\x1b", "\\ud800"])
def test_names_and_reasons_do_not_steer_the_terminal(server, run, tmp_path, shown):
    written = json.loads(f'"{shown}"'.replace("\\x", "\\u00"))
    write(tmp_path, a_txt="A", b_txt="B")
    server.answers["a.txt"] = refused(400, f"a{written}b")
    assert f"failed: a.txt: a{shown}b" in run(tmp_path)[1]
    server.answers["b.txt"] = refused(409, f"c{written}d")
    assert f"8000: c{shown}d" in run(tmp_path)[1]
    if shown != "\\ud800":
        (tmp_path / f"e{written}.bin").touch()
        assert f"left out: e{shown}.bin: " in run(tmp_path, "--dry-run")[1]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        *((refused(status, "no."), "no.") for status in (400, 413, 422, 500)),
        (httpx.ReadError("reset"), "reset"),
        (httpx.Response(200, text='{"file": "a.txt", "status": "added"}\n'), "the server ended its answer early"),
    ],
    ids=range(6),
)
def test_files_that_the_server_refuses_or_breaks_off_fail_alone(server, run, tmp_path, answer, reason):
    write(tmp_path, a_txt="A", b_txt="B")
    server.answers["a.txt"] = answer
    code, said = run(tmp_path)
    assert (code, list(server.files)) == (1, ["b.txt"])
    assert f"failed: a.txt: {reason}" in said


@pytest.mark.parametrize(
    ("answer", "reason"),
    [(refused(409, "another system prompt"), "another system prompt"), (httpx.ConnectError("refused"), "refused")],
)
def test_what_concerns_all_files_ends_the_command(server, run, tmp_path, answer, reason):
    write(tmp_path, a_txt="A", b_txt="B")
    server.answers["a.txt"] = answer
    code, said = run(tmp_path)
    assert (code, said.strip()) == (2, f"tessera: http://127.0.0.1:8000: {reason}")


def test_a_dry_run_prints_passages_and_stores_nothing(server, run, tmp_path):
    write(tmp_path, a_md="One.\n  Two.", x_bin="x")
    code, said = run(tmp_path, "--dry-run")
    assert (code, server.files) == (0, {})
    assert "a.md #1: 7 tokens, page 2, Guide › Setup\n    One.\n      Two.\n" in said
    assert "left out: x.bin" in said


def test_a_collection_is_needed(capsys, tmp_path):
    with pytest.raises(SystemExit):
        ingest.main([str(tmp_path)])
    assert "--collection" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "value"),
    [("--collection", "../chunks"), ("--collection", "bad/../name"), ("--collection", ""), ("--max-tokens", "15")],
)
def test_flags_that_no_server_takes_are_refused_before_any_file(server, run, capsys, tmp_path, flag, value):
    write(tmp_path, a_txt="A")
    with pytest.raises(SystemExit):
        run(tmp_path, flag, value)
    assert (f"argument {flag}: " in capsys.readouterr().err, server.files) == (True, {})


def test_a_server_without_a_scheme_is_told_once(run, tmp_path):
    write(tmp_path, a_txt="A", b_txt="B")
    code, said = run(tmp_path, "--server", "127.0.0.1:8000")
    assert (code, said.count("missing an 'http://' or 'https://' protocol")) == (2, 1)
