# SPDX-License-Identifier: Apache-2.0
"""No body, form, file or query, of any kind and up to the limits, keeps a server from answering others, or takes much
memory."""

import base64
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.documents.checked_fields import MOST_ITEMS, MOST_PROMPTS
from app.http.json_size import MOST_BYTES as MOST_JSON
from app.http.json_size import MOST_CONTAINERS, MOST_DIGITS, MOST_ESCAPES, MOST_NAMES, MOST_VALUES
from tests.engine.server import TesseraServer
from tests.support.waiting import until

pytestmark = [pytest.mark.engine, pytest.mark.matrix]

WATCH = Path(__file__).parent / "loop_watch"
MOST_PAUSE_S = 0.1
"""Of CPU time."""
REPEATS = 3
MOST_BYTES = 256 << 20
"""Of memory for one request."""
SIZE = MOST_JSON - (1 << 16)
"""Bytes of JSON, a little less than what a server takes."""
FILE_SIZE = 63 << 20
"""Bytes of a form or a file, a little less than `--max-body-size`."""
QUERY_SIZE = (1 << 16) - (1 << 12)
"""Bytes of a query, a little less than what a server takes."""

Fields = dict[str, Any]


def every_field(text: Any, *, parts: bool = False) -> Fields:
    """A body with the value wherever an endpoint has a text."""
    content = [{"type": "text", "text": text}] if parts else text
    asked = {"model": "tiny-llama", "max_tokens": 1, "messages": [{"role": "user", "content": content}]}
    return {**asked, "prompt": text, "input": text, "question": text, "chunks": [text]}


def chat(**fields: Any) -> Fields:
    asked = {"messages": [{"role": "user", "content": "Why?"}], "prompt": "Why?", "input": "Why?", "question": "Why?"}
    return {"model": "tiny-llama", "max_tokens": 1, "chunks": ["A."], **asked, **fields}


