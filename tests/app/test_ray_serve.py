# SPDX-License-Identifier: Apache-2.0
"""Tessera's Serve application without a Ray cluster; `tests/engine/test_ray_serve.py` starts one."""

import asyncio
import json
import pickle
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest
from pydantic import ValidationError

pytest.importorskip("ray.serve", reason="needs the extra ray", exc_type=ImportError)

import yaml
from ray.exceptions import ActorUnavailableError
from ray.serve._private.common import DeploymentHandleSource, DeploymentID
from ray.serve.exceptions import BackPressureError
from ray.serve.request_router import PendingRequest
from ray.serve.schema import ServeDeploySchema

from app.cluster.router.proxy import REPLICA_HEADER
from app.documents.request_documents import Reading, wanted_documents
from app.ray_serve import build
from app.ray_serve.answer import Answer
from app.ray_serve.engine import named
from app.ray_serve.exchange import answered, head_of, wished_replica
from app.ray_serve.ingress import Ingress
from app.ray_serve.lookup import Lookup
from app.ray_serve.options import Options
from app.ray_serve.request_router import DocumentRouter, Hint
from cache.segments.holdings import DocumentKey, Holding, Tier
from machine.server_process import ROOT
from replicas.registry import Claim, RegistryError, Replica
from replicas.routing import Wanted
from tests.support.registries import InProcessRegistry

# The request router


class FakeReplica:
    """A replica as seen by Ray's routers."""

    max_ongoing_requests = 8

    def __init__(self, name: str, *, ongoing: int = 0) -> None:
        self.replica_id = ReplicaId(name)
        self.ongoing = ongoing

    async def get_queue_len(self, *, deadline_s: float) -> int:
        return self.ongoing


class ReplicaId(str):
    """A replica's id: hashable, with Ray's name of the replica."""

    @property
    def unique_id(self) -> str:
        return str(self)


@pytest.fixture
async def router():
    source = DeploymentHandleSource.REPLICA
    return DocumentRouter(DeploymentID("Engine", "test"), source, use_replica_queue_len_cache=True)


def pending(**hint: Any) -> PendingRequest:
    metadata = SimpleNamespace(internal_request_id="1", request_id="1", multiplexed_model_id="")
    return PendingRequest(args=[], kwargs={"hint": Hint(**hint)}, metadata=metadata)


def document(name: str, tokens: int = 1000, *holders: str) -> Wanted:
    key = DocumentKey(name.encode().ljust(16, b"\0"))
    return Wanted(key, tokens, [Claim(holder, Holding(Tier.DEVICE, tokens)) for holder in holders])


async def ranked(router: DocumentRouter, replicas: list[FakeReplica], **hint: Any) -> list[str]:
    ranks = await router.choose_replicas(replicas, pending(**hint))
    assert all(len(rank) == 1 for rank in ranks)
    return [rank[0].replica_id.unique_id for rank in ranks]


async def test_requests_go_to_whom_claims_their_documents(router):
    replicas = [FakeReplica(name) for name in "abc"]
    documents = [document("one", 1000, "b"), document("two", 900, "c", "b"), document("three")]
    order = await ranked(router, replicas, documents=documents)
    assert order == ["b", "c", "a"]
    assert await ranked(router, replicas[::-1], documents=documents[::-1]) == order


async def test_a_queue_may_outweigh_a_document(router):
    replicas = [FakeReplica(name) for name in "ab"]
    for replica in replicas:
        router.on_new_queue_len_info(replica.replica_id, 0)
    documents = [document("one", 24, "a")]
    assert await ranked(router, replicas, documents=documents) == ["a", "b"]
    for _ in range(2):
        router.on_send_request(replicas[0].replica_id)
    assert await ranked(router, replicas, documents=documents) == ["b", "a"]
    router.decrement_queue_len_cache(replicas[0].replica_id)
    assert await ranked(router, replicas, documents=documents) == ["a", "b"]


async def test_a_wished_replica_comes_first_and_those_that_refused_last(router):
    replicas = [FakeReplica(name) for name in "abc"]
    documents = [document("one", 1000, "b")]
    assert (await ranked(router, replicas, documents=documents, replica="c"))[0] == "c"
    assert (await ranked(router, replicas, documents=documents, avoided=frozenset("b")))[-1] == "b"
    assert (await ranked(router, replicas, documents=documents, replica="not there"))[0] == "b"


