# SPDX-License-Identifier: Apache-2.0
"""`tessera key`: makes an API key."""

import argparse
from collections.abc import Sequence

from app.access.tenants import hash_of, new_key
from machine.progress import say

_SECTION = """\
[{tenant}]
keys = ["{hash}"]
roles = [{roles}]"""


def main(argv: Sequence[str]) -> int:
    """Prints the section for the file of tenants. The key itself is shown on the terminal only."""
    args = _parser().parse_args(argv)
    key = new_key()
    say(f"the key, which is shown this once: {key}")
    roles = ", ".join(f'"{role}"' for role in args.role or ["chat"])
    print(_SECTION.format(tenant=args.tenant, hash=hash_of(key), roles=roles))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tessera key",
        description="Make an API key, and print the section for the file of --tenants, with only the key's hash.",
    )
    parser.add_argument("tenant", help="name of the tenant, which is also its namespace")
    parser.add_argument(
        "--role",
        action="append",
        choices=["chat", "ingest", "admin"],
        help="role of the key: chat (default), ingest (documents ahead of time), admin (everything); repeatable",
    )
    return parser
