# SPDX-License-Identifier: Apache-2.0
"""Embeddings of texts: from an endpoint with OpenAI's interface, or from a small model in this process."""

import asyncio
import json
import math
import time
from collections.abc import Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final, Protocol
from urllib.parse import parse_qsl, unquote, urlsplit

import httpx
import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer
from xxhash import xxh3_64

from machine.http_client import async_http_client

Matrix = NDArray[np.float32]
_PER_CALL: Final = 64
"""Texts of a request, or of a pass through the model."""
_SHORTEST: Final = 64
"""Characters of a text that an endpoint is not asked to take a part of."""
_TIMEOUT: Final = httpx.Timeout(30, connect=2)
_PAUSE_S: Final = 5.0
"""How long a server that can't be reached is not asked again."""
_REFUSALS: Final = (HTTPStatus.BAD_REQUEST, HTTPStatus.REQUEST_ENTITY_TOO_LARGE, HTTPStatus.UNPROCESSABLE_ENTITY)
_LONGEST: Final = 512
"""Tokens that a model in this process reads of a text."""


class EmbeddingError(Exception):
    """There are no embeddings, or no reranked passages; the message says why."""


class Embedder(Protocol):
    """Makes vectors of unit length. ``name`` changes with the model: vectors of two are not comparable."""

    name: str

    async def embed(self, texts: Sequence[str]) -> Matrix:
        """A row for each text; raises :class:`EmbeddingError`."""
        ...


