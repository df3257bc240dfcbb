# SPDX-License-Identifier: Apache-2.0
"""Browsers that other sites' pages send to a server without keys.

Such a server trusts whoever reaches it, and a browser on its machine or network does, in the name of any page: by
requests to its address, or to a name of the page's own that has been pointed there (DNS rebinding).
"""

import ipaddress
from collections.abc import Iterable
from http import HTTPStatus

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Scope

from app.http.refusals import refusal

_SAFE = ("GET", "HEAD", "OPTIONS")
_ANY = "*"


class BrowserCheck:
    """Refuses requests of other sites' pages, and requests for names that aren't the server's."""

    def __init__(self, names: Iterable[str], origins: Iterable[str] = ()) -> None:
        """``names`` are the server's; ``origins``, of pages that may ask it (vLLM's ``--allowed-origins``)."""
        self._names = {name.lower() for name in names}
        self._origins = set(origins) - {_ANY}  # vLLM's default

    def refusal(self, scope: Scope) -> Response | None:
        """The refusal of a request, if a browser should not have sent it."""
        headers = Headers(scope=scope)
        host, origin = headers.get("host", ""), headers.get("origin")
        if host and not self._is_own(_name(host)):
            return _refused(f"this server isn't known as {_name(host)[:100]!r}: add --allowed-host, or use API keys")
        if origin is not None and not self._may_ask(origin, host):
            return _refused(
                f"a page of {origin[:100]!r} sent this: see --allowed-origins and --allowed-host, or use keys"
            )
        is_safe = scope.get("method") in _SAFE
        if origin is None and not is_safe and headers.get("sec-fetch-site") in ("cross-site", "same-site"):
            return _refused("another site's page sent this")
        return None

    def _is_own(self, name: str) -> bool:
        """Whether a name is the server's, or none that a page could point here: an address, or a name without dots."""
        return bool({name, _ANY} & self._names) or "." not in name.removesuffix(".localhost") or _is_address(name)

    def _may_ask(self, origin: str, host: str) -> bool:
        _, _, netloc = origin.partition("://")  # "null" has none: of a file, or a page that hides where it is from
        if not netloc:
            return False
        return _is_at(netloc, host) or origin in self._origins or bool({_name(netloc), _ANY} & self._names)


def is_of_own_page(scope: Scope) -> bool:
    """Whether a browser says that a page of the address which is asked sent a request."""
    headers = Headers(scope=scope)
    return _is_at(headers.get("origin", "").partition("://")[2], headers.get("host", ""))


def _is_at(netloc: str, host: str) -> bool:
    return netloc != "" and _bare(netloc) == _bare(host)


def _refused(words: str) -> Response:
    return refusal(HTTPStatus.FORBIDDEN, "cross_site", words)


def _bare(netloc: str) -> str:
    """Host and port without a default port: a proxy may speak TLS in the server's place."""
    return netloc.lower().removesuffix(":80").removesuffix(":443")


def _name(netloc: str) -> str:
    """The host of a netloc, without its port and an IPv6 address's brackets."""
    if netloc.startswith("["):
        return netloc[1:].partition("]")[0].lower()
    return netloc.partition(":")[0].lower()


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
