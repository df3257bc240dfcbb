# SPDX-License-Identifier: Apache-2.0
"""`tessera key`: makes an API key."""

import argparse
from collections.abc import Sequence

from app.access.tenants import hash_of, new_key
from tools.progress import say

_SECTION = """\
[{tenant}]
keys = ["{hash}"]
roles = [{roles}]"""


def main(argv: Sequence[str]) -> int:
    """Prints the section for the file of tenants; the key itself goes to the terminal, and nowhere else."""
    args = _parser().parse_args(argv)
    key = new_key()
    say(f"the key, which is shown this once: {key}")
    roles = ", ".join(f'"{role}"' for role in args.role or ["chat"])
    print(_SECTION.format(tenant=args.tenant, hash=hash_of(key), roles=roles))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tessera key",
        description="Makes an API key, and prints what belongs into the file of --tenants: only the key's hash.",
    )
    parser.add_argument("tenant", help="whose key it is: the name of a tenant, which is its namespace too")
    parser.add_argument(
        "--role",
        action="append",
        choices=["chat", "ingest", "admin"],
        help="what it opens: chat (default), ingest (documents ahead of time), admin (everything); may be repeated",
    )
    return parser
