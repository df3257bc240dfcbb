# SPDX-License-Identifier: Apache-2.0
"""A replica's response on its way through the ingress."""

from ray.serve.handle import DeploymentResponseGenerator
from starlette.types import Message, Receive, Scope, Send

from app.cluster.router.forwarding import REPLICA_HEADER


class Answer:
    """An ASGI application that forwards a replica's messages unchanged, and its failures."""

    def __init__(self, begin: list[Message], rest: DeploymentResponseGenerator) -> None:
        self._begin = begin
        self._rest = rest

    @classmethod
    async def begun(cls, batches: DeploymentResponseGenerator) -> "Answer":
        """Waits for the first bytes or the end of a response. Until then, another replica may still answer."""
        begin: list[Message] = []
        try:
            async for batch in batches:
                begin += batch
                if any(message.get("body") for message in batch):
                    break
        except BaseException:
            batches.cancel()
            raise
        return cls(begin, batches)

    @property
    def status(self) -> int:
        """The HTTP status."""
        return int(self._begin[0]["status"])

    @property
    def replica(self) -> str:
        """The name of the answering replica."""
        return bytes(dict(self._begin[0]["headers"])[REPLICA_HEADER]).decode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the response; stops the replica if the client disconnects."""
        try:
            for message in self._begin:
                await send(message)
            async for batch in self._rest:
                for message in batch:
                    await send(message)
        except BaseException:
            self._rest.cancel()
            raise
