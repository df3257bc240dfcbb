# SPDX-License-Identifier: Apache-2.0
"""Chooses Ray's replica for a request by :func:`replicas.routing.rank`."""

from collections.abc import Sequence
from dataclasses import dataclass

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from replicas.routing import Candidate, Wanted, rank


@dataclass(frozen=True, slots=True)
class Hint:
    """Data of a call from ingress to router, which share a process.

    ``documents`` have claims by Ray's name of the replica. ``replica``: name of the replica that the client asks for,
    if any. ``avoided``: replicas that have refused already.
    """

    documents: Sequence[Wanted] = ()
    replica: str | None = None
    avoided: frozenset[str] = frozenset()

    def __reduce__(self) -> "tuple[type[Hint], tuple[()]]":
        """Pickles as an empty hint: replicas don't use it."""
        return Hint, ()


class DocumentRouter(RequestRouter):
    """Ranks the replicas for each request; Ray then takes the first with room.

    Loads are the queue lengths that replicas report to Ray, over the requests of all routers.
    """

    queue_len_response_deadline_s = 1.0
    """Ray's default, a tenth of this, would reroute requests whenever a machine is busy for a moment."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """All replicas, the best first, each a rank of its own."""
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # when all are full; else Ray would retry without a pause
        hint = pending_request.kwargs.get("hint", Hint())
        by_name = {name_of(replica): replica for replica in candidate_replicas}
        candidates = [Candidate(name, name, self._load(replica)) for name, replica in by_name.items()]
        names = [each.candidate.name for each in rank(hint.documents, candidates)]
        names.sort(key=lambda name: (name != hint.replica, name in hint.avoided))
        return [[by_name[name]] for name in names]

    def _load(self, replica: RunningReplica) -> int:
        return self.replica_queue_len_cache.get(replica.replica_id) or 0


def name_of(replica: RunningReplica) -> str:
    """The name of a replica, also in the registry."""
    return str(replica.replica_id.unique_id)
