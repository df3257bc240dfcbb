# SPDX-License-Identifier: Apache-2.0
"""An HTTP client of one server, with times as its user sees them.

::

    ServerError            the run can't go on
    ├── LostServerError    … since the server can't be reached
    ├── SetupError         … nor will it, before something is set up differently
    └── RefusedError       the server can't take this one request
"""

import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Self

import httpx

from machine.http_client import async_http_client

# A long prompt may take minutes to its first token, on a CPU.
_TIMEOUT = httpx.Timeout(1800, connect=10)


class ServerError(Exception):
    """The server is gone, or failed; the message says how. What was asked for may be tried again."""


class LostServerError(ServerError):
    """The server can't be reached, or the connection to it broke."""


class SetupError(ServerError):
    """The server can't be used as it is; the message says what to change."""


class RefusedError(ServerError):
    """The server refused this request, for example as too long; others may succeed."""


@dataclass(slots=True)
class Answer:
    """A streamed answer; seconds count from sending the request."""

    text: str = ""
    ttft_s: float | None = None
    """To the first event with text in it; ``None`` if the answer is empty."""
    latency_s: float = 0.0
    """To the last event with text in it."""
    total_s: float = 0.0
    """To the end of the stream."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cache: dict[str, Any] = field(default_factory=dict)
    """Tessera's report (``cache/report.py``); empty from stock vLLM."""

    @property
    def tpot_s(self) -> float:
        """Seconds per output token after the first; 0 if there is only one."""
        return (self.latency_s - (self.ttft_s or 0.0)) / max(self.completion_tokens - 1, 1)

    def add(self, event: dict[str, Any], at_s: float) -> None:
        """Takes in one event of the stream."""
        if text := "".join(choice["delta"].get("content") or "" for choice in event.get("choices", ())):
            self.text += text
            self.ttft_s = at_s if self.ttft_s is None else self.ttft_s
            self.latency_s = at_s
        if usage := event.get("usage"):
            self.prompt_tokens, self.completion_tokens = usage["prompt_tokens"], usage["completion_tokens"]
        self.cache = event.get("cache") or self.cache


class Client:
    """A client of the server at ``url``; an asynchronous context manager.

    ``label`` names the server in messages. All methods raise :class:`ServerError` or a subclass.
    """

    def __init__(self, url: str, label: str | None = None, api_key: str | None = None) -> None:
        self.url = url.rstrip("/")
        self.label = label or f"the server at {self.url}"
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = async_http_client(self.url, headers=headers, timeout=_TIMEOUT)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def get(self, path: str) -> Any:
        """The JSON of an answer."""
        return (await self.request("GET", path)).json()

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        """The JSON of an answer."""
        return (await self.request("POST", path, body)).json()

    async def request(self, method: str, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        """The answer of status 200 to a request."""
        try:
            response = await self._http.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise self._lost(error) from error
        if response.status_code != HTTPStatus.OK:
            raise self.failure(response.status_code, response.content, path)
        return response

    async def stream(self, path: str, body: dict[str, Any]) -> Answer:
        """A streamed answer, timed."""
        answer, started = Answer(), time.perf_counter()
        try:
            async with self._http.stream("POST", path, json=body) as response:
                await self._check(response, path)
                async for event in json_events(response):
                    if "error" in event:
                        raise self.failure(event["error"].get("code", 500), json.dumps(event).encode(), path)
                    answer.add(event, time.perf_counter() - started)
        except httpx.HTTPError as error:
            raise self._lost(error) from error
        answer.total_s = time.perf_counter() - started
        return answer

    async def lines(self, path: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """The JSON lines of an answer, as they come."""
        try:
            async with self._http.stream("POST", path, json=body) as response:
                await self._check(response, path)
                async for line in response.aiter_lines():
                    yield json.loads(line)
        except httpx.HTTPError as error:
            raise self._lost(error) from error

    def failure(self, status: int, body: bytes, path: str) -> ServerError:
        """The error that stands for an answer with another status than 200."""
        return ServerError(f"{self.label} failed: {path}: HTTP {status}: {error_message(body) or 'no message'}")

    async def _check(self, response: httpx.Response, path: str) -> None:
        if response.status_code != HTTPStatus.OK:
            raise self.failure(response.status_code, await response.aread(), path)

    def _lost(self, error: httpx.HTTPError) -> LostServerError:
        return LostServerError(f"lost {self.label}: {str(error) or type(error).__name__}")


async def json_events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The JSON of the stream's events. httpx's own lines would end inside text with, say, U+2028 in it."""
    rest = b""
    async for part in response.aiter_bytes():
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            if line.startswith(b"data: {"):
                yield json.loads(line.removeprefix(b"data: "))


def error_message(body: bytes) -> str | None:
    """The server's error message: a string, or in an object, as most of vLLM's."""
    try:
        answer = json.loads(body)
    except ValueError:
        return None
    error = (answer.get("error") or answer.get("detail")) if isinstance(answer, dict) else None
    return str(error.get("message")) if isinstance(error, dict) else error
