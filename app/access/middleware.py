# SPDX-License-Identifier: Apache-2.0
"""API-key authentication, roles and rate limits."""

from http import HTTPStatus

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from app.access.limits import LimitExceededError, TenantLimits
from app.access.policy import required_role
from app.access.tenants import Role, Tenant, Tenants
from app.http.paths import path_of
from app.http.refusals import refusal
from engine_ext.wire.caller import CALLER, Caller


class AccessMiddleware:
    """Requires an API key if the application's state has tenants (``tessera_tenants``), and sets the caller.

    Runs before anything reads the body, and in front of vLLM's own endpoints too.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._limits: dict[str, tuple[Tenant, TenantLimits]] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        tenants: Tenants | None = scope["app"].state.tessera_tenants if scope["type"] != "lifespan" else None
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
