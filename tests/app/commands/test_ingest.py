# SPDX-License-Identifier: Apache-2.0
"""`tessera ingest` against a server of a few lines: whatever a file is, the others go on."""

import json
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import httpx
import pytest

from app.commands import ingest
from machine.http_client import http_client

Answer = Callable[[str, bytes], httpx.Response]


def stored(name: str, content: bytes) -> httpx.Response:
    """A server's answer about a file with one passage."""
    summary = {"files": {}, "hit": 0, "loaded": 0, "filled": 1, "waited": 0, "failed": 0, "displaced": 0}
    progress = {"index": 0, "file": name, "status": "filled", "progress": {"done": 1, "total": 1}}
    lines = [{"file": name, "status": "added", "passages": 1}, progress, {"summary": summary}]
    return httpx.Response(200, text="".join(json.dumps(line) + "\n" for line in lines))


def refused(status: int, message: str) -> httpx.Response:
    return httpx.Response(status, json={"error": {"message": message}})


class Server:
    """Keeps the files that it got; ``answer`` may be replaced."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.answer: Answer = stored

    def handle(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/rag/split":
            name, content = request.url.params["filename"], request.read()
            place = {"page": 2, "start": 0, "end": len(content)}
            chunk = {"id": "x", "title": "Guide › Setup", "text": content.decode(), "tokens": 7, "metadata": place}
            return httpx.Response(200, json={"chunks": [chunk]})
        found = re.search(rb'filename="(.*?)"\r\n.*?\r\n\r\n(.*)\r\n--', request.read(), re.DOTALL)
        assert found is not None
        name, content = found[1].decode(), found[2]
        answer = self.answer(name, content)
        if answer.status_code == 200:
            self.files[name] = content
        return answer


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    made = Server()
    transport = httpx.MockTransport(made.handle)
    monkeypatch.setattr(ingest, "http_client", partial(http_client, transport=transport))
    return made


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    def run(folder: Path, *flags: str) -> tuple[int, str]:
        code = ingest.main([str(folder), "--collection", "c", *flags])
        written = capsys.readouterr()
        return code, written.out + written.err

    return run


def write(folder: Path, **files: str) -> None:
    for name, content in files.items():
        path = folder / name.replace("__", "/").replace("_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


def test_files_of_all_folders_are_sent(server: Server, run, tmp_path: Path) -> None:
    write(tmp_path, a_md="A", b__c__d_txt="D", b__e_py="E")
    code, said = run(tmp_path)
    assert (code, server.files) == (0, {"a.md": b"A", "b/c/d.txt": b"D", "b/e.py": b"E"})
    assert "c: files: 3 added; passages: 3 computed, 0 already there" in said
    assert run(tmp_path / "b" / "e.py")[0] == 0
    assert list(server.files)[-1] == "e.py"


def test_what_is_left_out_is_listed_with_the_reason(server: Server, run, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    folder = tmp_path / "folder"
    write(outside, secret_txt="S")
    write(folder, a_txt="A", x_bin="x", _hidden__y_txt="y")
    (folder / "link.txt").symlink_to(outside / "secret.txt")
    (folder / "way").symlink_to(outside)
    (folder / "gone.txt").symlink_to("nowhere")
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


def test_a_link_that_takes_a_files_place_is_not_followed(server: Server, run, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    write(tmp_path, secret_txt="S")
    write(folder, a_txt="A", b_txt="B")

    def swap(name: str, content: bytes) -> httpx.Response:
        if name == "a.txt":
            (folder / "b.txt").unlink()
            (folder / "b.txt").symlink_to(tmp_path / "secret.txt")
        return stored(name, content)

    server.answer = swap
    code, said = run(folder)
    assert (code, server.files) == (1, {"a.txt": b"A"})
    assert "failed: b.txt: Too many levels of symbolic links" in said


def test_files_that_cannot_be_read_fail_alone(server: Server, run, tmp_path: Path) -> None:
    write(tmp_path, a_txt="A", gone_txt="G", z_txt="Z")
    for name in (b"caf\xe9.txt", b"new\nline.txt"):
        Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name)).write_text("x")

    def vanish(name: str, content: bytes) -> httpx.Response:
        (tmp_path / "gone.txt").unlink(missing_ok=True)
        return stored(name, content)

    server.answer = vanish
    code, said = run(tmp_path)
    assert (code, list(server.files)) == (1, ["a.txt", "z.txt"])
    assert "failed: gone.txt: No such file or directory" in said
    assert "failed: caf\\xe9.txt: its name is not UTF-8" in said
    assert "failed: new\\nline.txt: its name has control characters" in said


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads all files")
def test_files_without_permission_fail_alone(server: Server, run, tmp_path: Path) -> None:
    write(tmp_path, a_txt="A", b_txt="B")
    (tmp_path / "a.txt").chmod(0)
    assert "failed: a.txt: Permission denied" in run(tmp_path)[1]
    assert list(server.files) == ["b.txt"]


@pytest.mark.parametrize(
    "name", ["5.00\u202fPM.txt", "Bericht\u00a0Nr. 5.txt", "日本語\u3000資料.txt", "می\u200cخواهم.txt"]
)
def test_names_have_any_characters_but_control_characters(server: Server, run, tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("x")
    assert run(tmp_path)[0] == 0
    assert list(server.files) == [name]


def test_a_name_with_the_terminals_markup_is_shown_as_it_is(
    server: Server, run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as in a terminal, where a bar shows the name
    names = ["[] [x] [bold].txt", ":smile: [link=https:].txt"]
    (tmp_path / "[").mkdir()
    (tmp_path / "[" / "x] [bold].txt").write_text("below what looks like a closing tag: [/x]")
    for name in names:
        (tmp_path / name).write_text("x")
    code, said = run(tmp_path)
    assert (code, sorted(server.files)) == (0, sorted([*names, "[/x] [bold].txt"]))
    assert "[/x] [bold].txt" in said


@pytest.mark.parametrize("status", [400, 413, 422, 500])
def test_files_that_the_server_refuses_fail_alone(server: Server, run, tmp_path: Path, status: int) -> None:
    write(tmp_path, a_txt="A", b_txt="B")
    server.answer = lambda name, content: refused(status, "no.") if name == "a.txt" else stored(name, content)
    code, said = run(tmp_path)
    assert (code, list(server.files)) == (1, ["b.txt"])
    assert "failed: a.txt: no." in said


def test_a_connection_that_breaks_fails_that_file(server: Server, run, tmp_path: Path) -> None:
    write(tmp_path, a_txt="A", b_txt="B", c_txt="C")

    def cut(name: str, content: bytes) -> httpx.Response:
        if name == "a.txt":
            raise httpx.ReadError("reset")
        return (
            httpx.Response(200, text='{"file": "b.txt", "status": "added"}\n') if name == "b.txt" else stored(name, b"")
        )

    server.answer = cut
    code, said = run(tmp_path)
    assert (code, "failed: a.txt: reset" in said, "c.txt" in server.files) == (1, True, True)
    assert "failed: b.txt: the server ended its answer early" in said


def test_what_concerns_all_files_ends_the_command(server: Server, run, tmp_path: Path) -> None:
    write(tmp_path, a_txt="A", b_txt="B")
    server.answer = lambda name, content: refused(409, "another system prompt")
    code, said = run(tmp_path)
    assert (code, said.strip()) == (2, "tessera: http://127.0.0.1:8000: another system prompt")

    def closed(name: str, content: bytes) -> httpx.Response:
        raise httpx.ConnectError("refused")

    server.answer = closed
    code, said = run(tmp_path)
    assert (code, "refused" in said) == (2, True)


def test_a_dry_run_prints_passages_and_stores_nothing(server: Server, run, tmp_path: Path) -> None:
    write(tmp_path, a_md="One.\n  Two.", x_bin="x")
    code, said = run(tmp_path, "--dry-run")
    assert (code, server.files) == (0, {})
    assert "a.md #1: 7 tokens, page 2, Guide › Setup\n    One.\n      Two.\n" in said
    assert "left out: x.bin" in said


def test_a_collection_is_needed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        ingest.main([str(tmp_path)])
    assert "--collection" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags",
    [("--collection", "../chunks"), ("--collection", "bad/../name"), ("--collection", ""), ("--max-tokens", "15")],
)
def test_flags_that_no_server_takes_are_refused_before_any_file(
    server: Server, run, capsys: pytest.CaptureFixture[str], tmp_path: Path, flags: tuple[str, str]
) -> None:
    write(tmp_path, a_txt="A")
    with pytest.raises(SystemExit):
        run(tmp_path, *flags)
    assert (f"argument {flags[0]}: " in capsys.readouterr().err, server.files) == (True, {})


def test_a_server_without_a_scheme_is_told_once(run, tmp_path: Path) -> None:
    write(tmp_path, a_txt="A", b_txt="B")
    code, said = run(tmp_path, "--server", "127.0.0.1:8000")
    assert (code, said.count("missing an 'http://' or 'https://' protocol")) == (2, 1)


def test_an_empty_folder_and_a_missing_one(server: Server, run, tmp_path: Path) -> None:
    assert run(tmp_path)[0] == 0
    code, said = run(tmp_path / "missing")
    assert (code, "failed: missing: " in said) == (1, True)
