# SPDX-License-Identifier: Apache-2.0
"""Asks a running Tessera server questions over documents."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from app.documents.document import Document
from app.modes import cache_field, mode_of, special
from measuring.kit.client import (
    Answer,
    Client,
    LostServerError,
    RefusedError,
    ServerError,
    SetupError,
    error_message,
)
from measuring.kit.servers import TEMPLATE_ADVICE
from measuring.quality.divergence import TOP
from measuring.quality.metrics import REFUSAL
from measuring.quality.questions.questions import Question

FORCED_TOKENS: Final = "tessera_forced_tokens"
"""Key, in a request's ``vllm_xargs``, of the token ids that :mod:`measuring.quality.forced` has a server generate."""

LEAD: Final = "The answer is"
"""The words before a right answer whose log probability is taken. A refusal has none before it."""

_CHAT: Final = "/v1/rag/chat"


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """``cache_off`` is why the server's chunk cache is off, ``None`` if it is on.

    ``strategy`` is that of requests that name none, ``special`` has modes that not every server has.
    """

    model: str
    vllm: str
    cache_off: str | None
    strategy: str
    special: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class AskOptions:
    """Options of all requests of a run.

    ``refusal`` is right where no chunk has the answer. ``ahead``: chunks that are to be reused are computed before.
    """

    model: str
    max_tokens: int
    refusal: str = REFUSAL
    ahead: bool = False


@dataclass(frozen=True, slots=True)
class Judged:
    """The model's view of the right answer: its log probability, and those of likely tokens at each of its tokens."""

    logprob: float
    top_logprobs: tuple[dict[str, float], ...]


class TesseraClient(Client):
    """A client of one Tessera server; an asynchronous context manager."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        super().__init__(url, api_key=api_key)
        self._token_ids: dict[str, list[int]] = {}
        self._forces_tokens = True

    async def describe(self) -> ServerInfo:
        """The served model and the cache's state; raises :class:`SetupError` unless a Tessera server answers."""
        try:
            stats = await self.get("/v1/cache/stats")
            models = await self.get("/v1/models")
            version = await self.get("/version")
            cache_off = None if stats["enabled"] else str(stats["reason"])
            strategy = stats.get("position_strategy") or "full"
            name = models["data"][0]["id"]
            return ServerInfo(name, version["version"], cache_off, strategy, special(stats))
        except LostServerError as error:
            raise SetupError(f"no server at {self.url}: {error.__cause__}") from error
        except (ValueError, LookupError, TypeError) as error:
            raise SetupError(f"{self.label} is not a Tessera server: its answer isn't Tessera's") from error

    async def ask(self, question: Question, mode: str, options: AskOptions) -> Answer:
        """The answer, streamed. A request that can't reuse chunks is answered in full attention: see the report.

        Raises :class:`ServerError` or a subclass.
        """
        answer = await self.stream(_CHAT, _body(question, mode, options))
        if not answer.cache:
            raise ServerError(f"an answer of {self.label} ended before its cache report")
        return answer

    async def judge(self, question: Question, mode: str, options: AskOptions) -> Judged | None:
        """How likely the first right answer is behind the words :data:`LEAD`, which are not counted.

        Without them it would tell how a model likes to begin, in sentences or in words.

        ``None`` if the server can't be made to say it (:mod:`measuring.quality.forced`), answered in another mode, or
        tells fewer likely tokens (``--max-logprobs``). Raises :class:`ServerError` or a subclass.
        """
        lead, said = (LEAD, f"{LEAD} {question.answers[0]}") if question.answers else ("", options.refusal)
        lead_ids = await self._tokens_to_force(lead) if lead else []
        token_ids = await self._tokens_to_force(said)
        if lead_ids is None or token_ids is None:
            return None
        forced = {
            "stream": False,
            "max_tokens": len(token_ids),
            "ignore_eos": True,
            "logprobs": True,
            "top_logprobs": TOP,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "vllm_xargs": {FORCED_TOKENS: token_ids},
        }
        try:
            given = await self.post(_CHAT, {**_body(question, mode, options), **forced})
        except RefusedError:
            return None
        (choice,) = given["choices"]
        self._forces_tokens = choice["token_ids"] == token_ids
        if not self._forces_tokens or mode_of(given["cache"]) != mode:
            return None
        tokens = choice["logprobs"]["content"]
        # The last token of the words may be another where the answer follows.
        num_lead = next(i for i, token in enumerate(token_ids) if token not in lead_ids[i : i + 1])
        return Judged(
            sum(float(token["logprob"]) for token in tokens[num_lead:]),
            tuple({top["token"]: round(top["logprob"], 4) for top in token["top_logprobs"]} for token in tokens),
        )

    async def _tokens_to_force(self, text: str) -> list[int] | None:
        """The text's tokens; ``None`` if the server cannot tell or force them."""
        if self._forces_tokens and text not in self._token_ids:
            try:
                tokenized = await self.post("/tokenize", {"prompt": text, "add_special_tokens": False})
                self._token_ids[text] = tokenized["tokens"]
            except ServerError:
                self._forces_tokens = False
        return self._token_ids[text] if self._forces_tokens else None

    def ingest(self, system: str, documents: Sequence[Document]) -> AsyncIterator[dict[str, Any]]:
        """Computes the documents ahead of time behind ``system``; yields the server's lines as they come."""
        return self.lines("/v1/rag/chunks", {"system": system, "chunks": _chunks(documents)})

    def failure(self, status: int, body: bytes, path: str) -> ServerError:
        message = error_message(body)
        if status == 404 and message in (None, "Not Found"):
            return SetupError(f"{self.label} is not a Tessera server: it has no {path}")
        if status in (401, 403):
            return SetupError(f"{self.label} wants another API key (--api-key): {message}")
        if message and "chat template" in message:
            return SetupError(f"{message} ({TEMPLATE_ADVICE})")
        if status == 404:
            return SetupError(f"{self.label}: {message}")
        if status in (400, 413, 422):
            return RefusedError(message or f"HTTP {status}")
        return super().failure(status, body, path)


def _body(question: Question, mode: str, options: AskOptions) -> dict[str, Any]:
    return {
        "model": options.model,
        "system": question.system,
        "chunks": _chunks(question.chunks),
        "question": question.question,
        "cache": cache_field(mode),
        "stream": True,
        "temperature": 0,
        "max_tokens": options.max_tokens,
    }


def _chunks(documents: Sequence[Document]) -> list[dict[str, str]]:
    return [{name: value for name, value in asdict(document).items() if value} for document in documents]
