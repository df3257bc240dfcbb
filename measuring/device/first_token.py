# SPDX-License-Identifier: Apache-2.0
"""The time to the first token, beside full attention and beside vLLM's own prefix cache. It is reported, not judged."""

from dataclasses import replace
from typing import Any

from measuring.device.engine import Engine
from measuring.device.findings import CheckError, Finding
from measuring.kit.texts import Texts
from measuring.speed.answers import check_report
from measuring.speed.rag import Answer, BenchmarkError, Query, ask
from measuring.speed.statistics import median
from measuring.speed.systems import Server

CHUNK_TOKENS = 512
_SYSTEM_TOKENS, _QUESTION_TOKENS, _STEPS = 64, 32, 4

Times = dict[str, float]
"""Seconds to the first token, of one round: ``warm``, ``full`` and ``repeat``."""


async def first_token(engine: Engine) -> Finding:
    """New questions over cached chunks, over the same text in full attention, and over it once more."""
    server, texts = await engine.caching_server(), engine.texts("time to first token")
    system, contexts = texts.text(_SYSTEM_TOKENS), engine.options.contexts
    rounds: dict[int, list[Times]] = {context: [] for context in contexts}
    for number in range(engine.options.rounds + 1):
        for context in contexts:
            times = await _round(server, texts, system, context, number)
            if number:  # the first one warms everything up
                rounds[context].append(times)
    values = {str(context): _summary(times) for context, times in rounds.items()}
    message = "; ".join(f"{context} tokens: {_words(summary)}" for context, summary in values.items())
    return Finding(f"{message} (medians of {engine.options.rounds} rounds)", {"contexts": values})


async def _round(server: Server, texts: Texts, system: str, context: int, number: int) -> Times:
    """All three in turn. Chunks are computed ahead in another order; full attention has them in no cache."""
    chunks = texts.chunks(max(1, context // CHUNK_TOKENS), CHUNK_TOKENS)
    query = Query(system, tuple(chunks), texts.text(_QUESTION_TOKENS), _STEPS)
    ahead, apart = f"first-token-{number}-{context}", f"first-token-{number}-{context}-full"
    await server.ingest(replace(query, chunks=tuple(texts.shuffled(chunks))), ahead)
    warm = await server.ask(query, ahead)
    check_report(warm, "hit")
    full, repeat = await _ask_full(server, query, apart), await _ask_full(server, query, apart)
    await server.clear(ahead)
    return {"warm": warm.ttft_s, "full": full.ttft_s, "repeat": repeat.ttft_s}


async def _ask_full(server: Server, query: Query, namespace: str) -> Answer:
    try:
        answer = await ask(server.http, "/v1/rag/chat", query.tessera_body(namespace, "full"))
    except BenchmarkError as error:
        raise CheckError(f"{error} (the server's log: {server.process.log})") from error
    if answer.report.get("mode") != "full":
        raise CheckError(f"a request in mode full ran {answer.report.get('mode')}")
    return answer


def _summary(rounds: list[Times]) -> dict[str, Any]:
    return {
        **{f"{name}_ms": 1e3 * median([times[name] for times in rounds]) for name in ("warm", "full", "repeat")},
        "full_over_warm": median([times["full"] / times["warm"] for times in rounds]),
        "repeat_over_warm": median([times["repeat"] / times["warm"] for times in rounds]),
        "rounds": rounds,
    }


def _words(summary: dict[str, Any]) -> str:
    return (
        f"{summary['warm_ms']:.1f} ms with cached chunks, {summary['full_over_warm']:.1f} times that in full "
        f"attention, {summary['repeat_over_warm']:.2f} times that on an exact repeat"
    )