def document(size: int) -> Fields:
    data = base64.b64encode(b"%PDF-1.7\n" + bytes(size * 3 // 4)).decode()
    source = {"type": "base64", "media_type": "application/pdf", "data": data}
    return chat(messages=[{"role": "user", "content": [{"type": "document", "source": source}]}])


def image(size: int) -> Fields:
    url = {"url": f"data:image/png;base64,{'A' * size}"}
    return chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": url}]}])


BODIES: dict[str, Callable[[], bytes]] = {
    "open brackets": lambda: b"[" * SIZE,
    "brackets in a field": lambda: b'{"messages": ' + b"[" * (SIZE - 20),
    "objects": lambda: b'{"a":' * (SIZE // 5),
    "quotes": lambda: b'"' * SIZE,
    "backslashes": lambda: b'{"messages": "' + b"\\" * (SIZE - 20),
    "a number": lambda: b'{"max_tokens": ' + b"9" * (SIZE - 20) + b"}",
    "spaces": lambda: b" " * SIZE,
    "no JSON": lambda: b"\xff" * SIZE,
    "nesting": lambda: json.dumps(chat(chat_template_kwargs=json.loads("[" * 190 + "]" * 190))).encode(),
    "as many arrays as may be": lambda: json.dumps(every_field([[]] * (MOST_CONTAINERS // 8))).encode(),
    "as many values as may be": lambda: json.dumps(every_field([1] * (MOST_VALUES // 8))).encode(),
    "tokens": lambda: json.dumps(chat(prompt=[7] * (MOST_VALUES - 100))).encode(),
    "fractions": lambda: json.dumps(chat(prompt=[1.2345678901234567e-300] * (MOST_VALUES - 100))).encode(),
    "long integers": lambda: json.dumps(chat(prompt=[int("9" * MOST_DIGITS)] * (MOST_VALUES - 100))).encode(),
    "longer integers": lambda: b'{"prompt": [' + b",".join([b"9" * 4000] * 2000) + b"]}",
    "pieces": lambda: json.dumps(every_field("a\n" * (MOST_ESCAPES // 7))).encode(),
    "more pieces": lambda: json.dumps(chat(question="ab\n" * (SIZE // 4 - 100))).encode(),
    "strings": lambda: json.dumps(chat(stop=["a"] * (MOST_VALUES - 100))).encode(),
    "names": lambda: json.dumps(chat(**{f"n{number}": 1 for number in range(MOST_NAMES - 100)})).encode(),
    "wrong items": lambda: json.dumps(every_field([None] * (MOST_VALUES // 8))).encode(),
    "wrong messages": lambda: json.dumps(chat(messages=[1] * MOST_ITEMS, input=[1] * MOST_ITEMS)).encode(),
    "wrong parts": lambda: json.dumps(chat(messages=[{"role": "user", "content": [1] * MOST_ITEMS}])).encode(),
    "unknown fields": lambda: json.dumps(chat(chunks=[{f"n{number}": 1 for number in range(4000)}] * 9)).encode(),
    "biases": lambda: json.dumps(chat(logit_bias={str(number): 1 for number in range(MOST_NAMES - 100)})).encode(),
    "chunks": lambda: json.dumps(chat(chunks=["a"] * 5000, documents=["a"] * 5000)).encode(),
    "more chunks": lambda: json.dumps(chat(chunks=["a b"] * 500_000)).encode(),
    "a text": lambda: json.dumps(every_field("word " * (SIZE // 5 // 7))).encode(),
    "a text in parts": lambda: json.dumps(every_field("word " * (SIZE // 5 // 7), parts=True)).encode(),
    "a word": lambda: json.dumps(every_field("x" * (SIZE // 7))).encode(),
    "a question": lambda: json.dumps(chat(question="x" * (SIZE - 1000))).encode(),
    "a message": lambda: json.dumps(chat(messages=[{"role": "user", "content": "x " * (SIZE // 2 - 1000)}])).encode(),
    "a chunk": lambda: json.dumps(chat(chunks=["# a few words\n" * (SIZE // 15 - 1000)])).encode(),
    "escapes": lambda: b'{"question": "' + b"\\u00e9" * (MOST_ESCAPES - 10) + b'"}',
    "wide characters": lambda: json.dumps(
        chat(question="x" * (SIZE - 1000) + "\U0001f600"), ensure_ascii=False
    ).encode(),
    "a system prompt": lambda: json.dumps(chat(system="x " * (SIZE // 2 - 1000))).encode(),
    "a model": lambda: json.dumps(chat(model="x" * (SIZE - 1000))).encode(),
    "a separator": lambda: json.dumps(
        chat(cache={"separator": "x" * (SIZE // 2 - 1000)}, prompt="x" * (SIZE // 2))
    ).encode(),
    "many parts": lambda: json.dumps(chat(cache={"separator": " "}, prompt="a " * (SIZE // 2 - 1000))).encode(),
    "a document": lambda: json.dumps(document(SIZE - 1000)).encode(),
    "an image": lambda: json.dumps(image(SIZE - 1000)).encode(),
    "a prompt's log probabilities": lambda: json.dumps(chat(prompt=[7] * 8000, prompt_logprobs=20)).encode(),
    "answers' log probabilities": lambda: json.dumps(
        chat(n=100, logprobs=True, top_logprobs=20, max_tokens=50, ignore_eos=True)
    ).encode(),
    "answers' log probabilities, one of each token": lambda: json.dumps(
        chat(n=80, logprobs=True, max_tokens=50, ignore_eos=True)
    ).encode(),
    "a pattern": lambda: json.dumps(chat(structured_outputs={"regex": "(a|b)*" * 20_000})).encode(),
    "a grammar": lambda: json.dumps(chat(structured_outputs={"grammar": 'root ::= "a"\n' * 20_000})).encode(),
}


TEXT = SIZE - 4000
VALUES: dict[str, Callable[[], Any]] = {
    "a text": lambda: "word " * (TEXT // 5),
    "a word": lambda: "x" * TEXT,
    "a text in a list": lambda: ["word " * (TEXT // 5)],
    "texts": lambda: ["word " * (TEXT // 5 // MOST_ITEMS - 2)] * MOST_ITEMS,
    "JSON": lambda: "[" + "[]," * (TEXT // 3 - 9) + "[]]",
    "short texts": lambda: ["word"] * MOST_PROMPTS,
    "tokens": lambda: [[7]] * MOST_PROMPTS,
    "more tokens": lambda: [[7]] * MOST_CONTAINERS,
    "an object": lambda: {"a": "word " * (TEXT // 5)},
    "calls": lambda: [{"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": CALL}]}],
}
"""Of a field, any that an endpoint knows."""
CALL = {"name": "a", "arguments": "[" + "[]," * (TEXT // 3 - 1000) + "[]]"}


def form(*parts: tuple[str, bytes]) -> bytes:
    """A form's body: each part with what its header says."""
    return b"".join(b"--x\r\n%s\r\n\r\n%s\r\n" % (head.encode(), content) for head, content in parts) + b"--x--\r\n"


FIELD = 'content-disposition: form-data; name="system"'
FILE = 'content-disposition: form-data; name="files"; filename="a.txt"'
FORMS: dict[str, Callable[[], bytes]] = {
    "files": lambda: form(*[(FILE, b"word")] * 20_000),
    "fields": lambda: form(*[(FIELD, b"word")] * 20_000),
    "a field": lambda: form((FIELD, b"x" * FILE_SIZE)),
    "a name": lambda: form((f'{FILE[:-1]}{"x" * (FILE_SIZE - 1000)}"', b"word")),
    "headers": lambda: form(("a: b\r\n" * (FILE_SIZE // 6 - 100) + FILE, b"word")),
    "a header": lambda: b"--x\r\na" + b"a" * FILE_SIZE,
    "line ends": lambda: b"\r\n" * (FILE_SIZE // 2),
    "boundaries": lambda: b"--x\r\n" * (FILE_SIZE // 5),
    "other boundaries": lambda: form((FILE, b"\r\n--y" * (FILE_SIZE // 5 - 100))),
    "parts of a boundary": lambda: form((FILE, b"\r\n-" * (FILE_SIZE // 3 - 100))),
    "a text": lambda: form((FILE, b"word " * (FILE_SIZE // 5 - 100))),
    "a line": lambda: form((FILE, b"x" * (FILE_SIZE - 1000))),
    "markup": lambda: form((FILE.replace("txt", "html"), b"<b>" * (FILE_SIZE // 3 - 1000))),
    "no form": lambda: b"\xff" * FILE_SIZE,
}
PAIRS: dict[str, Callable[[], bytes]] = {
    "pairs": lambda: b"a=b&" * (SIZE // 4),
    "a value": lambda: b"system=" + b"x" * (SIZE - 100),
    "escapes": lambda: b"system=" + b"%41" * (SIZE // 3 - 100),
    "nothing": lambda: b"&" * SIZE,
}
QUERIES: dict[str, Callable[[], str]] = {
    "a number": lambda: "limit=" + "9" * QUERY_SIZE,
    "pairs": lambda: "a&" * (QUERY_SIZE // 2),
    "one name": lambda: "namespace=a&" * (QUERY_SIZE // 12),
    "escapes": lambda: "namespace=" + "%41" * (QUERY_SIZE // 3),
    "a cursor": lambda: "cursor=" + "A" * QUERY_SIZE,
    "a file's name": lambda: "file=a&filename=" + "a." * (QUERY_SIZE // 2 - 9),
}


class Memory:
    """How much a process's memory grows at most, from now on."""

    def __init__(self, pid: int) -> None:
        self._process = Path(f"/proc/{pid}")
        (self._process / "clear_refs").write_text("5")  # the peak begins anew
        self._before = self._bytes("VmRSS")

    def growth(self) -> int:
        """Bytes."""
        return self._bytes("VmHWM") - self._before

    def _bytes(self, name: str) -> int:
        found = re.search(rf"{name}:\s+(\d+) kB", (self._process / "status").read_text())
        assert found is not None
        return int(found[1]) << 10


class Watched:
    """A server whose pauses and memory are measured, request by request."""

    def __init__(self, server: TesseraServer, file: Path) -> None:
        self._pid, self._file = server.process.pid, file
        self.server = server
        self.client = httpx.Client(base_url=server.url, timeout=300)

    def measured(self, *arguments: Any, **fields: Any) -> tuple[str, Fields]:
        self._file.unlink(missing_ok=True)
        memory = Memory(self._pid)
        os.kill(self._pid, signal.SIGUSR1)
        try:
            status = str(self.client.request(*arguments, **fields).status_code)
        except httpx.HTTPError as error:
            status = type(error).__name__
        os.kill(self._pid, signal.SIGUSR2)
        until(self._file.exists)
        found: Fields = json.loads(self._file.read_text())
        found["bytes"] = memory.growth()
        return status, found


@pytest.fixture(scope="module")
def watched(serve: Callable[..., TesseraServer], tmp_path_factory: pytest.TempPathFactory) -> Watched:
    file = tmp_path_factory.mktemp("watch") / "longest.json"
    path = os.pathsep.join(filter(None, (str(WATCH), os.environ.get("PYTHONPATH"))))
    collections = tmp_path_factory.mktemp("collections")
    flags = ("--collections", str(collections), "--max-logprobs", "20")  # vLLM's own, which other tests raise
    return Watched(serve("tiny-llama", *flags, environment={"LOOP_WATCH": str(file), "PYTHONPATH": path}), file)


def operations(watched: Watched) -> Iterator[tuple[str, str]]:
    """Method and path of each endpoint; those of no path are named as they are."""
    for path, of_path in watched.server.get("/openapi.json")["paths"].items():
        for method in of_path:
            yield method.upper(), re.sub(r"{.*?}", "x", path)


def faults(watched: Watched, of: str, *arguments: Any, **fields: Any) -> Iterator[str]:
    """All that is wrong with a request's answer, its pauses or its memory.

    Noise only ever adds to a pause (a loop that finds no core counts what other threads do meanwhile): one that is too
    long is measured again, and counts if it always is.
    """
    status, found = watched.measured(*arguments, **fields)
    for _ in range(REPEATS):
        if _pause(found) > MOST_PAUSE_S:
            _, again = watched.measured(*arguments, **fields)
            found = {**min(found, again, key=_pause), "bytes": max(found["bytes"], again["bytes"])}
    if status.startswith("5") and status != "503":
        yield f"{of}: status {status}"
    if found["turn_s"] > MOST_PAUSE_S:
        yield f"{of}: a turn of {found['turn_s']:.2f} s ({status})\n{found['turn_at']}"
    if found["held_s"] > MOST_PAUSE_S:
        yield f"{of}: nobody else ran for {found['held_s']:.2f} s ({status})\n{found['held_by']}"
    if found["bytes"] > MOST_BYTES:
        yield f"{of}: {found['bytes'] >> 20} MiB ({status})"


def _pause(found: Fields) -> float:
    return max(found["turn_s"], found["held_s"])


_LEFT_OUT = ("/sleep", "/wake_up", "/pause", "/resume", "/scale_elastic_ep", "/abort_requests")


def posted(watched: Watched, body: bytes, content_type: str) -> str:
    """All that is wrong after a body to every endpoint."""
    wrong: list[str] = []
    for method, path in operations(watched):
        if method in ("POST", "PUT", "PATCH") and path not in _LEFT_OUT:
            given = {"content": body, "headers": {"content-type": content_type}, "params": {"filename": "a.txt"}}
            wrong += faults(watched, f"{method} {path}", method, path, **given)
    assert watched.server.get("/v1/cache/stats")["enabled"] is not None
    return "\n".join(wrong)


@pytest.mark.parametrize("kind", BODIES)
def test_a_body_holds_nobody_up(watched: Watched, kind: str) -> None:
    assert not posted(watched, BODIES[kind](), "application/json")


@pytest.mark.parametrize("kind", VALUES)
def test_no_field_holds_anybody_up(watched: Watched, kind: str) -> None:
    page, value, wrong = watched.server.get("/openapi.json"), VALUES[kind](), list[str]()
    for path, of_path in page["paths"].items():
        content = of_path.get("post", {}).get("requestBody", {}).get("content", {})
        if (schema := content.get("application/json", {}).get("schema")) is None or path in _LEFT_OUT:
            continue
        known = page["components"]["schemas"].get(schema.get("$ref", "").rpartition("/")[2], schema)
        for name in known.get("properties", {}):
            wrong += faults(watched, f"{path} {name}", "POST", path, json=chat(**{name: value}))
    assert watched.server.get("/v1/cache/stats")["enabled"]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("kind", FORMS)
def test_a_form_holds_nobody_up(watched: Watched, kind: str) -> None:
    assert not posted(watched, FORMS[kind](), "multipart/form-data; boundary=x")


@pytest.mark.parametrize("kind", PAIRS)
def test_pairs_hold_nobody_up(watched: Watched, kind: str) -> None:
    assert not posted(watched, PAIRS[kind](), "application/x-www-form-urlencoded")


@pytest.mark.parametrize("kind", QUERIES)
def test_a_query_holds_nobody_up(watched: Watched, kind: str) -> None:
    wrong: list[str] = []
    for method, path in operations(watched):
        if path not in _LEFT_OUT:
            wrong += faults(watched, f"{method} {path}", method, f"{path}?{QUERIES[kind]()}")
    assert not wrong, "\n".join(wrong)


CONNECTIONS = 100
_BODY = b"x" * (1 << 20)
_LENGTH = b"content-length: 50000000\r\n\r\n"
HELD: dict[str, list[bytes]] = {
    "a head without end": [b"GET /health HTTP/1.1\r\nhost: a\r\n", *[b"a: b\r\n" * 1000] * 100],
    "a long header": [b"GET /health HTTP/1.1\r\na: ", *[_BODY] * 8],
    "a body for a closed path": [b"POST /v1/rag/chat HTTP/1.1\r\nhost: a\r\n" + _LENGTH, *[_BODY] * 8],
    "a body for an open path": [b"POST /health HTTP/1.1\r\nhost: a\r\n" + _LENGTH, *[_BODY] * 8],
    "a body of OPTIONS": [b"OPTIONS /v1/rag/chat HTTP/1.1\r\nhost: a\r\n" + _LENGTH, *[_BODY] * 8],
    "a file": [b"POST /v1/rag/split?filename=a.txt HTTP/1.1\r\nhost: a\r\n" + _LENGTH, *[_BODY] * 8],
    "a peer's body": [b"POST /peer/fills HTTP/1.1\r\nhost: a\r\n" + _LENGTH, *[_BODY] * 8],
    "chunks of a body": [
        b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n",
        *[b"%x\r\n%s\r\n" % (len(_BODY), _BODY)] * 8,
    ],
    "requests that wait": [b"GET /openapi.json HTTP/1.1\r\nhost: a\r\n\r\n" * 10_000],
}


@pytest.mark.parametrize("kind", HELD)
def test_a_connection_without_a_key_holds_little(serve: Callable[..., TesseraServer], kind: str) -> None:
    """At most 1 MiB."""
    server = serve("tiny-llama", "--api-key", "secret")
    server.client.headers["authorization"] = "Bearer secret"
    with ExitStack() as stack:
        memory = Memory(server.process.pid)
        for _ in range(CONNECTIONS):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=60))
            client.settimeout(0.2)
            with suppress(OSError):  # the server may refuse, or no longer read
                for part in HELD[kind]:
                    client.sendall(part)
        assert memory.growth() < CONNECTIONS << 20


_PAUSING = """
import asyncio, os, re, signal, sys, time

def pause():
    re.match("(a|a)*b", "a" * 23)

async def main():
    await asyncio.sleep(0.05)
    for call in (lambda: pause(), lambda: asyncio.to_thread(pause)):
        os.kill(os.getpid(), signal.SIGUSR1)
        if (waited := call()) is not None:
            await waited
        await asyncio.sleep(0.05)
        os.kill(os.getpid(), signal.SIGUSR2)
        await asyncio.sleep(0.05)
        print(open(os.environ["LOOP_WATCH"]).read())

asyncio.run(main())
"""


def test_the_watch_sees_who_holds_the_loop_up(tmp_path: Path) -> None:
    environment = {**os.environ, "LOOP_WATCH": str(tmp_path / "longest.json"), "PYTHONPATH": str(WATCH)}
    told = subprocess.run([sys.executable, "-c", _PAUSING], env=environment, capture_output=True, text=True, check=True)
    loops, threads = map(json.loads, told.stdout.splitlines())
    assert loops["turn_s"] > MOST_PAUSE_S > loops["held_s"]
    assert threads["held_s"] > MOST_PAUSE_S > threads["turn_s"]
