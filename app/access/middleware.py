# SPDX-License-Identifier: Apache-2.0
"""Who may come in: API keys, roles and rate limits, signatures of replicas and their router, and browsers."""

import ipaddress
import math
from collections.abc import Iterable
from http import HTTPStatus
from typing import Literal

from pydantic import SecretStr
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.access.limits import LIMITS, LimitExceededError, TenantLimits
from app.access.signed import signing, target_of, with_digest
from app.access.tenants import Role, Tenant, Tenants
from app.http.messages import is_plain, path_of, replay
from app.http.refusals import refusal
from engine_ext.client.request import CALLER, IS_PEER, Caller
from replicas.signing import HEADER, PeerKey, SignatureError, SignedRequests

_OPEN = frozenset({"/", "/health", "/ping", "/ready", "/readyz"})
_OPEN_BELOW = "/web/"
"""The page's files."""
_PEERS_BELOW = "/peer/"
_CHAT = frozenset(
    {
        "/v1/models",
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/rag/chat",
        "/v1/rag/plan",
        "/tokenize",
        "/detokenize",
    }
)
_INGEST = ("/v1/rag/chunks", "/v1/rag/split")
_COLLECTIONS = "/v1/rag/collections"
"""Read by those who ask, changed by those who bring documents."""
_SAFE = ("GET", "HEAD", "OPTIONS")
_ANY = "*"
_PORTS = {"http": ":80", "https": ":443"}


class BrowserCheck:
    """Refuses requests of other sites' pages, and requests for names that aren't the server's.

    For servers without keys: such a server trusts whoever reaches it, and a browser on its machine or network does, in
    the name of any page: by requests to its address, or to a name of the page's own that has been pointed there (DNS
    rebinding).
    """

    def __init__(self, names: Iterable[str], origins: Iterable[str] = ()) -> None:
        """``names`` are the server's; ``origins``, of pages that may ask it, beside those of the address asked."""
        self._names = {name.lower() for name in names}
        self._origins = set(origins) - {_ANY}  # vLLM's default

    def refusal(self, scope: Scope) -> Response | None:
        """The refusal of a request, if a browser should not have sent it."""
        headers = Headers(scope=scope)
        host, origin = headers.get("host", ""), headers.get("origin")
        if host and not self._is_own(_name(host)):
            return _cross_site(f"this server isn't known as {_name(host)[:100]!r}: add --allowed-host, or use API keys")
        if origin is not None and not self._may_ask(origin, host):
            return _cross_site(
                f"a page of {origin[:100]!r} sent this: see --allowed-origins and --allowed-host, or use keys"
            )
        is_safe = scope.get("method") in _SAFE
        if origin is None and not is_safe and headers.get("sec-fetch-site") in ("cross-site", "same-site"):
            return _cross_site("another site's page sent this")
        return None

    def _is_own(self, name: str) -> bool:
        """Whether a name is the server's, or none that a page could point here: an address, or a name without dots."""
        return bool({name, _ANY} & self._names) or "." not in name.removesuffix(".localhost") or _is_address(name)

    def _may_ask(self, origin: str, host: str) -> bool:
        if "://" not in origin:  # "null": of a file, or a page that hides where it is from
            return False
        return _is_at(origin, host) or origin in self._origins or _ANY in self._names