async def test_ray_takes_the_next_when_the_best_is_full(router):
    """Chooses through Ray's own loop around a router."""
    replicas = [FakeReplica("a", ongoing=8), FakeReplica("b"), FakeReplica("c", ongoing=8)]
    router.update_replicas(replicas)
    request = pending(documents=[document("one", 1000, "a")])
    assert await asyncio.wait_for(router._choose_replica_for_request(request), 5) is replicas[1]


def test_a_hint_does_not_travel():
    hint = Hint([document("one", 1000, "a")], "a", frozenset("b"))
    assert pickle.loads(pickle.dumps(hint)) == Hint()


# Lookups of the ingress


RAG = "/v1/rag/chat"
BODY = {"chunks": ["A document of some length. " * 9, {"text": "Another."}], "question": "?"}
SENT = json.dumps(BODY).encode()


class CountingRegistry(InProcessRegistry):
    """Counts lookups, and fails on demand."""

    def __init__(self) -> None:
        super().__init__()
        self.num_asked = 0
        self.is_lost = False

    async def claims(self, keys):
        self.num_asked += 1
        self._check()
        return await super().claims(keys)

    async def replicas(self):
        self._check()
        return await super().replicas()

    def _check(self) -> None:
        if self.is_lost:
            raise RegistryError("lost")


@pytest.fixture
async def lookup():
    """Of a registry with two replicas, `replica-aa` and `replica-bb`."""
    registry = CountingRegistry()
    for id in ("aa", "bb"):
        await registry.beat(Replica(id, f"replica-{id}", "http://x", ("m",), "f"))
    lookup = Lookup(registry, Reading())
    await lookup.refresh(registry)
    return lookup


async def test_claims_are_by_rays_names(lookup):
    registry = lookup._registry
    keys = [wanted.key for wanted in wanted_documents(RAG, dict(BODY))]
    for holder in ("bb", "cc"):  # cc is gone
        await registry.publish(holder, {keys[0]: Holding(Tier.DEVICE, 60)})
    first, second = await lookup.documents(RAG, SENT)
    assert [claim.holder for claim in first.claims] == ["replica-bb"]
    assert (first.key, second.key, second.claims) == (*keys, [])
    assert registry.num_asked == 1


async def test_the_registry_is_not_asked_in_vain(lookup):
    assert await lookup.documents("/v1/models", b"") == []
    assert await lookup.documents(RAG, b"no JSON") == []
    alone = CountingRegistry()
    await alone.beat(Replica("aa", "replica-aa", "http://x", ("m",), "f"))
    lookup_of_one = Lookup(alone, Reading())
    await lookup_of_one.refresh(alone)
    assert len(await lookup_of_one.documents(RAG, SENT)) == 2  # the only replica is the best
    assert (lookup._registry.num_asked, alone.num_asked) == (0, 0)
    without = Lookup(None, Reading("##"))
    await asyncio.wait_for(without.run(), 1)
    assert len(await without.documents(RAG, SENT)) == 2


async def test_only_one_request_waits_for_a_lost_registry(lookup, caplog):
    registry = lookup._registry
    registry.is_lost = True
    for _ in range(3):
        documents = await lookup.documents(RAG, SENT)
        assert [list(document.claims) for document in documents] == [[], []]
    assert registry.num_asked == 1
    assert "registry lost" in caplog.text
    registry.is_lost = False
    await lookup.refresh(registry)
    await lookup.documents(RAG, SENT)
    assert registry.num_asked == 2


# Requests and answers between processes


def scope(path: str = RAG, root_path: str = "", **fields: Any) -> dict[str, Any]:
    return {
        "type": "http",
        "method": "POST",
        "scheme": "http",
        "http_version": "1.1",
        "query_string": b"a=b",
        "path": root_path + path,
        "raw_path": (root_path + path).encode(),
        "root_path": root_path,
        "headers": [(b"x-one", b"1"), (b"x-one", b"2")],
        "client": ["127.0.0.1", 5],
        "server": ["127.0.0.1", 80],
        **fields,
    }


def test_a_head_survives_pickling_and_has_no_prefix():
    head = head_of(scope(root_path="/tessera"))
    assert pickle.loads(pickle.dumps(head)) == head
    assert (head["path"], head["raw_path"]) == ("/v1/rag/chat", b"/v1/rag/chat")
    assert head["headers"] == [(b"x-one", b"1"), (b"x-one", b"2")]
    assert wished_replica(head["headers"]) is None


async def echo(scope, receive, send):
    """Returns the body in halves, with the method."""
    request = await receive()
    assert not request["more_body"]
    headers = [(b"x-method", scope["method"].encode())]
    await send({"type": "http.response.start", "status": 201, "headers": headers})
    half = len(request["body"]) // 2
    await send({"type": "http.response.body", "body": request["body"][:half], "more_body": True})
    await asyncio.sleep(0.01)
    await send({"type": "http.response.body", "body": request["body"][half:]})


