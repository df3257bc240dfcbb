# SPDX-License-Identifier: Apache-2.0
"""Tessera's Serve application without a Ray cluster; `tests/engine/test_ray_serve.py` starts one."""

import asyncio
import json
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

pytest.importorskip("ray.serve", reason="needs the extra ray", exc_type=ImportError)

import yaml
from ray.exceptions import ActorUnavailableError
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
from replicas.registry import Claim, InProcessRegistry, RegistryError, Replica
from replicas.routing import Wanted, home_of

ROOT = Path(__file__).resolve().parents[2]


# The request router


class FakeReplica:
    """A replica as seen by Ray's routers."""

    def __init__(self, name: str, *, ongoing: int = 0, most: int = 8) -> None:
        self.replica_id = ReplicaId(name)
        self.ongoing = ongoing
        self.max_ongoing_requests = most
        self.num_probes = 0

    async def get_queue_len(self, *, deadline_s: float) -> int:
        self.num_probes += 1
        return self.ongoing


class ReplicaId(str):
    """A replica's id: hashable, with Ray's name of the replica."""

    @property
    def unique_id(self) -> str:
        return str(self)


@pytest.fixture
async def router():
    from ray.serve._private.common import DeploymentHandleSource, DeploymentID

    return DocumentRouter(
        DeploymentID("Engine", "test"), DeploymentHandleSource.REPLICA, use_replica_queue_len_cache=True
    )


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


async def test_without_claims_documents_have_homes(router):
    replicas = [FakeReplica(name) for name in "abcd"]
    candidates = [SimpleNamespace(name=name) for name in "abcd"]
    firsts = set()
    for number in range(40):
        wanted = document(f"number {number}")
        (first, *_) = await ranked(router, replicas, documents=[wanted])
        assert first == home_of(wanted.key.digest, candidates).name
        firsts.add(first)
    assert firsts == set("abcd")


async def test_a_request_without_documents_goes_to_the_least_load(router):
    replicas = [FakeReplica(name) for name in "abc"]
    for replica, load in zip(replicas, (3, 1, 2), strict=True):
        router.on_new_queue_len_info(replica.replica_id, load)
    assert await ranked(router, replicas) == ["b", "c", "a"]


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


async def test_while_all_are_full_ray_asks_with_pauses(router):
    replicas = [FakeReplica("a", ongoing=8), FakeReplica("b", ongoing=8)]
    router.update_replicas(replicas)
    chosen = asyncio.create_task(router._choose_replica_for_request(pending()))
    await asyncio.sleep(0.5)
    assert not chosen.done()
    assert replicas[0].num_probes < 20
    replicas[1].ongoing = 7
    assert await asyncio.wait_for(chosen, 5) is replicas[1]


def test_a_hint_does_not_travel():
    hint = Hint([document("one", 1000, "a")], "a", frozenset("b"))
    assert pickle.loads(pickle.dumps(hint)) == Hint()


# Lookups of the ingress


BODY = {"chunks": ["A document of some length. " * 9, {"text": "Another."}], "question": "?"}


def registered(id: str, name: str) -> Replica:
    return Replica(id, name, "http://x", ("m",), "f")


class CountingRegistry(InProcessRegistry):
    """Counts lookups, and fails on demand."""

    def __init__(self) -> None:
        super().__init__()
        self.num_asked = 0
        self.is_lost = False

    async def claims(self, keys):
        self.num_asked += 1
        if self.is_lost:
            raise RegistryError("lost")
        return await super().claims(keys)

    async def replicas(self):
        if self.is_lost:
            raise RegistryError("lost")
        return await super().replicas()


@pytest.fixture
def registry() -> CountingRegistry:
    return CountingRegistry()


