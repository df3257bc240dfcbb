# SPDX-License-Identifier: Apache-2.0
"""Many requests at once."""

from typing import Any

from tests.engine.server import TesseraServer, stream_events, token_logprobs


def rag_body(system: str, chunks: list[str], question: str, strategy: str) -> dict[str, Any]:
    asked = {"system": system, "chunks": chunks, "question": question, "cache": {"position_strategy": strategy}}
    return {**asked, "max_tokens": 6, "temperature": 0, "ignore_eos": True, "logprobs": True}


def apart(body: dict[str, Any]) -> dict[str, Any]:
    """The same request in an empty namespace."""
    return {**body, "cache": {**body["cache"], "namespace": "apart"}} if "cache" in body else body


def chat_body(content: str) -> dict[str, Any]:
    messages = [{"role": "user", "content": content}]
    return {"messages": messages, "max_tokens": 6, "temperature": 0, "ignore_eos": True, "logprobs": True}


def run(server: TesseraServer, path: str, body: dict[str, Any], stream: bool) -> tuple[list[float], dict[str, Any]]:
    """Log probabilities and the cache report (empty for ordinary chat)."""
    if not stream:
        response = server.post(path, body)
        return token_logprobs(response), response.get("cache") or {}
    events = stream_events(server, path, body)
    entries = [
        entry
        for event in events
        for choice in event["choices"]
        for entry in (choice.get("logprobs") or {}).get("content") or ()
    ]
    return [entry["logprob"] for entry in entries], events[-1].get("cache") or {}
