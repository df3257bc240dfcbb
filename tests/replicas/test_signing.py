# SPDX-License-Identifier: Apache-2.0
"""No change of a signed message is accepted, whatever is changed."""

from collections.abc import Callable

import httpx
import pytest

from replicas.signing import HEADER, WINDOW_S, PeerAuth, PeerKey, SignatureError, SignedRequests
from tests.cache.helpers import Clock

SECRET = "a secret of replicas"
BODY, TARGET = b'{"segments": []}', "/peer/chunks/00ff?part=0"


def mutations(data: bytes) -> list[bytes]:
    """Each byte changed, left out and doubled; and the ends."""
    flipped = [data[:i] + bytes([data[i] ^ bit]) + data[i + 1 :] for i in range(len(data)) for bit in (1, 32, 128)]
    shorter = [data[:i] + data[i + 1 :] for i in range(len(data))]
    longer = [data[:i] + data[i : i + 1] + data[i:] for i in range(len(data))]
    return [each for each in (*flipped, *shorter, *longer, b"", data + b"\n", b" " + data) if each != data]


def test_no_change_of_a_request_is_accepted() -> None:
    key = PeerKey(SECRET)
    signature = key.sign("GET", TARGET, BODY)
    assert key.signed_request(signature, "GET", TARGET)
    for changed in mutations(signature.encode()):
        with pytest.raises(SignatureError):
            key.signed_request(changed.decode("latin-1"), "GET", TARGET)
    for changed in mutations(TARGET.encode()):
        with pytest.raises(SignatureError):
            key.signed_request(signature, "GET", changed.decode("latin-1"))
    with pytest.raises(SignatureError):
        key.signed_request(signature, "POST", TARGET)
    digests = {key.signed_request(key.sign("GET", TARGET, body), "GET", TARGET).digest for body in mutations(BODY)}
    assert key.signed_request(signature, "GET", TARGET).digest not in digests


def test_no_change_of_an_answer_is_accepted() -> None:
    key = PeerKey(SECRET)
    signature = key.sign("GET", TARGET)
    mac = key.sign_answer(signature, 200, [BODY[:5], BODY[5:]])
    key.check_answer(mac, signature, 200, BODY)
    for changed in mutations(BODY):
        with pytest.raises(SignatureError):
            key.check_answer(mac, signature, 200, changed)
    for changed in mutations(mac.encode()):
        with pytest.raises(SignatureError):
            key.check_answer(changed.decode("latin-1"), signature, 200, BODY)
    for given, of, status in ((mac, signature, 404), (mac, key.sign("GET", TARGET), 200), (None, signature, 200)):
        with pytest.raises(SignatureError):
            key.check_answer(given, of, status, BODY)


def test_no_change_of_what_is_sealed_is_accepted() -> None:
    key = PeerKey(SECRET)
    sealed = key.seal("heartbeat", BODY)
    assert key.unseal("heartbeat", sealed) == BODY
    for changed in (*mutations(sealed), BODY):
        with pytest.raises(SignatureError):
            key.unseal("heartbeat", changed)
    for other, purpose in ((PeerKey("another secret"), "heartbeat"), (key, "something else")):
        with pytest.raises(SignatureError):
            other.unseal(purpose, sealed)


def test_nothing_signed_for_one_use_is_accepted_for_another() -> None:
    key = PeerKey(SECRET)
    request = key.sign("GET", TARGET)
    macs = {request.rsplit(".", 1)[1], key.sign_answer(request, 200, []), key.seal(request, b"")[11:75].decode()}
    assert len(macs) == 3


@pytest.mark.parametrize("later_s", [-WINDOW_S - 2, WINDOW_S + 2])
def test_what_was_signed_at_another_time_is_not_accepted(later_s: float) -> None:
    clock = Clock()
    key = PeerKey(SECRET, clock)
    signature, sealed = key.sign("GET", TARGET), key.seal("heartbeat", BODY)
    clock.now += later_s
    with pytest.raises(SignatureError, match="ago"):
        key.signed_request(signature, "GET", TARGET)
    with pytest.raises(SignatureError, match="ago"):
        key.unseal("heartbeat", sealed)


def test_clocks_may_differ() -> None:
    clock = Clock()
    key, theirs = PeerKey(SECRET, clock), PeerKey(SECRET, lambda: clock.now + WINDOW_S / 2)
    assert SignedRequests(key).check(theirs.sign("GET", TARGET), "GET", TARGET)
    assert key.unseal("heartbeat", theirs.seal("heartbeat", BODY)) == BODY


def test_a_request_is_accepted_once() -> None:
    key = PeerKey(SECRET)
    door = SignedRequests(key)
    first, second = key.sign("GET", TARGET), key.sign("GET", TARGET)
    assert first != second
    for signature in (first, second):
        door.check(signature, "GET", TARGET)
        with pytest.raises(SignatureError, match="before"):
            door.check(signature, "GET", TARGET)


async def asked(answer: Callable[[httpx.Request], httpx.Response]) -> httpx.Response:
    async with httpx.AsyncClient(transport=httpx.MockTransport(answer), auth=PeerAuth(PeerKey(SECRET))) as client:
        return await client.post("http://a/peer/fills?x=%20", json={})


async def test_a_client_takes_signed_answers_only() -> None:
    key, body = PeerKey(SECRET), b"{}"

    def answer(request: httpx.Request) -> httpx.Response:
        signature = request.headers[HEADER]
        assert SECRET not in str(request.headers)
        signed = SignedRequests(key).check(signature, "POST", "/peer/fills?x=%20")
        assert signed == key.signed_request(key.sign("POST", "/", request.content), "POST", "/").digest
        return httpx.Response(200, headers={HEADER: key.sign_answer(signature, 200, [b"{}"])}, content=body)

    assert (await asked(answer)).json() == {}
    body = b"[]"
    with pytest.raises(httpx.HTTPError, match="isn't signed"):
        await asked(answer)
    # Anybody can refuse: then the work is done elsewhere.
    assert (await asked(lambda request: httpx.Response(503))).status_code == 503
