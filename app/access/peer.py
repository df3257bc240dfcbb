# SPDX-License-Identifier: Apache-2.0
"""The shared secret of replicas and their router, who may pass on KV."""

import hmac
from typing import Final

from pydantic import SecretStr
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from engine_ext.wire.caller import IS_PEER

SECRET_HEADER: Final = "x-tessera-peer-secret"


def is_secret(given: str, secret: SecretStr | None) -> bool:
    """Whether ``given`` is the secret, compared in constant time; False without a secret."""
    return secret is not None and hmac.compare_digest(given.encode(), secret.get_secret_value().encode())


class PeerMiddleware:
    """Marks requests of peers, which carry the secret, beside an API key if needed."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = Headers(scope=scope).get(SECRET_HEADER) if scope["type"] == "http" else None
        secret: SecretStr | None = scope["app"].state.tessera_settings.peer_secret if given else None
        if not given or not is_secret(given, secret):
            return await self._app(scope, receive, send)
        token = IS_PEER.set(True)
        try:
            await self._app(scope, receive, send)
        finally:
            IS_PEER.reset(token)