class Endpoint:
    """A server with ``/embeddings`` as OpenAI's, and perhaps ``/rerank`` as vLLM's, Jina's and Cohere's."""

    def __init__(self, url: str) -> None:
        """``url`` ends in ``/v1`` with most servers; ``?model=NAME&reranker=NAME``, and a key as ``://:KEY@host``.

        Without a model the server chooses. Raises :class:`EmbeddingError` for another URL.
        """
        parts = urlsplit(url)
        options = dict(parse_qsl(parts.query))
        model, self.reranker = options.pop("model", None), options.pop("reranker", None)
        if parts.scheme not in ("http", "https") or not parts.hostname or options:
            raise EmbeddingError("--retriever takes http://HOST/v1?model=NAME&reranker=NAME, or file:///FOLDER")
        place = parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="")
        self._url = place.geturl().rstrip("/")
        self.name = model or self._url
        self._model = {"model": model} if model else {}
        self._failure, self._retry_at = "", 0.0
        headers = {"authorization": f"Bearer {unquote(parts.password)}"} if parts.password else {}
        try:
            self._client = async_http_client(self._url, headers=headers, timeout=_TIMEOUT)
        except httpx.UnsupportedProtocol as error:
            raise EmbeddingError(f"{self._url} can't be asked: {error}") from error

    async def embed(self, texts: Sequence[str]) -> Matrix:
        """See :meth:`Embedder.embed`. Of a text that is too long for the model, its beginning."""
        parts = [await self._embed(texts[start : start + _PER_CALL]) for start in range(0, len(texts), _PER_CALL)]
        rows = [row for part in parts for row in part]
        if len({len(row) for row in rows}) != 1:
            raise EmbeddingError(f"{self._url}/embeddings gave vectors of different lengths")
        return _unit(np.array(rows, dtype=np.float32))

    async def rerank(self, query: str, texts: Sequence[str]) -> list[float]:
        """The relevance of each text; raises :class:`EmbeddingError`."""
        asked = {"model": self.reranker, "query": query, "documents": list(texts)}
        answer = await self._post("/rerank", asked)
        try:
            scores = {int(each["index"]): float(each["relevance_score"]) for each in answer["results"]}
            return [scores[place] for place in range(len(texts))]
        except (KeyError, TypeError, ValueError) as error:
            raise EmbeddingError(f"{self._url}/rerank gave no score for each text") from error

    async def _embed(self, texts: Sequence[str]) -> list[list[float]]:
        try:
            answer = await self._post("/embeddings", {**self._model, "input": list(texts), "encoding_format": "float"})
        except _RefusedError:
            if len(texts) > 1:  # one text must not take the others along
                middle = len(texts) // 2
                return [*await self._embed(texts[:middle]), *await self._embed(texts[middle:])]
            if len(texts[0]) > _SHORTEST:
                return await self._embed([texts[0][: len(texts[0]) // 2]])
            raise
        try:
            rows = [[float(number) for number in each["embedding"]] for each in _by_index(answer["data"])]
        except (KeyError, TypeError, ValueError) as error:
            raise EmbeddingError(f"{self._url}/embeddings gave no vectors") from error
        if len(rows) != len(texts) or not all(row and all(map(math.isfinite, row)) for row in rows):
            raise EmbeddingError(f"{self._url}/embeddings gave no vector for each text")
        return rows

    async def _post(self, path: str, body: dict[str, Any]) -> Any:
        if time.monotonic() < self._retry_at:
            raise EmbeddingError(self._failure)
        try:
            answer = await self._client.post(path, json=body)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self._failed(f"{self._url}{path}: {type(error).__name__}: {error}".rstrip(": ")) from error
        said = f"{self._url}{path} answered {answer.status_code}: {answer.text[:200]}"
        if answer.is_server_error:
            raise self._failed(said)
        if answer.status_code in _REFUSALS:
            raise _RefusedError(said)
        if not answer.is_success:
            raise EmbeddingError(said)
        try:
            return answer.json()
        except ValueError as error:
            raise EmbeddingError(f"{self._url}{path} gave no JSON") from error

    def _failed(self, why: str) -> EmbeddingError:
        """Notes a failure that later requests need not wait for again."""
        self._failure, self._retry_at = why, time.monotonic() + _PAUSE_S
        return EmbeddingError(why)


class _RefusedError(EmbeddingError):
    """The endpoint doesn't take these texts."""


class LocalModel:
    """A sentence transformer in a folder, exported to ONNX: ``model.onnx`` and ``tokenizer.json``."""

    def __init__(self, folder: Path) -> None:
        """Raises :class:`EmbeddingError` if it can't be loaded."""
        try:
            import onnxruntime
        except ImportError as error:
            raise EmbeddingError("onnxruntime is not installed: pip install 'tessera-rag[embeddings]'") from error
        try:
            model = (folder / "model.onnx").read_bytes()
            self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
            self._session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
            self._takes_first = _takes_first_token(folder / "1_Pooling" / "config.json")
        except Exception as error:  # another package's code, about a file that may be anything
            raise EmbeddingError(f"{folder} has no model of embeddings: {type(error).__name__}: {error}") from error
        self.name = f"{folder.name}-{xxh3_64(model).hexdigest()}"
        self._inputs = [each.name for each in self._session.get_inputs()]
        self._tokenizer.enable_truncation(_LONGEST)
        self._tokenizer.enable_padding()
        self._lock = asyncio.Lock()

    async def embed(self, texts: Sequence[str]) -> Matrix:
        """See :meth:`Embedder.embed`."""
        async with self._lock:  # it uses all cores
            return await asyncio.to_thread(self._embed, texts)

    def _embed(self, texts: Sequence[str]) -> Matrix:
        order = sorted(range(len(texts)), key=lambda place: len(texts[place]))  # so that little is padded
        batches = [order[start : start + _PER_CALL] for start in range(0, len(order), _PER_CALL)]
        rows = np.concatenate([self._pooled([texts[place] for place in batch]) for batch in batches])
        vectors = np.empty_like(rows)
        vectors[order] = rows
        return _unit(vectors)

    def _pooled(self, texts: Sequence[str]) -> Matrix:
        encoded = self._tokenizer.encode_batch(list(texts))
        given = {
            "input_ids": np.array([each.ids for each in encoded], dtype=np.int64),
            "attention_mask": np.array([each.attention_mask for each in encoded], dtype=np.int64),
            "token_type_ids": np.array([each.type_ids for each in encoded], dtype=np.int64),
        }
        states: Matrix = self._session.run(None, {name: given[name] for name in self._inputs})[0]
        if states.ndim == 2:  # pooled by the model
            return states
        if self._takes_first:
            return states[:, 0]
        mask = given["attention_mask"][:, :, None].astype(np.float32)
        pooled: Matrix = (states * mask).sum(axis=1) / mask.sum(axis=1)
        return pooled


def _by_index(data: Any) -> list[Any]:
    return sorted(data, key=lambda each: each["index"])


def _takes_first_token(config: Path) -> bool:
    """Whether sentence-transformers' configuration takes the first token's state; otherwise the mean of all."""
    return config.exists() and bool(json.loads(config.read_bytes()).get("pooling_mode_cls_token"))


def _unit(vectors: Matrix) -> Matrix:
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    unit: Matrix = vectors / np.maximum(lengths, np.finfo(np.float32).tiny)
    return unit
