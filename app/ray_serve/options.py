# SPDX-License-Identifier: Apache-2.0
"""Arguments of ``app.ray_serve:build``: from the command line, Serve's configuration file, or Python."""

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from cache.report import ScopeName

MOST_ONGOING_REQUESTS = 1024
"""Requests that Ray admits to one replica at once; vLLM's queue is better than Ray's, which polls."""


def _from_json(value: Any) -> Any:
    """Parses JSON: ``serve run`` passes every argument as text."""
    return json.loads(value) if isinstance(value, str) else value


Mapped = Annotated[dict[str, Any], BeforeValidator(_from_json)]


class Options(BaseModel):
    """Unknown keys are errors. ``engine`` and ``ingress`` are options of Ray's deployments that override defaults."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = Field(description="a folder or a name that vLLM knows")
    num_replicas: int | Literal["auto"] | None = Field(None, description="replicas of the engine; auto: Ray's choice")
    flags: Mapped = Field(default_factory=dict, description="other flags of tessera serve, with or without dashes")
    registry: str | None = Field(None, description="as --registry of tessera serve; default: routing by hash and load")
    chunk_separator: str | None = Field(None, min_length=1, description="as --chunk-separator")
    chunk_scope: ScopeName = Field("system", description="as --chunk-scope")
    documents: str = Field("off", description="as --documents")
    engine: Mapped = Field(default_factory=dict, description="Ray's options of the engine's deployment")
    ingress: Mapped = Field(default_factory=dict, description="Ray's options of the ingress deployment")

    @model_validator(mode="after")
    def _every_flag_in_one_place(self) -> "Options":
        if twice := sorted(name for name in self.flags if _underscored(name) in _NOT_AMONG_FLAGS):
            raise ValueError(f"{', '.join(twice)}: not among the flags, but beside them, or Ray's business")
        return self

    def arguments(self) -> list[str]:
        """The command line for ``tessera serve``."""
        shared = {name: getattr(self, name) for name in _SHARED}
        flags = {**{name: value for name, value in shared.items() if value is not None}, **self.flags}
        return [self.model, *(part for name, value in flags.items() for part in _flag(name, value))]

    def engine_options(self) -> dict[str, Any]:
        """Options of the engine's deployment.

        With tensor parallelism they include, unless the user sets resources, a placement group as in Ray's
        documentation: the replica, and on the same machine a worker for each GPU.
        """
        options: dict[str, Any] = {"max_ongoing_requests": MOST_ONGOING_REQUESTS, "health_check_period_s": 5.0}
        if self.num_replicas is not None:
            options["num_replicas"] = self.num_replicas
        is_placed = not {"ray_actor_options", "placement_group_bundles"}.isdisjoint(self.engine)
        if (workers := self._tensor_parallel_size()) > 1 and not is_placed:
            options["placement_group_bundles"] = [{"CPU": 1.0}, *([{"CPU": 1.0, "GPU": 1.0}] * workers)]
            options["placement_group_strategy"] = "STRICT_PACK"
        return {**options, **self.engine}

    def ingress_options(self) -> dict[str, Any]:
        """Options of the ingress deployment."""
        return {"max_ongoing_requests": MOST_ONGOING_REQUESTS, **self.ingress}

    def _tensor_parallel_size(self) -> int:
        flags: Mapping[str, Any] = {_underscored(name): value for name, value in self.flags.items()}
        return int(flags.get("tensor_parallel_size", 1))


_SHARED = ("registry", "chunk_separator", "chunk_scope", "documents")
# Both sides need the shared ones. The others have no use here, since Ray names and reaches replicas: without an address
# of their own, none can fetch what another one has computed.
_NOT_AMONG_FLAGS = {*_SHARED, "model", "host", "port", "replica_name", "advertise_url", "role", "peer_secret"}


def _underscored(name: str) -> str:
    return name.removeprefix("--").replace("-", "_")


def _flag(name: str, value: Any) -> list[str]:
    dashed = _underscored(name).replace("_", "-")
    if isinstance(value, bool):
        return [f"--{dashed}" if value else f"--no-{dashed}"]
    if isinstance(value, list):
        return [f"--{dashed}", *map(str, value)]
    return [f"--{dashed}", json.dumps(value) if isinstance(value, dict) else str(value)]
