# SPDX-License-Identifier: Apache-2.0
"""The path of a request."""

from starlette.types import Scope


def path_of(scope: Scope) -> str:
    """The path relative to ``--root-path``, whether or not a proxy has removed that prefix."""
    return str(scope["path"]).removeprefix(scope.get("root_path", ""))
