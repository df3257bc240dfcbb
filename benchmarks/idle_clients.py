# SPDX-License-Identifier: Apache-2.0
"""Do clients that stay connected and read nothing, or hardly anything, slow others down?

    python -m benchmarks.idle_clients

Warm questions are timed without company, beside the crowd, and without it again. The crowd: clients that have asked for
a stream and read nothing of it, and slow readers of long streams, whose answers the server has to keep for them.
"""

import argparse
import asyncio
import json
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import psutil
from rich.console import Console
from rich.progress import track

from app.models.demo_model import DEMO_MODEL
from benchmarks.statistics import median
from benchmarks.texts import Texts
from tools.progress import say
from tools.server_process import ServerProcess

SLOWER_AT_MOST = 1.1
_ANSWER = {"max_tokens": 400, "ignore_eos": True, "logprobs": True, "top_logprobs": 20}
"""Of a slow reader: about a megabyte, much more than the sockets' buffers take."""
_READ_BYTES, _RECEIVE_BUFFER = 2048, 4096
_CHUNK_TOKENS, _CHUNKS = 200, 4
_PATH = "/v1/rag/chat"
_STAYS_CONNECTED = {"VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "3600"}
_CONSOLE = Console(stderr=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints; 1 if others get slower than they may, or if not all of the crowd was there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--idle", type=int, default=1000, help="clients that read nothing (default: %(default)s)")
    parser.add_argument("--slow", type=int, default=200, help="clients that read slowly (default: %(default)s)")
    parser.add_argument("--questions", type=int, default=150, help="timed in each phase (default: %(default)s)")
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        server = ServerProcess(log, str(DEMO_MODEL), "--enforce-eager", environment=_STAYS_CONNECTED)
        try:
            say("starting a server …")
            server.wait_ready()
            found = asyncio.run(_measure(server, args.idle, args.slow, args.questions))
        finally:
            server.stop()
    is_whole = (found["idle"], found["slow"]) == (args.idle, args.slow)
    holds = is_whole and found["slower"] <= SLOWER_AT_MOST
    print(json.dumps(found))
    verdict = "holds" if holds else "does not hold"
    say(f"others take {found['slower']:.2f} times as long, at most {SLOWER_AT_MOST}: {verdict}")
    return int(not holds)


async def _measure(server: ServerProcess, idle: int, slow: int, questions: int) -> dict[str, float]:
    texts = Texts("idle clients")
    warm = {"chunks": texts.chunks(_CHUNKS, _CHUNK_TOKENS), "question": "And?", "max_tokens": 16, "ignore_eos": True}
    async with aiohttp.ClientSession(server.url) as session:
        await _times(session, warm, questions // 5, "warming up")
        alone = await _times(session, warm, questions, "without company")
        async with _crowd(server, idle, slow) as crowd:
            beside = await _times(session, warm, questions, "beside the crowd")
            num_open, num_unread = crowd.count()
        alone += await _times(session, warm, questions, "without company")
    say(f"{num_open} of {idle} idle clients were connected, {num_unread} of {slow} slow readers had more to come")
    ratio = median(beside) / median(alone)
    return {"alone_s": median(alone), "beside_s": median(beside), "slower": ratio, "idle": num_open, "slow": num_unread}


async def _times(session: aiohttp.ClientSession, body: dict[str, object], number: int, name: str) -> list[float]:
    times = []
    for _ in track(range(number), name, console=_CONSOLE):
        started = time.perf_counter()
        async with session.post(_PATH, json={**body, "stream": True}) as response:
            response.raise_for_status()
            await response.read()
        times.append(time.perf_counter() - started)
    return times


class _Crowd:
    """Sockets on which a stream was asked for; only those of slow readers are read, a little each second."""

    def __init__(self, server: ServerProcess) -> None:
        self._server = server
        self._idle: list[socket.socket] = []
        self._slow: list[socket.socket] = []
        self._at_end = 0

    async def join(self, body: dict[str, object], *, is_slow: bool) -> None:
        loop = asyncio.get_running_loop()
        sock = socket.socket()
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER)
        await loop.sock_connect(sock, ("127.0.0.1", self._server.port))
        content = json.dumps({**body, "stream": True}).encode()
        head = f"POST {_PATH} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        head += f"content-length: {len(content)}\r\n\r\n"
        await loop.sock_sendall(sock, head.encode() + content)
        (self._slow if is_slow else self._idle).append(sock)

    async def read_slowly(self) -> None:
        async def read(sock: socket.socket) -> None:
            loop = asyncio.get_running_loop()
            while (arrived := await loop.sock_recv(sock, _READ_BYTES)) and b"[DONE]" not in arrived:
                await asyncio.sleep(1)
            self._at_end += 1

        await asyncio.gather(*map(read, self._slow))

    async def answered(self) -> None:
        """Until the engine has nothing left to do for the crowd."""
        async with aiohttp.ClientSession(self._server.url) as session:
            while True:
                async with session.get("/metrics") as response:
                    lines = (await response.text()).splitlines()
                under_way = ("vllm:num_requests_running", "vllm:num_requests_waiting{")
                if not any(float(line.split()[-1]) for line in lines if line.startswith(under_way)):
                    return
                await asyncio.sleep(1)

    def count(self) -> tuple[int, int]:
        """Idle clients with an answer that are still connected, and slow readers whose answer has not ended."""
        connections = psutil.Process(self._server.process.pid).net_connections("tcp")
        connected = {each.raddr.port for each in connections if each.raddr and each.status == psutil.CONN_ESTABLISHED}
        idle = [sock for sock in self._idle if sock.getsockname()[1] in connected]
        answered = sum(sock.recv(12, socket.MSG_PEEK) == b"HTTP/1.1 200" for sock in idle)
        return answered, len(self._slow) - self._at_end

    def leave(self) -> None:
        for sock in (*self._idle, *self._slow):
            sock.close()


@asynccontextmanager
async def _crowd(server: ServerProcess, idle: int, slow: int) -> AsyncIterator[_Crowd]:
    crowd = _Crowd(server)
    # One chunk, which the first computes and the others wait for.
    body = {"chunks": [Texts("crowd").text(50)], "question": "And?", "max_tokens": 4}
    for _ in track(range(idle), "idle clients", console=_CONSOLE):
        await crowd.join(body, is_slow=False)
    for _ in track(range(slow), "slow readers", console=_CONSOLE):
        await crowd.join({**body, **_ANSWER}, is_slow=True)
    reading = asyncio.create_task(crowd.read_slowly())
    try:
        say("waiting for the engine to have answered them …")
        await crowd.answered()
        yield crowd
    finally:
        reading.cancel()
        crowd.leave()


if __name__ == "__main__":
    sys.exit(main())
