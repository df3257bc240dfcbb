# SPDX-License-Identifier: Apache-2.0
"""Ports and last words of server processes."""

import socket
import threading

import pytest

from machine.followed import echoed, followed
from machine.server_process import is_free, last_words, reserved_port


def test_a_reserved_port_is_for_the_server_that_it_is_reserved_for():
    with reserved_port() as reserved:
        port = reserved.getsockname()[1]
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        assert is_free(port)
        with socket.create_server(("127.0.0.1", port)):  # sets SO_REUSEADDR
            assert not is_free(port)
            socket.create_connection(("127.0.0.1", port)).close()


@pytest.mark.parametrize(
    ("log", "words"),
    [
        ("one\ntwo \n\n", "two"),
        ("\n", "no output"),
        ("tessera: failed: too little memory\na process that ends later\n", "tessera: failed: too little memory"),
    ],
)
def test_the_last_words_are_the_reason_if_there_is_one(log, words, tmp_path):
    (tmp_path / "log").write_text(log)
    assert last_words(tmp_path / "log") == words


# Lines of a file that is being written


def test_whole_lines_are_taken_while_they_come_and_at_the_end(tmp_path):
    log, taken, first = tmp_path / "log", [], threading.Event()
    log.write_text("one\nha")
    with followed(log, lambda line: (taken.append(line), first.set())):
        assert first.wait(30)
        assert taken == ["one"]
        with log.open("a") as more:
            more.write("lf\nno end")
    assert taken == ["one", "half"]


def test_a_servers_results_and_warnings_are_repeated_and_its_clock_is_not(tmp_path, capsys):
    log = tmp_path / "log"
    log.write_text(
        "tessera: loading …\ntessera: loading … 5 s\ntessera: loading: 7.0 s\n(EngineCore pid=1) WARNING x\n"
    )
    with echoed(log, "replica-1: "):
        pass
    assert capsys.readouterr() == ("", "replica-1: tessera: loading: 7.0 s\nreplica-1: (EngineCore pid=1) WARNING x\n")
