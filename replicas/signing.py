# SPDX-License-Identifier: Apache-2.0
"""Messages between replicas and routers, authenticated by a secret that they have in common and never send.

A request carries a signature of its method, target and body, made now and accepted once. Its answer carries a signature
too, which is of that request alone. What they leave in the registry is sealed. Nothing is encrypted.
"""

import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Callable, Generator, Iterable
from typing import Final, NamedTuple

import httpx

Buffer = bytes | bytearray | memoryview

HEADER: Final = "x-tessera-signature"
WINDOW_S: Final = 30.0
"""Age of the oldest message that is accepted, and by how much clocks may differ."""
_REQUEST: Final = re.compile(r"(\d{1,12})\.([0-9a-f]{24})\.([0-9a-f]{64})\.([0-9a-f]{64})", re.ASCII)
_SEALED: Final = re.compile(rb"(\d{1,12})\.([0-9a-f]{64}) ")


class SignatureError(ValueError):
    """A message that nobody with the secret has sent, or not now; the message says why. Don't use any of it."""


class SignedRequest(NamedTuple):
    """When a request was signed, its nonce, and the SHA-256 of its body."""

    at: int
    nonce: str
    digest: str


class PeerKey:
    """The common secret, and what can be done with it."""

    def __init__(self, secret: str, clock: Callable[[], float] = time.time) -> None:
        self._secret = secret.encode()
        self.clock = clock

    def sign(self, method: str, target: str, body: Buffer = b"") -> str:
        """Return the signature of a request; ``target`` is its path and query, as sent."""
        now, nonce, digest = str(int(self.clock())), secrets.token_hex(12), hashlib.sha256(body).hexdigest()
        return f"{now}.{nonce}.{digest}.{self._mac('request', now, nonce, method, target, digest)}"

    def signed_request(self, signature: str, method: str, target: str) -> SignedRequest:
        """Return what the signature of a request says; raise :class:`SignatureError`."""
        if (found := _REQUEST.fullmatch(signature)) is None:
            raise SignatureError("no signature of a request")
        now, nonce, digest, mac = found.groups()
        if not hmac.compare_digest(mac, self._mac("request", now, nonce, method, target, digest)):
            raise SignatureError("a request signed with another secret, or changed since")
        self._check_time(int(now))
        return SignedRequest(int(now), nonce, digest)

    def sign_answer(self, signature: str, status: int, parts: Iterable[Buffer]) -> str:
        """Return the signature of the answer, in ``parts``, to the request with ``signature``."""
        return self._mac("answer", signature, str(status), parts=parts)

    def check_answer(self, given: str | None, signature: str, status: int, body: Buffer) -> None:
        """Raise :class:`SignatureError` unless ``given`` is of this answer to the request with ``signature``."""
        expected = self.sign_answer(signature, status, [body])
        if not hmac.compare_digest((given or "").encode(), expected.encode()):
            raise SignatureError("an answer that isn't signed with the peers' secret")

    def seal(self, purpose: str, content: bytes) -> bytes:
        """Return ``content`` with the time and a signature before it."""
        now = str(int(self.clock()))
        return f"{now}.{self._mac('sealed', purpose, now, parts=[content])} ".encode() + content

    def unseal(self, purpose: str, sealed: bytes) -> bytes:
        """Return the content of :meth:`seal`; raise :class:`SignatureError`."""
        if (found := _SEALED.match(sealed)) is None:
            raise SignatureError("not signed")
        now, mac, content = found[1].decode(), found[2], sealed[found.end() :]
        if not hmac.compare_digest(mac, self._mac("sealed", purpose, now, parts=[content]).encode()):
            raise SignatureError("signed with another secret, or changed since")
        self._check_time(int(now))
        return content

    def _check_time(self, signed_at: int) -> None:
        if abs(self.clock() - signed_at) > WINDOW_S:
            raise SignatureError(f"signed more than {WINDOW_S:g} s ago, or by a clock that goes wrong")

    def _mac(self, *fields: str, parts: Iterable[Buffer] = ()) -> str:
        """HMAC-SHA256 of ``fields``, each with its length, so that none can pass for two, and of ``parts``."""
        made = hmac.new(self._secret, digestmod=hashlib.sha256)
        for field in fields:
            data = field.encode()
            made.update(len(data).to_bytes(8, "big") + data)
        for part in parts:
            made.update(part)
        return made.hexdigest()


def unverified(content: bytes) -> bytes:
    """Return what was perhaps sealed, for those who don't have the secret and believe anything."""
    found = _SEALED.match(content)
    return content[found.end() :] if found is not None else content


class PeerAuth(httpx.Auth):
    """Signs the requests of an ``httpx`` client, and takes signed answers only."""

    requires_request_body = True
    requires_response_body = True

    def __init__(self, key: PeerKey) -> None:
        self._key = key

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        """Raise ``httpx.RemoteProtocolError`` for an answer that isn't signed, but for refusals, which give nothing."""
        signature = self._key.sign(request.method, request.url.raw_path.decode("ascii"), request.content)
        request.headers[HEADER] = signature
        response = yield request
        if not response.is_success:
            return
        try:
            self._key.check_answer(response.headers.get(HEADER), signature, response.status_code, response.content)
        except SignatureError as error:
            raise httpx.RemoteProtocolError(str(error), request=request) from error


class SignedRequests:
    """A server's side: accepts each request of a peer once."""

    def __init__(self, key: PeerKey) -> None:
        self._key = key
        self._since = int(key.clock())
        self._seen: dict[str, float] = {}
        """Nonces and until when they are kept, oldest first."""

    def check(self, signature: str, method: str, target: str) -> str:
        """Return the SHA-256 that the body must have; raise :class:`SignatureError`, also for a second time.

        What was signed before this process began may have been answered by an earlier one.
        """
        signed = self._key.signed_request(signature, method, target)
        now = time.monotonic()
        while self._seen and next(iter(self._seen.values())) < now:
            del self._seen[next(iter(self._seen))]
        if signed.nonce in self._seen or signed.at < self._since:
            raise SignatureError("a request that came before, or may have")
        self._seen[signed.nonce] = now + 2 * WINDOW_S  # its time may be as far ahead as another's is behind
        return signed.digest
