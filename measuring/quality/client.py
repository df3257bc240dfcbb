# SPDX-License-Identifier: Apache-2.0
"""Asks a running Tessera server, and measures from the client's side.

::

    ServerError            the run can't go on
    ├── SetupError         … nor will it, before something is set up differently
    └── RefusedError       the server can't take this one request
"""

import json
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass
from http import HTTPStatus
from typing import Any, Final, Self

import httpx

from app.documents.document import Document
from app.modes import cache_field, mode_of
from measuring.quality.arguments import ChunkOrder
from measuring.quality.questions.questions import Question

TEMPLATE_ADVICE = "start the server with --chat-template FILE"

FORCED_TOKENS: Final = "tessera_forced_tokens"
"""Key, in a request's ``vllm_xargs``, of the token ids that a server with :mod:`measuring.quality.forced` generates."""

LEAD: Final = "The answer is"
"""What a right answer stands behind when its log probability is taken."""

_CHAT = "/v1/rag/chat"
_CHUNKS = "/v1/rag/chunks"
# A long prompt may take minutes to its first token, on a CPU.
_TIMEOUT = httpx.Timeout(600, connect=10)


class ServerError(Exception):
    """The server is gone, or failed; the message says how. What was asked for may be tried again."""


class SetupError(ServerError):
    """The server can't be used as it is; the message says what to change."""


class RefusedError(ServerError):
    """The server refused this request, for example as too long; others may succeed."""


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """``cache_off`` is why the server's chunk cache is off, ``None`` if it is on.

    ``strategy`` is the position strategy of requests that name none.
    """

    model: str
    vllm: str
    cache_off: str | None
    strategy: str


@dataclass(frozen=True, slots=True)
class AskOptions:
    """What is the same in all requests of a run. ``ahead``: chunks that are to be reused are computed before."""

    model: str
    max_tokens: int
    order: ChunkOrder = "given"
    ahead: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    """``ttft_s`` is from sending the request to the first event with text in it; ``None`` if the answer is empty."""

    text: str
    ttft_s: float | None
    total_s: float
    cache: dict[str, Any]
    """The server's report: ``cache/report.py``."""


