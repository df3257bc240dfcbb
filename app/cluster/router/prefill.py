# SPDX-License-Identifier: Apache-2.0
"""Prompts computed by replicas that prefill, whose blocks another replica then reads."""

import json
import logging
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any, Final

import httpx
from starlette.types import Scope

from app.cluster.asking import MOST_BYTES
from app.cluster.router.chooser import Asked, Chooser
from app.cluster.router.forwarding import Headers, forwarded, raw_path
from app.cluster.router.metrics import RouterMetrics
from app.http.messages import in_thread_if_long, object_in
from engine_ext.wire.handover import HANDOVER_KEY
from replicas.registry import Replica
from replicas.signing import HEADER, PeerAuth, PeerKey

logger = logging.getLogger(__name__)

_PARAMS: Final = "kv_transfer_params"
_PATHS: Final = frozenset({"/v1/rag/chat", "/v1/chat/completions", "/v1/completions"})
_ALONE: Final = frozenset({"best_of", "use_beam_search", "prompt_logprobs", "echo", _PARAMS})
"""Fields of requests that one replica answers alone."""
_FIRST_TOKEN: Final = {
    "max_tokens": 1,
    "stream": False,
    _PARAMS: {"do_remote_decode": True, "do_remote_prefill": False},
}
_MOST_BYTES: Final = 8 << 20
"""Of a prompt's answer: its first token, the cache's report, and the numbers of its blocks."""
_OF_ANSWERS: Final = ("min_tokens", "max_completion_tokens", "stream_options")


class Prefill:
    """Splits requests between a replica that computes the prompt and one that answers."""

    def __init__(
        self, chooser: Chooser, client: httpx.AsyncClient, metrics: RouterMetrics, key: PeerKey | None
    ) -> None:
        self._chooser = chooser
        self._client = client
        self._metrics = metrics
        self._key = key

    async def prepared(
        self, scope: Scope, body: bytes, asked: Asked, replicas: Sequence[Replica]
    ) -> tuple[bytes, Headers]:
        """The body for the replica that answers, and more headers: the client's own if it computes the prompt too."""
        path, parsed = scope["path"], asked.parsed
        is_split = path in _PATHS and replicas and all(replica.hands_over for replica in replicas)
        if self._key is None or not is_split or parsed is None or not _is_divisible(parsed):
            return body, ()
        first = {name: value for name, value in parsed.items() if name not in _OF_ANSWERS} | _FIRST_TOKEN
        prompt = await in_thread_if_long(len(body), _dumped, first)
        for replica in (await self._chooser.prefillers(path, asked))[:1]:
            if (params := await self._computed(scope, replica, prompt, self._key)) is not None:
                self._metrics.prefills.labels("handed_over").inc()
                body = await in_thread_if_long(len(body), _dumped, {**parsed, _PARAMS: params})
                signature = self._key.sign(scope["method"], raw_path(scope).decode("ascii"), body)
                return body, [(HEADER.encode(), signature.encode())]
            self._metrics.prefills.labels("failed").inc()
        return body, ()

    async def _computed(self, scope: Scope, replica: Replica, body: bytes, key: PeerKey) -> dict[str, Any] | None:
        """The address of the prompt's blocks at ``replica``, if it has computed the prompt."""
        directory = self._chooser.directory
        request = forwarded(scope, replica, body)
        request.extensions[MOST_BYTES] = _MOST_BYTES
        try:
            with self._chooser.in_flight.one(replica.url):
                async with directory.while_there(replica):
                    response = await self._client.send(request, auth=PeerAuth(key))
            if response.status_code != HTTPStatus.OK:
                return None
            answer = await in_thread_if_long(len(response.content), object_in, response.content)
        except (httpx.HTTPError, TimeoutError) as error:
            logger.warning("replica %s, which prefills: %s: %s", replica.name, type(error).__name__, error)
            directory.suspect(replica)
            return None
        params = answer.get(_PARAMS) if answer is not None else None
        return params if isinstance(params, dict) and HANDOVER_KEY in params else None


def _dumped(body: dict[str, Any]) -> bytes:
    return json.dumps(body).encode()


def _is_divisible(parsed: dict[str, Any]) -> bool:
    """Whether two replicas can share the work: one prompt, one answer."""
    prompt = parsed.get("prompt")
    prompts = isinstance(prompt, list) and not all(isinstance(token, int) for token in prompt)
    return not (prompts or parsed.get("n") not in (None, 1) or any(parsed.get(name) for name in _ALONE))
