# SPDX-License-Identifier: Apache-2.0
"""Addresses on which a server may listen without keys."""

import pytest

from app.access.exposure import ExposedError, checked_host, known_tenants
from app.access.tenants import TenantsFileError


@pytest.mark.parametrize("host", [None, "", "127.0.0.1", "127.8.8.8", "::1", "[::1]", "localhost"])
def test_this_machine_needs_no_key(host):
    assert checked_host(host, None, allow_anonymous=False) == (host or "127.0.0.1")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "example.org"])
def test_elsewhere_somebody_must_ask_for_keys_or_say_that_nobody_does(host):
    with pytest.raises(ExposedError, match=f"--host {host} would let in everybody.*tessera key.*--allow-anonymous"):
        checked_host(host, None, allow_anonymous=False)
    assert checked_host(host, None, allow_anonymous=True) == host
    assert checked_host(host, known_tenants(None, ["key"]), allow_anonymous=False) == host


def test_vllms_own_key_opens_everything_and_keys_are_given_in_one_place_that_is_there(tmp_path):
    tenant = known_tenants(None, ["first", "second"]).of_key("second")
    assert (tenant.name, tenant.roles) == ("default", {"chat", "ingest", "admin"})
    assert known_tenants(None) is None
    with pytest.raises(ExposedError, match="in one place"):
        known_tenants(str(tmp_path), ["key"])
    with pytest.raises(TenantsFileError, match=r"--tenants .*No such file"):
        known_tenants(str(tmp_path / "none"))
