# SPDX-License-Identifier: Apache-2.0
"""The caller of a request, set with its API key, read by the caches."""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput

DEFAULT_NAMESPACE = "default"


class NamespaceRefusedError(ValueError):
    """A request names a namespace that its API key doesn't open."""


@dataclass(frozen=True, slots=True)
class Caller:
    """A tenant, for the caches.

    ``namespace`` is its own, ``others`` are further namespaces that its requests may name (``*``: any); ``charge`` is
    called with numbers of prompt and answer tokens served.
    """

    namespace: str
    others: frozenset[str] = frozenset()
    is_admin: bool = False
    charge: Callable[[int], None] = lambda _: None

    def may_use(self, namespace: str) -> bool:
        """Whether its requests may read and fill this namespace."""
        return namespace == self.namespace or not self.others.isdisjoint({namespace, "*"})


CALLER: ContextVar[Caller | None] = ContextVar("caller", default=None)
"""``None`` if the server requires no keys."""
IS_PEER: ContextVar[bool] = ContextVar("is_peer", default=False)
"""Whether the request carries the replicas' secret, so that it may name KV of other requests."""


def own_namespace(wanted: str | None) -> str:
    """The namespace of a request that names ``wanted``, or none; raises :class:`NamespaceRefusedError`."""
    caller = CALLER.get()
    if caller is None:
        return wanted or DEFAULT_NAMESPACE
    if wanted is not None and not caller.may_use(wanted):
        raise NamespaceRefusedError(f"this API key does not open the namespace {wanted!r}")
    return wanted or caller.namespace


async def charged(
    outputs: AsyncGenerator["RequestOutput", None], num_prompt_tokens: int, caller: Caller, *, are_deltas: bool
) -> AsyncGenerator["RequestOutput", None]:
    """Yields ``outputs``; charges ``caller`` for the prompt at once, and for the answer as it grows.

    ``are_deltas``: each output has the new tokens only (vLLM's ``RequestOutputKind.DELTA``), not all so far.
    """
    caller.charge(num_prompt_tokens)
    num_charged = 0
    async with aclosing(outputs):
        async for output in outputs:
            num_tokens = sum(len(completion.token_ids) for completion in output.outputs)
            caller.charge(num_tokens if are_deltas else num_tokens - num_charged)
            num_charged = num_tokens
            yield output
