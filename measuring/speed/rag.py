# SPDX-License-Identifier: Apache-2.0
"""A RAG request as each system takes it, and its answer as its client sees it."""

import time
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx

from app.documents.document import Document
from measuring.quality.client import json_events

Mode = Literal["chunked", "full"]


class BenchmarkError(Exception):
    """Nothing is reported: a server failed, or answered what it must not. The message says which, and how."""


@dataclass(frozen=True, slots=True)
class Query:
    """A system prompt, chunks and a question; the answer is ``max_tokens`` long, greedy."""

    system: str
    chunks: tuple[str, ...]
    question: str
    max_tokens: int

    def stock_body(self) -> dict[str, Any]:
        """For vLLM's chat completions: the prompt that Tessera renders, as one text."""
        text = "".join(Document(chunk).render() for chunk in self.chunks) + self.question
        system = [{"role": "system", "content": self.system}] if self.system else []
        return {**self._sampling(), "messages": [*system, {"role": "user", "content": text}]}

    def tessera_body(self, namespace: str = "default", mode: Mode = "chunked") -> dict[str, Any]:
        """For ``/v1/rag/chat``."""
        prompt = {"system": self.system, "chunks": list(self.chunks), "question": self.question}
        cache: dict[str, Any] = {"mode": mode, "namespace": namespace}
        return {**self._sampling(), **prompt, "cache": cache}

    def _sampling(self) -> dict[str, Any]:
        return {
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0,
            "max_tokens": self.max_tokens,
            "ignore_eos": True,
        }


@dataclass(slots=True)
class Answer:
    """``ttft_s`` is from sending the request to the first event with text in it, ``latency_s`` to the last one."""

    text: str = ""
    ttft_s: float = 0.0
    latency_s: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    report: dict[str, Any] = field(default_factory=dict)
    """The cache report; empty from stock vLLM."""

    @property
    def tpot_s(self) -> float:
        """Seconds per output token after the first; 0 if there is only one."""
        return (self.latency_s - self.ttft_s) / max(self.completion_tokens - 1, 1)


async def ask(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Answer:
    """Streams one answer; raises :class:`BenchmarkError`."""
    answer, started, first = Answer(), time.perf_counter(), None
    try:
        async with client.stream("POST", path, json=body) as response:
            if response.status_code != 200:
                raise BenchmarkError(f"{path}: {response.status_code}: {await response.aread()!r}")
            async for event in json_events(response):
                now = time.perf_counter() - started
                if "error" in event:
                    raise BenchmarkError(f"{path}: {event['error']}")
                if text := "".join(choice["delta"].get("content") or "" for choice in event.get("choices", ())):
                    answer.text += text
                    first = now if first is None else first
                    answer.latency_s = now
                if usage := event.get("usage"):
                    answer.prompt_tokens = usage["prompt_tokens"]
                    answer.completion_tokens = usage["completion_tokens"]
                answer.report = event.get("cache") or answer.report
    except httpx.HTTPError as error:
        raise BenchmarkError(f"{path}: {type(error).__name__} {error}") from error
    if first is None:
        raise BenchmarkError(f"{path}: no token arrived")
    answer.ttft_s = first
    return answer
