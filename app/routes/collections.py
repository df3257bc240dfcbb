# SPDX-License-Identifier: Apache-2.0
"""``/v1/rag/collections``: files as passages that questions retrieve."""

import json
from collections.abc import AsyncIterator
from dataclasses import asdict
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, File, Form, Path, Query, UploadFile
from fastapi.responses import JSONResponse

from app.catalog.collection_ingestion import CollectionIngestion, IngestionRefusedError
from app.documents.cache_options import NAMESPACE
from app.documents.document import CONTEXT_TOKENS, BadRequestError
from app.documents.retrieve_field import COLLECTION_NAME
from app.documents.splitting import LEAST_TOKENS
from app.errors import error_response
from app.http.answers import (
    Collection,
    CollectionDeleted,
    CollectionEnd,
    CollectionList,
    ComputedPassage,
    PassageList,
    StoredFile,
)
from app.http.openapi import JsonLines, JsonList, answers
from app.routes.dependencies import AppState, Context, Manager
from engine_ext.client.request import NamespaceRefusedError, own_namespace
from engine_ext.client.threads import in_thread

router = APIRouter(prefix="/v1/rag/collections", tags=["Collections"])

DEFAULT_MAX_TOKENS = 256
Name = Annotated[str, Path(pattern=COLLECTION_NAME)]
Namespace = Annotated[
    str | None,
    Query(min_length=1, max_length=128, pattern=NAMESPACE, description="default: the caller's own"),
]


@router.post(
    "/{name}",
    summary="Put files into a collection, and compute their passages",
    operation_id="ingest_files",
    response_model=None,
    response_class=JsonLines,
    responses=answers(
        list[StoredFile | ComputedPassage | CollectionEnd],
        HTTPStatus.CONFLICT,
        HTTPStatus.SERVICE_UNAVAILABLE,
        HTTPStatus.INSUFFICIENT_STORAGE,
    ),
)
async def ingest_files(
    name: Name,
    files: Annotated[list[UploadFile], File(description="of the types in docs/collections.md")],
    state: AppState,
    context: Context,
    manager: Manager,
    system: Annotated[str | None, Form(description="system prompt of its questions; the first call's stays")] = None,
    max_tokens: Annotated[int | None, Form(ge=LEAST_TOKENS, description="most of a passage; default: 256")] = None,
    context_tokens: Annotated[
        int | None,
        Form(ge=0, le=CONTEXT_TOKENS, description="most of the text before a passage that it is computed behind"),
    ] = None,
    namespace: Namespace = None,
) -> JsonLines | JSONResponse:
    """Answers with JSON lines: per file one, with one per computed passage behind it, then a summary.

    A file replaces an earlier one of its name; unchanged ones stay. An interrupted call keeps what it stored, and
    passages that it did not compute are computed when a question needs them. 400 if no file can be read.
    """
    retrieval, settings = context.retrieval, context.settings
    collections, default = retrieval.collections, settings.most_tokens(DEFAULT_MAX_TOKENS)
    most = None if max_tokens is None else settings.most_tokens(max_tokens)
    about = await in_thread(collections.begin, _own(namespace), name, system, most, default, context_tokens)
    lines = CollectionIngestion(state, manager, collections, about).run(files)
    try:
        first = await anext(lines)
    except IngestionRefusedError as error:
        return error_response(error.response)
    prepared = retrieval.prepared(about, _from(first, lines))
    return JsonLines(json.dumps(line) + "\n" async for line in prepared)


async def _from(first: dict[str, Any], others: AsyncIterator[dict[str, Any]]) -> AsyncIterator[dict[str, Any]]:
    yield first
    async for line in others:
        yield line


def _own(namespace: str | None) -> str:
    try:
        return own_namespace(namespace)
    except NamespaceRefusedError as error:
        raise BadRequestError(str(error), "namespace") from error


@router.get(
    "",
    summary="List collections",
    operation_id="list_collections",
    response_model=None,
    responses=answers(CollectionList),
)
async def list_collections(context: Context, namespace: Namespace = None) -> dict[str, Any]:
    """Those of one namespace, by name."""
    return {"object": "list", "data": await in_thread(context.retrieval.collections.summaries, _own(namespace))}


@router.get(
    "/{name}",
    summary="One collection and its files",
    operation_id="get_collection",
    response_model=None,
    responses=answers(Collection, HTTPStatus.NOT_FOUND),
)
async def get_collection(name: Name, context: Context, namespace: Namespace = None) -> JsonList:
    """Files by name, without their texts."""
    corpus = await in_thread(context.retrieval.collections.corpus, _own(namespace), name)
    files = (corpus.files[file] for file in sorted(corpus.files))
    listed = ({"file": each.file, "bytes": each.bytes, "passages": len(each.passages)} for each in files)
    return JsonList(await in_thread(corpus.summary), "data", listed)


@router.get(
    "/{name}/passages",
    summary="The passages of a file",
    operation_id="list_passages",
    response_model=None,
    responses=answers(PassageList, HTTPStatus.NOT_FOUND),
)
async def list_passages(
    name: Name, file: Annotated[str, Query(min_length=1)], context: Context, namespace: Namespace = None
) -> JsonList:
    """In the file's order, with their texts."""
    corpus = await in_thread(context.retrieval.collections.corpus, _own(namespace), name)
    return JsonList({"object": "list"}, "data", map(asdict, corpus.file(file).passages))


@router.delete(
    "/{name}",
    summary="Delete a collection, or one of its files",
    operation_id="delete_collection",
    response_model=None,
    responses=answers(CollectionDeleted, HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT),
)
async def delete_collection(
    name: Name,
    state: AppState,
    manager: Manager,
    context: Context,
    file: Annotated[str | None, Query(min_length=1, description="only this file")] = None,
    namespace: Namespace = None,
) -> dict[str, Any]:
    """Removes texts, and the KV of their passages from the pool and all tiers."""
    collections, own = context.retrieval.collections, _own(namespace)
    about, ids = await in_thread(collections.delete, own, name, file)
    await CollectionIngestion(state, manager, collections, about).drop(ids)
    return {"collection": name, "file": file, "passages": len(ids), "deleted": True}