async def test_claims_are_by_rays_names(registry):
    lookup = Lookup(registry, Reading())
    keys = [wanted.key for wanted in wanted_documents("/v1/rag/chat", dict(BODY))]
    for id, name in (("aa", "replica-a"), ("bb", "replica-b")):
        await registry.beat(registered(id, name))
    await registry.publish("bb", {keys[0]: Holding(Tier.DEVICE, 60)})
    await registry.publish("cc", {keys[0]: Holding(Tier.DEVICE, 60)})  # gone
    await lookup.refresh(registry)
    first, second = await lookup.documents("/v1/rag/chat", json.dumps(BODY).encode())
    assert [claim.holder for claim in first.claims] == ["replica-b"]
    assert (first.key, second.key, second.claims) == (*keys, [])
    assert registry.num_asked == 1


async def test_the_registry_is_not_asked_in_vain(registry):
    body = json.dumps(BODY).encode()
    lookup = Lookup(registry, Reading())
    await registry.beat(registered("aa", "replica-a"))
    await lookup.refresh(registry)
    assert len(await lookup.documents("/v1/rag/chat", body)) == 2  # the only replica is the best
    await registry.beat(registered("bb", "replica-b"))
    await lookup.refresh(registry)
    assert await lookup.documents("/v1/models", b"") == []
    assert await lookup.documents("/v1/rag/chat", b"no JSON") == []
    assert registry.num_asked == 0


async def test_only_one_request_waits_for_a_lost_registry(registry, caplog):
    body = json.dumps(BODY).encode()
    lookup = Lookup(registry, Reading())
    for id in ("aa", "bb"):
        await registry.beat(registered(id, f"replica-{id}"))
    await lookup.refresh(registry)
    registry.is_lost = True
    for _ in range(3):
        documents = await lookup.documents("/v1/rag/chat", body)
        assert [list(document.claims) for document in documents] == [[], []]
    assert registry.num_asked == 1
    assert "registry lost" in caplog.text
    registry.is_lost = False
    await lookup.refresh(registry)
    await lookup.documents("/v1/rag/chat", body)
    assert registry.num_asked == 2


async def test_without_a_registry_documents_are_known_all_the_same():
    lookup = Lookup(None, Reading("##"))
    await asyncio.wait_for(lookup.run(), 1)
    assert len(await lookup.documents("/v1/rag/chat", json.dumps(BODY).encode())) == 2


# Requests and answers between processes


