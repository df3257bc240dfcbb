# SPDX-License-Identifier: Apache-2.0
"""Which of Ray's replicas a request goes to: :func:`replicas.routing.rank`, asked by Ray."""

from collections.abc import Sequence
from dataclasses import dataclass

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from replicas.routing import Candidate, Wanted, rank


@dataclass(frozen=True, slots=True)
class Hint:
    """What the ingress tells the router with a call; it stays in the process where both are.

    ``documents`` have claims by Ray's name of the replica. ``replica``: the name of the one that shall answer, if the
    client wants a certain one. ``avoided``: those that have refused already.
    """

    documents: Sequence[Wanted] = ()
    replica: str | None = None
    avoided: frozenset[str] = frozenset()

    def __reduce__(self) -> "tuple[type[Hint], tuple[()]]":
        """Nothing, for the replica, which has no use for it."""
        return Hint, ()


class DocumentRouter(RequestRouter):
    """Ranks the replicas for each request; Ray then takes the first that has room.

    Loads are the queue lengths that Ray keeps up to date from what replicas answer: of all routers' requests.
    """

    queue_len_response_deadline_s = 1.0
    """Ray's default, a tenth of that, would send requests elsewhere whenever a machine is busy for a moment."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """All of them, the best first, each a rank of its own."""
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # when all are full: else Ray would ask without a pause
        hint = pending_request.kwargs.get("hint", Hint())
        by_name = {name_of(replica): replica for replica in candidate_replicas}
        candidates = [Candidate(name, name, self._load(replica)) for name, replica in by_name.items()]
        names = [each.candidate.name for each in rank(hint.documents, candidates)]
        names.sort(key=lambda name: (name != hint.replica, name in hint.avoided))
        return [[by_name[name]] for name in names]

    def _load(self, replica: RunningReplica) -> int:
        return self.replica_queue_len_cache.get(replica.replica_id) or 0


def name_of(replica: RunningReplica) -> str:
    """The name under which a replica is in the registry, too."""
    return str(replica.replica_id.unique_id)
