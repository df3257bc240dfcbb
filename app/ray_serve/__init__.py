# SPDX-License-Identifier: Apache-2.0
"""Tessera over many machines with Ray Serve: ``serve run app.ray_serve:build model=MODEL num_replicas=2``.

Needs the extra ``ray``. Importing this package imports Ray, but not vLLM, which only the engine's replicas need.
"""

from app.ray_serve.application import build

__all__ = ["build"]