class TesseraClient:
    """A client of one server; an asynchronous context manager."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.url = url.rstrip("/")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx.AsyncClient(base_url=self.url, headers=headers, timeout=_TIMEOUT)
        self._token_ids: dict[str, list[int]] = {}
        self._forces_tokens = True

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def describe(self) -> ServerInfo:
        """What the server serves; raises :class:`SetupError` if it isn't there, or isn't Tessera."""
        try:
            stats = await self._get("/v1/cache/stats")
            models = await self._get("/v1/models")
            version = await self._get("/version")
            cache_off = None if stats["enabled"] else str(stats["reason"])
            strategy = stats.get("position_strategy") or "full"
            return ServerInfo(models["data"][0]["id"], version["version"], cache_off, strategy)
        except httpx.HTTPError as error:
            raise SetupError(f"no server at {self.url}: {_words(error)}") from error
        except (ValueError, LookupError, TypeError) as error:
            raise SetupError(f"{self.url} is not a Tessera server: its answer isn't Tessera's") from error

    async def ask(self, question: Question, mode: str, options: AskOptions) -> Answer:
        """The answer, streamed. A request that can't reuse chunks is answered in full attention: see the report.

        Raises :class:`ServerError` or a subclass.
        """
        body = _body(question, mode, options)
        started = time.perf_counter()
        try:
            async with self._http.stream("POST", _CHAT, json=body) as response:
                if response.status_code != 200:
                    raise self._failure(response.status_code, await response.aread(), _CHAT)
                return await self._read(response, started)
        except httpx.HTTPError as error:
            raise ServerError(f"lost the server at {self.url}: {_words(error)}") from error

    async def logprob(self, question: Question, mode: str, options: AskOptions, answer: str) -> float | None:
        """Log probability of ``answer``, in nats, behind the words :data:`LEAD`, which are not counted.

        Without them it would tell how a model likes to begin, in sentences or in words.

        ``None`` if the server can't be made to say it (:mod:`measuring.quality.forced`), or answered in another mode.
        Raises :class:`ServerError` or a subclass.
        """
        lead, token_ids = await self._tokens_to_force(LEAD), await self._tokens_to_force(f"{LEAD} {answer}")
        if lead is None or token_ids is None:
            return None
        forced = {
            "stream": False,
            "max_tokens": len(token_ids),
            "ignore_eos": True,
            "logprobs": True,
            "return_token_ids": True,
            "vllm_xargs": {FORCED_TOKENS: token_ids},
        }
        given = await self._post(_CHAT, {**_body(question, mode, options), **forced})
        (choice,) = given["choices"]
        self._forces_tokens = choice["token_ids"] == token_ids
        if not self._forces_tokens or mode_of(given["cache"]) != mode:
            return None
        # The last token of the words may be another where the answer follows.
        num_lead = next(i for i, token in enumerate(token_ids) if token not in lead[i : i + 1])
        return sum(float(token["logprob"]) for token in choice["logprobs"]["content"][num_lead:])

    async def _tokens_to_force(self, text: str) -> list[int] | None:
        """The text's tokens; ``None`` if the server does not tell them, or does not force them."""
        if self._forces_tokens and text not in self._token_ids:
            try:
                tokenized = await self._post("/tokenize", {"prompt": text, "add_special_tokens": False})
                self._token_ids[text] = tokenized["tokens"]
            except ServerError:
                self._forces_tokens = False
        return self._token_ids[text] if self._forces_tokens else None

    async def ingest(self, system: str, documents: Sequence[Document]) -> AsyncIterator[dict[str, Any]]:
        """Has the documents computed ahead of time behind ``system``; yields the server's lines as they come.

        Raises :class:`ServerError` or a subclass.
        """
        body = {"system": system, "chunks": _chunks(documents)}
        try:
            async with self._http.stream("POST", _CHUNKS, json=body) as response:
                if response.status_code != 200:
                    raise self._failure(response.status_code, await response.aread(), _CHUNKS)
                async for line in response.aiter_lines():
                    yield json.loads(line)
        except httpx.HTTPError as error:
            raise ServerError(f"lost the server at {self.url}: {_words(error)}") from error

    async def _post(self, path: str, body: dict[str, Any]) -> Any:
        try:
            response = await self._http.post(path, json=body)
        except httpx.HTTPError as error:
            raise ServerError(f"lost the server at {self.url}: {_words(error)}") from error
        if response.status_code != HTTPStatus.OK:
            raise self._failure(response.status_code, response.content, path)
        return response.json()

    async def _get(self, path: str) -> Any:
        response = await self._http.get(path)
        if response.status_code != 200:
            raise self._failure(response.status_code, response.content, path)
        return response.json()

    async def _read(self, response: httpx.Response, started: float) -> Answer:
        text, first, report = "", None, None
        async for event in json_events(response):
            if "error" in event:
                raise self._failure(event["error"].get("code", 500), json.dumps(event).encode(), _CHAT)
            content = "".join(choice["delta"].get("content") or "" for choice in event.get("choices", ()))
            if content and first is None:
                first = time.perf_counter() - started
            text += content
            report = event.get("cache") or report
        if report is None:
            raise ServerError(f"an answer of {self.url} ended before its cache report")
        return Answer(text, first, time.perf_counter() - started, report)

    def _failure(self, status: int, body: bytes, path: str) -> ServerError:
        message = _message(body)
        if status == 404 and message in (None, "Not Found"):
            return SetupError(f"{self.url} is not a Tessera server: it has no {path}")
        if status in (401, 403):
            return SetupError(f"{self.url} wants another API key (--api-key): {message}")
        if message and "chat template" in message:
            return SetupError(f"{message} ({TEMPLATE_ADVICE})")
        if status == 404:
            return SetupError(f"{self.url}: {message}")
        if status in (400, 413, 422):
            return RefusedError(message or f"HTTP {status}")
        return ServerError(f"{self.url} failed with HTTP {status}: {message or 'no message'}")


def _body(question: Question, mode: str, options: AskOptions) -> dict[str, Any]:
    return {
        "model": options.model,
        "system": question.system,
        "chunks": _chunks(question.chunks),
        "question": question.question,
        "cache": {**cache_field(mode), "order": options.order},
        "stream": True,
        "temperature": 0,
        "max_tokens": options.max_tokens,
    }


def _chunks(documents: Sequence[Document]) -> list[dict[str, str]]:
    return [{name: value for name, value in asdict(document).items() if value} for document in documents]


async def json_events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The JSON of the stream's events. httpx's own lines would end inside text with, say, U+2028 in it."""
    rest = b""
    async for part in response.aiter_bytes():
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            if line.startswith(b"data: {"):
                yield json.loads(line.removeprefix(b"data: "))


def _message(body: bytes) -> str | None:
    """The server's error message; vLLM's errors are objects, but that of a missing API key is a string."""
    try:
        answer = json.loads(body)
    except ValueError:
        return None
    error = (answer.get("error") or answer.get("detail")) if isinstance(answer, dict) else None
    return str(error.get("message")) if isinstance(error, dict) else error


def _words(error: httpx.HTTPError) -> str:
    return str(error) or type(error).__name__
