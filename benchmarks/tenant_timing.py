# SPDX-License-Identifier: Apache-2.0
"""Can a tenant tell from time whether another tenant's document, or prompt, is cached?

    python -m benchmarks.tenant_timing

Tenant "victim" sends half of the texts; then tenant "spy" sends all of them, once each, in random order. The times of
both halves are compared by a rank-sum test: below 0.01 the spy could tell them apart. That the test would see it is
shown with texts that the spy itself has sent before.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.progress import track

from app.access.tenants import hash_of, new_key
from app.models.demo_model import DEMO_MODEL
from benchmarks.statistics import median, rank_sum_p
from benchmarks.texts import Texts
from tools.progress import say
from tools.server_process import ServerProcess

TELLS_BELOW = 0.01
_TOKENS, _WARM_UP = 400, 20

Send = Callable[[str, str], float]
"""As which tenant, which text; the seconds that it took."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints; 1 if the spy can tell, or if the test could not have seen it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=200, help="of each kind of request (default: 200)")
    args = parser.parse_args(arguments)
    keys = {name: new_key() for name in ("victim", "spy")}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "tenants.toml"
        file.write_text("".join(f'[{name}]\nkeys = ["{hash_of(key)}"]\n' for name, key in keys.items()))
        server = ServerProcess(Path(folder) / "server.log", str(DEMO_MODEL), "--enforce-eager", "--tenants", str(file))
        try:
            say("starting a server …")
            server.wait_ready()
            found = {
                f"{kind}, {whose}": _p(send, args.texts, kind, whose)
                for kind, send in _senders(server, keys).items()
                for whose in ("victim", "spy")
            }
        finally:
            server.stop()
    is_right = [(p < TELLS_BELOW) == name.endswith("spy") for name, p in found.items()]
    print(json.dumps(found))
    say("no tenant's cache can be seen from another: " + ("holds" if all(is_right) else "does not hold"))
    return int(not all(is_right))


def _senders(server: ServerProcess, keys: dict[str, str]) -> dict[str, Send]:
    def post(path: str, body: dict[str, object], tenant: str) -> float:
        started = time.perf_counter()
        response = server.client.post(path, json=body, headers={"authorization": f"Bearer {keys[tenant]}"})
        seconds = time.perf_counter() - started
        response.raise_for_status()
        return seconds

    def document(tenant: str, text: str) -> float:
        return post("/v1/rag/chat", {"chunks": [text], "question": "and", "max_tokens": 1}, tenant)

    def prompt(tenant: str, text: str) -> float:
        return post("/v1/completions", {"model": server.model, "prompt": text, "max_tokens": 1}, tenant)

    return {"documents": document, "prompts": prompt}


def _p(send: Send, number: int, kind: str, whose: str) -> float:
    """The probability of such a difference between texts that ``whose`` has sent before, and others."""
    texts, randomly = Texts(f"{kind} {whose}"), random.Random(kind + whose)
    for _ in range(_WARM_UP):
        send("spy", texts.text(_TOKENS))
    sent, fresh = (texts.chunks(number // 2, _TOKENS) for _ in range(2))
    for text in track(sent, f"{kind}: {whose} sends half"):
        send(whose, text)
    asked = randomly.sample([*sent, *fresh], number)
    times = {text: send("spy", text) for text in track(asked, f"{kind}: spy sends all")}
    before, after = ([times[text] for text in half] for half in (sent, fresh))
    p = rank_sum_p(before, after)
    say(
        f"{kind} that {whose} has sent: {median(before) * 1e3:.1f} ms, others {median(after) * 1e3:.1f} ms, p = {p:.4f}"
    )
    return p


if __name__ == "__main__":
    sys.exit(main())