class AccessMiddleware:
    """Requires an API key if there are ``tenants``, and sets the caller; marks peers, which may pass on KV.

    Peers sign their requests with the ``secret``, beside an API key if needed. Runs before anything reads the body, and
    in front of vLLM's own endpoints too. The path that it decides about is the one that is routed, and that a router
    sends on: paths that could be read in two ways are refused.
    """

    def __init__(
        self,
        app: ASGIApp,
        tenants: Tenants | None,
        secret: SecretStr | None = None,
        browsers: BrowserCheck | None = None,
    ) -> None:
        self._app = app
        self._browsers = browsers
        self._tenants = tenants
        self._key = PeerKey(secret.get_secret_value()) if secret is not None else None
        self._signed = SignedRequests(self._key) if self._key is not None else None
        self._limits: dict[str, tuple[Tenant, TenantLimits]] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        if not is_plain(scope):
            words = "the path has dot segments, empty ones, or encoded dots or slashes"
            return await refusal(HTTPStatus.BAD_REQUEST, "bad_request", words)(scope, receive, send)
        signature = Headers(scope=scope).get(HEADER)
        if signature is None or self._key is None or self._signed is None:
            return await self._authenticated(scope, receive, send)
        token = IS_PEER.set(True)
        try:
            digest = self._signed.check(signature, scope.get("method", "GET"), target_of(scope))
            await self._authenticated(scope, with_digest(digest, receive), signing(self._key, signature, send))
        except SignatureError as error:
            await refusal(HTTPStatus.FORBIDDEN, "peers_only", str(error))(scope, receive, send)
        finally:
            IS_PEER.reset(token)

    async def _authenticated(self, scope: Scope, receive: Receive, send: Send) -> None:
        tenants = self._tenants
        if self._browsers is not None and not IS_PEER.get() and (answer := self._browsers.refusal(scope)):
            return await answer(scope, receive, send)
        role = None if _is_preflight(scope) else required_role(scope.get("method", "GET"), path_of(scope))
        if role == "peer":
            if not IS_PEER.get():
                return await self._not_a_peer()(scope, receive, send)
            return await self._app(scope, receive, send)
        if role is None:
            return await self._app(scope, replay([b""], receive), send)  # nobody's body is kept
        if tenants is None:
            return await self._app(scope, receive, send)
        key = _key(Headers(scope=scope))
        tenant = tenants.of_key(key) if key else None
        if tenant is None or role not in tenant.roles:
            return await _refused(key, tenant, role)(scope, receive, send)
        return await self._run(tenant, scope, receive, send)

    def _not_a_peer(self) -> Response:
        if self._key is None:
            return refusal(HTTPStatus.NOT_FOUND, "not_found", "only replicas with a --peer-secret have this")
        return refusal(HTTPStatus.FORBIDDEN, "peers_only", "this is for replicas with the --peer-secret")

    async def _run(self, tenant: Tenant, scope: Scope, receive: Receive, send: Send) -> None:
        limits = self._limits_of(tenant)

        async def timed(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] == HTTPStatus.TOO_MANY_REQUESTS:
                MutableHeaders(scope=message).setdefault("retry-after", str(max(1, math.ceil(limits.wait_s()))))
            await send(message)

        try:
            with limits.request() as spending:
                caller = CALLER.set(Caller(tenant.name, tenant.namespaces, "admin" in tenant.roles, spending))
                limited = LIMITS.set(limits)
                try:
                    await self._app(scope, receive, timed)
                finally:
                    LIMITS.reset(limited)
                    CALLER.reset(caller)
        except LimitExceededError as error:
            headers = {"retry-after": str(error.retry_after_s)}
            answer = refusal(HTTPStatus.TOO_MANY_REQUESTS, "limit_exceeded", str(error), headers=headers)
            await answer(scope, receive, send)

    def _limits_of(self, tenant: Tenant) -> TenantLimits:
        known = self._limits.get(tenant.name)
        if known is None or known[0] != tenant:
            known = self._limits[tenant.name] = (tenant, TenantLimits(tenant))
        return known[1]


def _is_preflight(scope: Scope) -> bool:
    """Whether a browser asks, without a key, what it may send."""
    headers = Headers(scope=scope)
    return scope.get("method") == "OPTIONS" and "origin" in headers and "access-control-request-method" in headers


def _key(headers: Headers) -> str:
    """The key as OpenAI's or Anthropic's clients send it; empty if there is none."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")


def _refused(key: str, tenant: Tenant | None, role: Role) -> Response:
    if tenant is not None:
        return refusal(HTTPStatus.FORBIDDEN, "role_missing", f"this needs an API key with the role {role}")
    headers = {"www-authenticate": "Bearer"}
    if key:
        return refusal(HTTPStatus.UNAUTHORIZED, "invalid_api_key", "this API key is not known here", headers=headers)
    words = "an API key is needed (Authorization: Bearer …)"
    return refusal(HTTPStatus.UNAUTHORIZED, "missing_api_key", words, headers=headers)


def required_role(method: str, path: str) -> Role | Literal["peer"] | None:
    """The role that a request needs, administrator unless it is listed here; ``None`` if it needs no key.

    ``path`` is relative to ``--root-path``. ``peer``: it needs the signature of another replica, and no key.
    """
    if path in _OPEN or path.startswith(_OPEN_BELOW):
        return None
    if path.startswith(_PEERS_BELOW):
        return "peer"
    if path in _CHAT:
        return "chat"
    if path in _INGEST or path.startswith(f"{_INGEST[0]}/"):
        return "ingest"
    if path == _COLLECTIONS or path.startswith(f"{_COLLECTIONS}/"):
        return "chat" if method in ("GET", "HEAD") else "ingest"
    return "admin"


def is_of_own_page(scope: Scope) -> bool:
    """Whether a browser says that a page of the address which is asked sent a request."""
    headers = Headers(scope=scope)
    return _is_at(headers.get("origin", ""), headers.get("host", ""))


def _is_at(origin: str, host: str) -> bool:
    """Whether an origin has this host and port. The origin's scheme tells a default port: a proxy may speak TLS."""
    scheme, _, netloc = origin.lower().partition("://")
    port = _PORTS.get(scheme, "")
    return netloc != "" and netloc.removesuffix(port) == host.lower().removesuffix(port)


def _cross_site(words: str) -> Response:
    return refusal(HTTPStatus.FORBIDDEN, "cross_site", words)


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