async def test_an_answer_comes_as_it_is_sent():
    batches = [batch async for batch in answered(named(echo, "a"), head_of(scope()), b"12345678")]
    assert [len(batch) for batch in batches] == [2, 1]
    start, first, second = [message for batch in batches for message in batch]
    assert start["status"] == 201
    assert start["headers"] == [(b"x-method", b"POST"), (REPLICA_HEADER, b"a")]
    assert first["body"] + second["body"] == b"12345678"


async def test_a_replica_answers_for_no_other():
    head = head_of(scope(headers=[(REPLICA_HEADER, b"b")]))
    (first, *_) = [message async for batch in answered(named(echo, "a"), head, b"") for message in batch]
    assert first["status"] == 503
    assert (REPLICA_HEADER, b"a") in first["headers"]
    assert wished_replica(head["headers"]) == "b"


async def test_closing_an_answer_or_cancelling_the_wait_for_it_is_the_clients_leaving():
    left = []

    async def endless(scope, receive, send):
        await receive()
        if scope["path"] == RAG:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        left.append((await receive())["type"])

    async def wait() -> None:
        async for _ in answered(endless, head_of(scope("/silent")), b""):
            pass

    batches = answered(endless, head_of(scope()), b"")
    assert (await anext(batches))[0]["status"] == 200
    await batches.aclose()
    waiting = asyncio.create_task(wait())
    await asyncio.sleep(0.05)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert left == ["http.disconnect"] * 2


async def test_an_error_breaks_an_answer_off_unless_it_is_complete():
    async def failing(scope, receive, send):
        await send({"type": "http.response.start", "status": 500, "headers": []})
        if scope["path"] == "/late":
            await send({"type": "http.response.body", "body": b"{}"})
        raise ZeroDivisionError

    assert [batch async for batch in answered(failing, head_of(scope("/late")), b"")]
    with pytest.raises(ZeroDivisionError):
        async for _ in answered(failing, head_of(scope("/early")), b""):
            pass


class Batches:
    """A streaming call's response for the ingress; raises exceptions among the batches."""

    def __init__(self, *batches: Any) -> None:
        self._batches = iter(batches)
        self.num_cancelled = 0

    def __aiter__(self):
        return self

    async def __anext__(self):
        batch = next(self._batches, StopAsyncIteration())
        if isinstance(batch, Exception):
            raise batch
        return batch

    def cancel(self) -> None:
        self.num_cancelled += 1


START = {"type": "http.response.start", "status": 200, "headers": [(REPLICA_HEADER, b"a")]}
PART = {"type": "http.response.body", "body": b"part", "more_body": True}
END = {"type": "http.response.body", "body": b""}


async def test_an_answer_that_breaks_off_is_not_ended():
    batches = Batches([START, PART], ConnectionError())
    answer = await Answer.begun(batches)
    with pytest.raises(ConnectionError):
        await answer({}, None, AsyncMock())
    assert batches.num_cancelled == 1


# Lost and refusing replicas at the ingress


class FakeEngine:
    """A handle of the engine's deployment; calls get the next of `answers`."""

    def __init__(self, *answers: Any) -> None:
        self._answers = list(answers)
        self.hints: list[Hint] = []
        self.handle = self

    def options(self, *, stream: bool) -> "FakeEngine":
        assert stream
        return self

    def remote(self, head, body, *, hint: Hint) -> Batches:
        self.hints.append(hint)
        return Batches(*self._answers.pop(0))

    def broadcast(self, method: str, head, body) -> "FakeEngine":
        assert method == "ask"
        return self

    async def results_async(self, *, return_exceptions: bool) -> list[Any]:
        assert return_exceptions
        return self._answers


LOST = ActorUnavailableError("lost", None)


def refusal(name: str) -> list[list[dict[str, Any]]]:
    return [[{**START, "status": 503, "headers": [(REPLICA_HEADER, name.encode())]}, {**PART, "more_body": False}]]


async def asked(engine: FakeEngine, path: str = RAG, **fields: Any) -> list[dict[str, Any]]:
    """Response of an ingress."""
    ingress, sent = Ingress(engine, Options(model="m")), list[dict[str, Any]]()

    async def receive():
        return {"type": "http.request", "body": SENT}

    async def send(message):
        sent.append(message)

    await ingress.answer(scope(path, **fields), receive, send)
    await ingress.__del__()
    return sent


