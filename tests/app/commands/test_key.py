# SPDX-License-Identifier: Apache-2.0
"""`tessera key`."""

import pytest

from app.access.tenants import Tenants, parse_tenants
from app.commands.key import main


@pytest.mark.parametrize(("flags", "roles"), [([], {"chat"}), (["--role=chat", "--role=ingest"], {"chat", "ingest"})])
def test_what_it_prints_is_a_section_that_the_key_opens_but_not_the_key_itself(flags, roles, capsys):
    assert main(["acme", *flags]) == 0
    said = capsys.readouterr()
    key, section = said.err.rsplit(" ", 1)[1].strip(), said.out
    tenant = Tenants(parse_tenants(section)).of_key(key)
    assert (tenant.name, tenant.roles) == ("acme", roles)
    assert key not in section
