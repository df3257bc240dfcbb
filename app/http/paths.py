# SPDX-License-Identifier: Apache-2.0
"""The path of a request."""

from starlette.types import Scope


def path_of(scope: Scope) -> str:
    """The path below the server's ``--root-path``, which a proxy may or may not have removed."""
    return str(scope["path"]).removeprefix(scope.get("root_path", ""))
