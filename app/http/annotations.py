# SPDX-License-Identifier: Apache-2.0
"""Citations as OpenAI's schemas have them: ``url_citation`` annotations of a message's text."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import Message, Send

from app.http.messages import held
from engine_ext.client.request import Ticket


def annotate(answer: Mapping[str, Any], ticket: Ticket, streamed: str = "") -> None:
    """Add the citations of a request's report, if it has any, to the text of its ``answer``.

    ``answer`` is a chat completion, the last event of one, whose text was ``streamed``, a response, or the event that
    completes it. Nothing is added if the text isn't the one that was cited: a parser has taken reasoning or tool calls
    out of it.
    """
    if ticket.cited is None:
        return
    found = list(_annotations(ticket.report or {}, ticket.labels))
    for choice in answer.get("choices") or []:
        message = choice.get("message") or choice.get("delta")
        if message is not None and (message.get("content") if "message" in choice else streamed) == ticket.cited:
            message["annotations"] = [{"type": "url_citation", "url_citation": each} for each in found]
    for output in (answer.get("response") or answer).get("output") or []:
        for content in output.get("content") or []:
            if content.get("text") == ticket.cited:
                content["annotations"] = [{"type": "url_citation", **each} for each in found]


def annotating(ticket: Ticket, send: Send) -> Send:
    """A ``send`` that adds citations to an answer in JSON."""

    def is_answer(start: Message) -> bool:
        headers = Headers(raw=start.get("headers", []))
        return bool(start["status"] == 200 and headers.get("content-type", "").startswith("application/json"))

    async def send_annotated(start: Message, parts: list[bytes]) -> None:
        answer = json.loads(b"".join(parts))
        annotate(answer, ticket)
        body = json.dumps(answer, ensure_ascii=False).encode()
        MutableHeaders(scope=start)["content-length"] = str(len(body))
        await send(start)
        await send({"type": "http.response.body", "body": body})

    return held(send, is_answer, send_annotated)


def _annotations(report: Mapping[str, Any], labels: Sequence[str]) -> Iterator[dict[str, Any]]:
    """One for each chunk of each sentence; ``url`` is the document's id, or the chunk's number from 1."""
    passages = {passage["id"]: passage for passage in report.get("retrieved") or []}
    for citation in report["citations"]:
        for cited in citation["chunks"]:
            if cited.get("is_weak"):
                continue
            chunk = report["chunks"][cited["chunk"]]
            url = chunk["id"] or f"#chunk-{cited['chunk'] + 1}"
            title = _title(passages[chunk["id"]]) if chunk["id"] in passages else chunk["id"] or labels[chunk["index"]]
            yield {"start_index": citation["start"], "end_index": citation["end"], "url": url, "title": title}


def _title(passage: Mapping[str, Any]) -> str:
    page = f", page {passage['page']}" if passage.get("page") is not None else ""
    return f"{passage['file']}{page}"
