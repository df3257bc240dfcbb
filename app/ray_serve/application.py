# SPDX-License-Identifier: Apache-2.0
"""The Serve application: an ingress in front of replicas of the engine."""

from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig

from app.ray_serve.engine import EngineReplica
from app.ray_serve.ingress import Ingress, ingress_app
from app.ray_serve.options import Options
from app.ray_serve.request_router import DocumentRouter


def build(args: dict[str, Any]) -> Application:
    """The application; raises ``pydantic.ValidationError`` for arguments unknown to :class:`Options`."""
    options = Options(**args)
    engine = serve.deployment(EngineReplica, name="Engine").options(
        request_router_config=RequestRouterConfig(request_router_class=DocumentRouter),
        **options.engine_options(),
    )
    ingress = serve.deployment(serve.ingress(ingress_app)(Ingress), name="Ingress").options(**options.ingress_options())
    return ingress.bind(engine.bind(options.arguments()), options)
