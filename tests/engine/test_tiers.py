# SPDX-License-Identifier: Apache-2.0
"""Chunks from tiers are exact, and a tier's failures only cost time."""

import json
import os
import subprocess
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from cache.tiers.signed import SIGNATURE_BYTES
from engine_ext.wire.chunk_file import FORMAT, label_of, pack_file, unpack_file
from machine.server_process import ROOT, TESSERA_SERVE, ServerProcess
from tests.cores import all_cores
from tests.engine import hanging_tier
from tests.engine.conftest import ALWAYS_FETCHING
from tests.engine.server import TesseraServer, shared_memory, wait_until_gone
from tests.oracle import Oracle
from tests.support.exactness import STEPS, ask, assert_exact, statuses
from tests.support.parallel import WORKERS
from tests.support.tier_servers import FILES, HOST, STORING, archived, folder_of, origins, to_sleep
from tests.support.waiting import until

SYSTEM = "You answer from documents."
Text = Callable[[int], str]


@pytest.mark.serve_with(*STORING)
def test_chunks_are_exact_from_tiers_and_in_mixtures(server, oracle, text):
    assert_exact_in_mixtures(server, "file", oracle, text)


@pytest.mark.matrix
def test_chunks_are_exact_from_an_object_store(start_with_tiers, s3, oracle, text, tmp_path):
    server = start_with_tiers(f"{HOST},s3://bucket/{tmp_path.name}?size=1GiB&timeout=20&endpoint={s3}")
    assert_exact_in_mixtures(server, "s3", oracle, text)


