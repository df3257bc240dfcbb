# SPDX-License-Identifier: Apache-2.0
"""The caller of a request: API keys, roles and rate limits, and the secret of replicas and their router."""

import hmac
from http import HTTPStatus
from typing import Final

from pydantic import SecretStr
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from app.access.limits import LimitExceededError, TenantLimits
from app.access.policy import required_role
from app.access.tenants import Role, Tenant, Tenants
from app.http.messages import path_of
from app.http.refusals import refusal
from engine_ext.client.request import CALLER, IS_PEER, Caller

SECRET_HEADER: Final = "x-tessera-peer-secret"


def is_secret(given: str, secret: SecretStr | None) -> bool:
    """Whether ``given`` is the peers' secret, compared in constant time; False without a secret."""
    return secret is not None and hmac.compare_digest(given.encode(), secret.get_secret_value().encode())


class AccessMiddleware:
    """Requires an API key if there are ``tenants``, and sets the caller; marks peers, which may pass on KV.

    Peers send the ``secret``, beside an API key if needed. Runs before anything reads the body, and in front of vLLM's
    own endpoints too.
    """

    def __init__(self, app: ASGIApp, tenants: Tenants | None, secret: SecretStr | None = None) -> None:
        self._app = app
        self._tenants = tenants
        self._secret = secret
        self._limits: dict[str, tuple[Tenant, TenantLimits]] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        token = IS_PEER.set(is_secret(Headers(scope=scope).get(SECRET_HEADER, ""), self._secret))
        try:
            await self._authenticated(scope, receive, send)
        finally:
            IS_PEER.reset(token)

    async def _authenticated(self, scope: Scope, receive: Receive, send: Send) -> None:
        tenants = self._tenants
        role = required_role(scope.get("method", "GET"), path_of(scope)) if tenants is not None else None
        if tenants is None or role is None:
            return await self._app(scope, receive, send)
        key = _key(Headers(scope=scope))
        tenant = tenants.of_key(key) if key else None
        if tenant is None or role not in tenant.roles:
            return await _refused(key, tenant, role)(scope, receive, send)
        return await self._run(tenant, scope, receive, send)

    async def _run(self, tenant: Tenant, scope: Scope, receive: Receive, send: Send) -> None:
        limits = self._limits_of(tenant)
        try:
            with limits.request():
                token = CALLER.set(Caller(tenant.name, tenant.namespaces, "admin" in tenant.roles, limits.charge))
                try:
                    await self._app(scope, receive, send)
                finally:
                    CALLER.reset(token)
        except LimitExceededError as error:
            headers = {"retry-after": str(error.retry_after_s)}
            answer = refusal(HTTPStatus.TOO_MANY_REQUESTS, "limit_exceeded", str(error), headers=headers)
            await answer(scope, receive, send)

    def _limits_of(self, tenant: Tenant) -> TenantLimits:
        known = self._limits.get(tenant.name)
        if known is None or known[0] != tenant:
            known = self._limits[tenant.name] = (tenant, TenantLimits(tenant))
        return known[1]


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
