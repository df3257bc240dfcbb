# SPDX-License-Identifier: Apache-2.0
"""Ports and last words of server processes."""

import socket

import pytest

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