@pytest.mark.matrix
@pytest.mark.parametrize("kind", WORKERS)
def test_chunks_of_several_workers_are_exact_from_tiers(kind, start_with_tiers, oracle, text, tmp_path):
    with all_cores():
        tiers, environment = f"{HOST},{FILES.format(folder=tmp_path / 'kv')}", {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
        server = start_with_tiers(tiers, *WORKERS[kind], environment=environment)
    assert_exact_in_mixtures(server, "file", oracle, text)
    if kind == "tensor parallel":
        shared = shared_memory(server.process.pid)
        assert shared
        server.process.kill()
        wait_until_gone(server.process.pid)  # engine and workers notice the kill
        assert not [path for path in shared if path.exists()]


def assert_exact_in_mixtures(server: TesseraServer, name: str, oracle: Callable[[str], Oracle], text: Text) -> None:
    """Mixtures of host memory, a slower tier, the pool and computing."""
    a, b, c, d, e = (text(n) for n in (100, 37, 260, 64, 150))
    for strategy in ("shared", "offset"):
        assert_exact(ask(server, strategy, [a, b, c, d], "What?"), oracle("tiny-llama"), strategy)
    to_sleep(server)
    mixed = ask(server, "offset", [e, b, a, c], "Which?")  # 600 KiB hold some of them
    assert origins(mixed)[0] == "filled"
    assert name in origins(mixed)
    assert set(origins(mixed)[1:]) <= {name, "host"}
    assert_exact(mixed, oracle("tiny-llama"), "offset")
    hit = ask(server, "shared", [d, a, c], "Which?")
    assert origins(hit)[1:] == ["hit", "hit"]
    assert_exact(hit, oracle("tiny-llama"), "shared")
    to_sleep(server)
    for chunks in ([a, b, c, d, e], [e, d], [a]):
        again = ask(server, "shared", chunks, "Which?")
        assert_exact(again, oracle("tiny-llama"), "shared")
    counted = server.stats()["counters"]
    assert counted["loaded_bytes"][name] > 0
    assert counted["fills"]["loaded"] > 0
    assert again["cache"]["tokens"]["reused"] > 0


@pytest.mark.serve_with(*STORING)
def test_damaged_files_are_computed_anew_and_quarantined(server, oracle, text):
    """Of chunks too large for the tier in host memory."""
    folder, chunks = folder_of(server), [text(200) for _ in range(6)]
    answer = ask(server, "shared", chunks, "What?", system="S")
    keys = [str(chunk["key"]) for chunk in answer["cache"]["chunks"]]
    to_sleep(server)
    files = {key: next(folder.glob(f"??/{key}.*")) for key in keys}
    flipped, cut, empty, foreign, formatted, _ = files.values()
    change(flipped, lambda data: data[:-50] + bytes([data[-50] ^ 4]) + data[-49:])
    change(cut, lambda data: data[: len(data) // 2])
    change(empty, lambda _: b"")
    change(foreign, lambda _: files[keys[5]].read_bytes())
    change(formatted, lambda data: data.replace(FORMAT.encode(), b"tessera-kv-0"))
    answer = ask(server, "shared", chunks, "What?", system="S")
    assert sorted(origins(answer)) == ["file"] + ["filled"] * 5
    assert_exact(answer, oracle("tiny-llama"), "shared")
    assert server.stats()["counters"]["tiers"]["file"]["corrupt"] == 5
    assert {path.name.split(".")[0] for path in (folder / "quarantine").iterdir()} == set(keys[:5])
    to_sleep(server)
    again = ask(server, "shared", chunks, "What?", system="S")
    assert origins(again) == ["file"] * 6
    assert_exact(again, oracle("tiny-llama"), "shared")


@pytest.mark.matrix
def test_who_writes_to_a_keyed_tier_can_make_an_answer_slower_never_different(start_with_tiers, tmp_path, oracle, text):
    """Every kind of file, with values that have a right checksum."""
    key = tmp_path / "key"
    key.write_text("a secret of servers")
    flags = (f"file://{tmp_path}/kv?size=1GiB&timeout=20", "--tier-key", str(key))
    server, chunks, named = start_with_tiers(*flags), [text(200) for _ in range(4)], text(150)
    prompt = {"model": "tiny-llama", "prompt": text(600), "max_tokens": STEPS, "temperature": 0}
    asked = [ask(server, "shared", chunks, "What?", system="S"), server.post("/v1/completions", prompt)]
    server.ingest([{"id": "mill", "text": named}], system=SYSTEM)
    by_id(server, "mill")
    to_sleep(server)
    until(lambda: not server.stats()["occupancy"]["archive_waiting"])
    server.stop()
    files = list((tmp_path / "kv").glob("??/*.safetensors"))
    assert len({len(path.name) for path in files}) >= 3, "not every kind"
    for number, path in enumerate(files):
        change(path, lambda data, number=number: forged(data, signed=number % 2 == 0))
    again = start_with_tiers(*flags)
    answer = ask(again, "shared", chunks, "What?", system="S")
    assert origins(answer) == ["filled"] * 4
    assert_exact(answer, oracle("tiny-llama"), "shared")
    assert again.post("/v1/completions", prompt)["choices"][0]["text"] == asked[1]["choices"][0]["text"]
    by_id(again, "mill", status=404)
    until(lambda: again.stats()["counters"]["tiers"]["file"]["unsigned"] >= 6)  # prefixes are counted twice a second
    assert "corrupt" not in again.stats()["counters"]["tiers"]["file"]
    to_sleep(again)
    answer = ask(again, "shared", chunks, "What?", system="S")
    assert origins(answer) == ["file"] * 4, "what was forged is not replaced"
    assert_exact(answer, oracle("tiny-llama"), "shared")


def forged(data: bytes, *, signed: bool) -> bytes:
    """A file with other values and their right checksum, with the former signature or none."""
    file, signature = data[:-SIGNATURE_BYTES], data[-SIGNATURE_BYTES:]
    label = label_of(file)
    tensors = {name: tensor.clone() for name, tensor in unpack_file(file, label).items()}
    for tensor in tensors.values():
        tensor.view(torch.uint8)[..., :1] ^= 1
    return pack_file(label, tensors) + (signature if signed else b"")


def given_up(events: dict[str, int]) -> int:
    """Loads that took longer than they may, or than computing."""
    return events.get("timeout", 0) + events.get("late", 0)


@pytest.mark.matrix
def test_a_file_system_that_hangs_is_waited_for_once(start_with_tiers, tmp_path, oracle, text):
    """With a third-party tier."""
    package, root = tmp_path / "hanging-1.dist-info", tmp_path / "kv"
    package.mkdir()
    (package / "METADATA").write_text(hanging_tier.METADATA)
    (package / "entry_points.txt").write_text(hanging_tier.ENTRY_POINTS)
    environment = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    server = start_with_tiers(f"{hanging_tier.SCHEME}://{root}?size=1GiB", environment=environment, serve=TESSERA_SERVE)
    chunks = [text(200) for _ in range(4)]
    ask(server, "shared", chunks, "What?", system="S")
    to_sleep(server)
    hanging_tier.says_so(root).touch()
    answer = ask(server, "shared", chunks, "What?", system="S")
    assert sum(status == "filled" for status in statuses(answer)) >= 3
    assert_exact(answer, oracle("tiny-llama"), "shared")
    happened = server.stats()["counters"]["tiers"][hanging_tier.SCHEME]
    # All are asked for at once, and none after the first was given up.
    assert given_up(happened) >= 1
    assert given_up(happened) + happened.get("suspended", 0) >= 4
    assert_exact(ask(server, "shared", [text(50), *chunks], "What?", system="S"), oracle("tiny-llama"), "shared")
    after = server.stats()["counters"]["tiers"][hanging_tier.SCHEME]
    assert given_up(after) == given_up(happened)
    # While chunks are prefetched, and while a server starts that looks for ids there.
    to_sleep(server)
    for each in (server, start_with_tiers(f"{hanging_tier.SCHEME}://{root}?size=1GiB", environment=environment)):
        body = {"system": SYSTEM, "chunks": [text(90), *chunks], "question": "What?"}
        plan = {**body, "cache": {"position_strategy": "shared"}, "prefetch": True}
        assert each.post("/v1/rag/plan", plan)["prefetching"] > 0
        assert_exact(ask(each, "shared", body["chunks"], "What?"), oracle("tiny-llama"), "shared")
        assert by_id(each, "unknown", status=404)
        until(lambda each=each: each.stats()["occupancy"]["leases"] == 0)
    hanging_tier.says_so(root).unlink()


@pytest.mark.serve_with(*STORING)
def test_a_plan_starts_what_the_question_will_wait_for(server, oracle, text):
    stored, new = text(300), text(120)
    ask(server, "shared", [stored], "What?")
    to_sleep(server)
    body = {"chunks": [stored, new], "question": "What?", "cache": {"position_strategy": "shared"}}
    body["system"] = "You answer from documents."
    plan = server.post("/v1/rag/plan", {**body, "prefetch": True})
    assert [chunk["status"] for chunk in plan["chunks"]] == ["missing", "missing"]
    assert plan["prefetching"] == 3  # the system segment, too
    until(lambda: [chunk["status"] for chunk in server.post("/v1/rag/plan", body)["chunks"]] == ["hit", "hit"])
    answer = ask(server, "shared", [stored, new], "What?")
    assert statuses(answer) == ["hit", "hit"]
    assert_exact(answer, oracle("tiny-llama"), "shared")
    assert server.post("/v1/rag/plan", {**body, "prefetch": True})["prefetching"] == 0


def by_id(server: TesseraServer, *ids: str, status: int = 200) -> dict[str, Any]:
    """The answer to a question about registered chunks."""
    body = {"system": SYSTEM, "chunks": [{"id": id} for id in ids], "question": "Which?"}
    options = {"max_tokens": STEPS, "temperature": 0, "ignore_eos": True, "logprobs": True, "return_token_ids": True}
    cache = {"position_strategy": "offset", "explain": True}
    return server.post("/v1/rag/chat", {**body, **options, "cache": cache}, status)


@pytest.mark.matrix
def test_after_kill_9_the_first_request_finds_everything_and_so_does_another_server(
    start_with_tiers, oracle, text, tmp_path
):
    """Chunks by their text and by their ids."""
    folder = tmp_path / "kv"
    tiers = FILES.format(folder=folder)
    server, chunks, by_name = start_with_tiers(tiers), [text(300), text(120)], {"a": text(260), "b": text(290)}
    ask(server, "shared", chunks, "What?")
    given = [{"id": id, "text": text} for id, text in by_name.items()]
    server.client.post("/v1/rag/chunks", json={"system": SYSTEM, "chunks": given})
    archived(server)
    (listed,) = server.get("/v1/rag/chunks", id="a")["data"]
    assert (listed["state"], listed["tiers"]) == ("ready", ["pool", "file"])
    to_sleep(server)
    (away,) = server.get("/v1/rag/chunks", id="a")["data"]
    assert (away["state"], away["tiers"], away["pages"]) == ("stored", ["file"], 0)
    assert server.get("/v1/rag/chunks/" + away["key"]) == away
    answer = by_id(server, "a")
    assert origins(answer) == ["file"]
    assert_exact(answer, oracle("tiny-llama"), "offset")
    many = [text(60 + number) for number in range(50)]
    server.client.post("/v1/rag/chunks", json={"system": SYSTEM, "chunks": many})  # most are not written yet
    server.process.kill()
    wait_until_gone(server.process.pid)  # its engine notices the kill

    again = start_with_tiers(tiers)
    for number in range(0, 50, 10):
        answer = ask(again, "offset", many[number : number + 10], "What?")
        assert set(origins(answer)) <= {"file", "filled"}
        assert_exact(answer, oracle("tiny-llama"), "offset")
    assert not again.stats()["counters"]["tiers"]["file"].get("corrupt")
    answer = ask(again, "shared", chunks[::-1], "What?")
    assert origins(answer) == ["file", "file"]
    assert answer["cache"]["tokens"]["computed"] == len(answer["cache"]["segments"][-1]["token_ids"])
    assert_exact(answer, oracle("tiny-llama"), "shared")
    until(lambda: len(again.get("/v1/rag/chunks", state="stored", id="b")["data"]) == 1)
    answer = by_id(again, "b", "a")
    assert origins(answer) == ["file", "file"]
    assert_exact(answer, oracle("tiny-llama"), "offset")

    other, new = start_with_tiers(tiers), text(200)
    given = [{"id": "c", "text": new}]
    again.client.post("/v1/rag/chunks", json={"system": SYSTEM, "chunks": given})
    archived(again)
    found = by_id(other, "c")  # registered after this server's start
    assert origins(found) == ["file"]
    assert_exact(found, oracle("tiny-llama"), "offset")
    assert statuses(ask(other, "offset", [new], "What?")) == ["hit"]
    key = found["cache"]["chunks"][0]["key"]
    assert other.client.delete(f"/v1/rag/chunks/{key}").status_code == 200
    assert not list(folder.rglob(f"{key}*"))
    assert "deleted" in by_id(other, "c", status=410)["error"]["message"]


def change(path: Path, how: Callable[[bytes], bytes]) -> None:
    path.write_bytes(how(path.read_bytes()))


@pytest.mark.matrix
def test_a_full_disk_and_one_that_can_not_be_written_to_cost_nothing_but_the_tier(
    start_with_tiers, tmp_path, oracle, text
):
    folder = tmp_path / "kv"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(folder)], check=False).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        server, chunks = start_with_tiers(f"file://{folder}?size=1GiB"), [text(300), text(200)]
        answer = ask(server, "shared", chunks, "What?")
        assert statuses(answer) == ["filled"] * 2
        assert archived(server)["counters"]["tiers"]["file"]["store_failed"] >= 1
        assert not list(folder.rglob("*.tmp"))
        assert_exact(ask(server, "shared", chunks[::-1], "What?"), oracle("tiny-llama"), "shared")
        subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
        assert_exact(ask(server, "shared", [text(90), *chunks], "What?"), oracle("tiny-llama"), "shared")
        archived(server)
        assert server.stop() == 0
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.matrix
def test_a_wrong_configuration_stops_the_start_in_one_line(start):
    server = start("--chunk-cache-tiers", "file:///proc/nowhere?size=1GiB")
    assert server.process.wait(120) == 2
    (said,) = [line for line in server.log.read_text().splitlines() if line.startswith("tessera: ")]
    assert "/proc/nowhere: No such file or directory" in said


@pytest.mark.matrix
def test_replicas_that_share_a_directory_share_what_is_in_it_by_the_registry(
    start_with_tiers, tmp_path, oracle, text, redis_server
):
    # A busy machine may answer late, which would count as a lost registry: replicas would take other ids.
    registry, patient = ("--registry", redis_server.url), {"REGISTRY": json.dumps({"timeout_s": 10})}
    tiers = f"file://{tmp_path}/kv?size=1GiB"
    replicas = {name: start_with_tiers(tiers, *registry, "--replica-name", name, environment=patient) for name in "ab"}
    with ExitStack() as stack:
        route = ("tests.engine.always_fetching", "route")
        router = ServerProcess(tmp_path / "router.log", *registry, serve=route, environment=patient)
        stack.callback(router.stop)
        router.wait_ready()
        until(lambda: len(router.client.get("/v1/cluster").json()["replicas"]) == 2)

        def asked(*chunks: Any) -> tuple[dict[str, Any], str]:
            body = {"system": SYSTEM, "chunks": chunks, "question": "Which?", "max_tokens": STEPS, "temperature": 0}
            more = {"ignore_eos": True, "logprobs": True, "return_token_ids": True}
            cache = {"position_strategy": "offset", "explain": True}
            answer = router.client.post("/v1/rag/chat", json={**body, **more, "cache": cache})
            assert answer.status_code == 200, answer.text
            return answer.json(), answer.headers["x-tessera-replica"]

        document = text(300)
        answer, first = asked(document)
        assert origins(answer) == ["filled"]
        to_sleep(replicas[first])

        def claims() -> list[tuple[bytes, ...]]:
            """The holders of each claimed chunk."""
            return [tuple(redis_server.client.hgetall(key)) for key in redis_server.client.scan_iter("tessera:d:*")]

        # The system segment and the document are soon claimed once each, for the storage instead of replicas.
        until(lambda: [len(holders) for holders in claims()] == [1, 1])
        ((holder,), (also,)) = claims()
        assert holder == also
        listed = [json.loads(redis_server.client.get(key)) for key in redis_server.client.scan_iter("tessera:r:*")]
        assert [each["storages"] for each in listed] == [[holder.hex()]] * 2

        answer, again = asked(document)
        decision = router.client.get("/v1/cluster").json()["decisions"][-1]
        assert decision["held_tokens"] == decision["wanted_tokens"] == answer["cache"]["chunks"][0]["tokens"]
        assert origins(answer) == ["file"]
        replicas[again].stop()
        until(lambda: len(router.client.get("/v1/cluster").json()["replicas"]) == 1)
        answer, other = asked(document)
        assert other != again
        assert origins(answer) == ["file"]
        assert_exact(answer, oracle("tiny-llama"), "offset")
        key = answer["cache"]["chunks"][0]["key"]
        assert len(list((tmp_path / "kv").rglob(f"{key}*"))) == 1


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("tier", "holder"),
    [("host://?size=64MiB&timeout=20", 6), ("file://{folder}/kv?size=1GiB&timeout=20", 2)],
    ids=["host", "file"],
)
def test_what_a_replica_has_in_a_tier_of_its_own_another_fetches(
    tier, holder, start, start_with_tiers, tmp_path, oracle, text, redis_server
):
    registry = ("--registry", redis_server.url, "--replica-name")
    environment = {"TESSERA_PEER_SECRET": "of these replicas alone", "REGISTRY": json.dumps({"timeout_s": 10})}
    a = start_with_tiers(tier.format(folder=tmp_path), *registry, "a", environment=environment)
    b = start(*registry, "b", environment=environment, serve=ALWAYS_FETCHING).wait_ready()
    chunks = [text(300), text(120)]
    assert statuses(ask(a, "offset", chunks, "What?")) == ["filled"] * 2
    to_sleep(a)

    def holders() -> list[list[int]]:
        """Lengths of the holders' names, of each document and the system segment."""
        keys = redis_server.client.scan_iter("tessera:d:*")
        return [[len(name) for name in redis_server.client.hkeys(key)] for key in keys]

    until(lambda: holders() == [[holder]] * 3)
    answer = ask(b, "shared", chunks[::-1], "Which?")
    assert origins(answer) == ["a", "a"]
    assert_exact(answer, oracle("tiny-llama"), "shared")
    assert b.stats()["counters"]["fetches"] == {"fetched": 2}
    assert a.stats()["occupancy"]["segments"] == 0
    assert a.stats()["counters"]["tiers"][tier.partition(":")[0]]["loaded"] == 3