@pytest.mark.parametrize(
    ("answers", "avoided"),
    [
        ([[[START, PART], [END]]], [set()]),
        ([[LOST], [[START], LOST], [[START, PART, END]]], [set(), set(), set()]),
        ([refusal("b"), [[START, PART, END]]], [set(), {"b"}]),
    ],
    ids=["at once", "two are lost before the first byte", "one refuses"],
)
async def test_another_replica_is_asked_if_one_is_lost_or_refuses(answers, avoided):
    engine = FakeEngine(*answers)
    assert await asked(engine) == [START, PART, END]
    assert [hint.avoided for hint in engine.hints] == avoided
    assert {len(hint.documents) for hint in engine.hints} == {2}


@pytest.mark.parametrize("answers", [[refusal("b"), refusal("b")], [refusal("b"), [LOST], [LOST]]])
async def test_a_refusal_is_passed_on_when_nobody_says_more(answers):
    assert await asked(FakeEngine(*answers)) == refusal("b")[0]


async def test_nobody_else_is_asked_for_a_wished_replica():
    engine = FakeEngine(refusal("b"))
    assert await asked(engine, headers=[(REPLICA_HEADER, b"a")]) == refusal("b")[0]
    assert [hint.replica for hint in engine.hints] == ["a"]


@pytest.mark.parametrize("answers", [[[LOST]] * 3, [[BackPressureError(1, 1)]]], ids=["all lost", "nothing taken"])
async def test_when_nobody_can_be_asked_there_is_an_answer(answers):
    start, _ = await asked(FakeEngine(*answers))
    assert start["status"] == 503


async def test_clearing_asks_all_that_are_there():
    engine = FakeEngine(("a", 200, {"cleared": 2}), LOST, ("b", 200, {"cleared": 3}))
    start, body = await asked(engine, "/v1/cache/clear")
    assert start["status"] == 200
    assert json.loads(body["body"])["cleared"] == 5


# Configuration


def test_the_command_line_of_a_replica():
    flags = '{"dtype": "half", "--enforce-eager": true, "chunk_cache": false, "config": {"a": 1}, "x": [1, 2]}'
    options = Options(model="m", num_replicas="2", flags=flags, registry="redis://here")
    assert options.num_replicas == 2
    assert options.arguments() == [
        *("m", "--registry", "redis://here", "--chunk-scope", "system", "--documents", "off"),
        *("--dtype", "half", "--enforce-eager", "--no-chunk-cache", "--config", '{"a": 1}', "--x", "1", "2"),
    ]


@pytest.mark.parametrize(
    "args",
    [
        *({}, {"model": "m", "num_replica": 2}, {"model": "m", "chunk_separator": ""}),
        *({"model": "m", "flags": flags} for flags in ({"registry": "redis://a"}, {"--replica-name": "a"})),
        *({"model": "m", "flags": flags} for flags in ({"port": 1}, "no JSON")),
    ],
)
def test_refused(args):
    with pytest.raises((ValidationError, ValueError)):
        build(args)


def test_tensor_parallelism_takes_a_placement_group():
    parallel = Options(model="m", flags={"tensor-parallel-size": 2}).engine_options()
    assert parallel["placement_group_bundles"] == [{"CPU": 1.0}, {"CPU": 1.0, "GPU": 1.0}, {"CPU": 1.0, "GPU": 1.0}]
    assert parallel["placement_group_strategy"] == "STRICT_PACK"
    given = {"ray_actor_options": {"num_gpus": 2}}
    placed = Options(model="m", flags={"tensor_parallel_size": 2}, engine=given).engine_options()
    assert "placement_group_bundles" not in placed
    assert placed["ray_actor_options"] == {"num_gpus": 2}
    assert "placement_group_bundles" not in Options(model="m").engine_options()


def test_the_example_configuration_is_one():
    config = ServeDeploySchema.model_validate(yaml.safe_load((ROOT / "docker/ray-serve.yaml").read_text()))
    (application,) = config.applications
    assert application.import_path == "app.ray_serve:build"
    options = Options(**application.args)
    assert options.registry
    assert "--chunk-cache require" in " ".join(options.arguments())
    built = build(application.args)
    names = {built._bound_deployment.name, *(bound.name for bound in bound_deployments(built))}
    assert {deployment.name for deployment in application.deployments} <= names


def bound_deployments(application: Any) -> list[Any]:
    arguments = application._bound_deployment.init_args
    return [each._bound_deployment for each in arguments if hasattr(each, "_bound_deployment")]
