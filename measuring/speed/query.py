# SPDX-License-Identifier: Apache-2.0
"""A RAG request, as stock vLLM and as Tessera take it."""

from dataclasses import dataclass
from typing import Any, Literal

from app.documents.document import Document

Mode = Literal["chunked", "full"]


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
        return {**self._sampling(), **prompt, "cache": {"mode": mode, "namespace": namespace}}

    def _sampling(self) -> dict[str, Any]:
        return {
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0,
            "max_tokens": self.max_tokens,
            "ignore_eos": True,
        }
