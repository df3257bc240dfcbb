# SPDX-License-Identifier: Apache-2.0
"""``GET /v1/cluster`` of a replica; a router's answer also has its decisions."""

from http import HTTPStatus
from typing import Any

from fastapi import APIRouter

from app.http.answers import Cluster
from app.http.openapi import answers
from app.routes.dependencies import Context
from engine_ext.wire.vllm_compat import GracefulHTTPError
from replicas.registry import RegistryError

router = APIRouter(prefix="/v1", tags=["Cluster"])


@router.get(
    "/cluster",
    summary="The replicas in the registry",
    response_model=None,
    responses=answers(Cluster, HTTPStatus.NOT_FOUND),
)
async def cluster(context: Context) -> dict[str, Any]:
    """404 without ``--registry``. The list is empty while the registry is lost."""
    if (registry := context.registry) is None:
        raise GracefulHTTPError("this server has no registry (--registry)", HTTPStatus.NOT_FOUND)
    try:
        replicas, is_up = [replica.to_dict() for replica in await registry.replicas()], True
    except RegistryError:
        replicas, is_up = [], False
    return {"registry": {"up": is_up, "invalid_entries": registry.num_invalid}, "replicas": replicas}
