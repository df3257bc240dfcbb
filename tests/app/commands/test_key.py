# SPDX-License-Identifier: Apache-2.0
"""`tessera key`."""

from app.access.tenants import Tenants, parse_tenants
from app.commands.key import main


def made(capsys, *arguments):
    assert main(arguments) == 0
    said = capsys.readouterr()
    return said.err.rsplit(" ", 1)[1].strip(), said.out


def test_what_it_prints_is_a_section_that_the_key_opens(capsys):
    key, section = made(capsys, "acme")
    assert Tenants(parse_tenants(section)).of_key(key).name == "acme"


def test_roles(capsys):
    _, section = made(capsys, "acme", "--role", "chat", "--role", "ingest")
    assert parse_tenants(section)["acme"].roles == {"chat", "ingest"}


def test_the_key_itself_is_not_in_what_is_redirected_to_the_file(capsys):
    key, section = made(capsys, "acme")
    assert key not in section