def scope(path: str = "/v1/rag/chat", root_path: str = "", **fields: Any) -> dict[str, Any]:
    return {
        "type": "http",
        "method": "POST",
        "scheme": "http",
        "http_version": "1.1",
        "path": root_path + path,
        "raw_path": (root_path + path).encode(),
        "root_path": root_path,
        "query_string": b"a=b",
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


async def test_closing_an_answer_is_the_clients_leaving():
    left = asyncio.Event()

    async def endless(scope, receive, send):
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        assert (await receive())["type"] == "http.disconnect"
        left.set()

    batches = answered(endless, head_of(scope()), b"")
    assert (await anext(batches))[0]["status"] == 200
    await batches.aclose()
    assert left.is_set()


async def test_cancelling_the_wait_for_an_answer_is_the_clients_leaving():
    left = asyncio.Event()

    async def silent(scope, receive, send):
        await receive()
        await receive()
        left.set()

    async def wait() -> None:
        async for _ in answered(silent, head_of(scope()), b""):
            pass

    waiting = asyncio.create_task(wait())
    await asyncio.sleep(0.05)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert left.is_set()


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
        batch = next(self._batches, None)
        if batch is None:
            raise StopAsyncIteration
        if isinstance(batch, Exception):
            raise batch
        return batch

    def cancel(self) -> None:
        self.num_cancelled += 1


START = {"type": "http.response.start", "status": 200, "headers": [(REPLICA_HEADER, b"a")]}
PART = {"type": "http.response.body", "body": b"part", "more_body": True}
END = {"type": "http.response.body", "body": b""}


async def passed_on(answer: Answer) -> list[dict[str, Any]]:
    sent: list[dict[str, Any]] = []

    async def send(message):
        sent.append(message)

    await answer({}, None, send)
    return sent


async def test_an_answer_is_passed_on_unchanged():
    batches = Batches([START], [PART], [PART, END])
    answer = await Answer.begun(batches)
    assert (answer.status, answer.replica) == (200, "a")
    assert await passed_on(answer) == [START, PART, PART, END]
    assert batches.num_cancelled == 0


async def test_an_answer_has_not_begun_before_its_first_byte():
    """So that another replica can answer."""
    batches = Batches([START], ConnectionError())
    with pytest.raises(ConnectionError):
        await Answer.begun(batches)
    assert batches.num_cancelled == 1


async def test_an_answer_that_breaks_off_is_not_ended():
    batches = Batches([START, PART], ConnectionError())
    with pytest.raises(ConnectionError):
        await passed_on(await Answer.begun(batches))
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


async def asked(engine: FakeEngine, path: str = "/v1/rag/chat", **fields: Any) -> list[dict[str, Any]]:
    """Response of an ingress."""
    ingress, sent = Ingress(engine, Options(model="m")), list[dict[str, Any]]()

    async def receive():
        return {"type": "http.request", "body": json.dumps(BODY).encode()}

    async def send(message):
        sent.append(message)

    await ingress.answer(scope(path, **fields), receive, send)
    await ingress.__del__()
    return sent


async def test_the_router_is_told_the_documents():
    engine = FakeEngine([[START, PART], [END]])
    assert await asked(engine) == [START, PART, END]
    assert [len(hint.documents) for hint in engine.hints] == [2]


async def test_a_replica_lost_before_the_first_byte_is_replaced():
    engine = FakeEngine([LOST], [[START], LOST], [[START, PART, END]])
    assert await asked(engine) == [START, PART, END]


async def test_when_every_attempt_is_lost_there_is_an_answer():
    start, _ = await asked(FakeEngine([LOST], [LOST], [LOST]))
    assert start["status"] == 503


async def test_another_replica_is_asked_when_one_refuses():
    engine = FakeEngine(refusal("b"), [[START, PART, END]])
    assert await asked(engine) == [START, PART, END]
    assert [hint.avoided for hint in engine.hints] == [frozenset(), {"b"}]


@pytest.mark.parametrize("answers", [[refusal("b"), refusal("b")], [refusal("b"), [LOST], [LOST]]])
async def test_a_refusal_is_passed_on_when_nobody_says_more(answers):
    (messages,) = refusal("b")
    assert await asked(FakeEngine(*answers)) == messages


async def test_nobody_else_is_asked_for_a_wished_replica():
    engine = FakeEngine(refusal("b"))
    (messages,) = refusal("b")
    assert await asked(engine, headers=[(REPLICA_HEADER, b"a")]) == messages
    assert [hint.replica for hint in engine.hints] == ["a"]


async def test_a_deployment_that_takes_nothing_is_a_refusal():
    start, _ = await asked(FakeEngine([BackPressureError(1, 1)]))
    assert start["status"] == 503


async def test_clearing_asks_all_that_are_there():
    engine = FakeEngine(("a", 200, {"cleared": 2}), LOST, ("b", 200, {"cleared": 3}))
    start, body = await asked(engine, "/v1/cache/clear")
    assert start["status"] == 200
    assert json.loads(body["body"])["cleared"] == 5


# Configuration


def test_the_command_line_of_a_replica():
    options = Options(
        model="m",
        num_replicas="2",
        flags='{"dtype": "half", "--enforce-eager": true, "chunk_cache": false, "config": {"a": 1}, "x": [1, 2]}',
        registry="redis://here",
    )
    assert options.num_replicas == 2
    assert options.arguments() == [
        *("m", "--registry", "redis://here", "--chunk-scope", "system", "--documents", "off"),
        *("--dtype", "half", "--enforce-eager", "--no-chunk-cache", "--config", '{"a": 1}', "--x", "1", "2"),
    ]


@pytest.mark.parametrize(
    "args",
    [
        {},
        {"model": "m", "num_replica": 2},
        {"model": "m", "flags": {"registry": "redis://here"}},
        {"model": "m", "flags": {"--replica-name": "a"}},
        {"model": "m", "flags": {"port": 1}},
        {"model": "m", "flags": "no JSON"},
        {"model": "m", "chunk_separator": ""},
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
