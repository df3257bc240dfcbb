# SPDX-License-Identifier: Apache-2.0
"""One request to a server: its body, its stream, and messages of failures."""

import pytest

from app.documents.document import Document
from app.documents.rag_request import RagChatRequest
from measuring.kit.client import RefusedError, ServerError, SetupError
from measuring.quality.client import FORCED_TOKENS, LEAD, AskOptions, ServerInfo, TesseraClient
from measuring.quality.divergence import TOP
from tests.measuring.fake_server import CHUNKS, RAG, Reply, make_report
from tests.measuring.quality.helpers import make_question

OPTIONS = AskOptions("m", 32, "No idea")


@pytest.fixture
def ask(server):
    async def ask(mode="shared", question=None, api_key=None):
        async with TesseraClient(server.url, api_key) as client:
            return await client.ask(question or make_question(), mode, OPTIONS)

    return ask


@pytest.fixture
def describe(server):
    async def describe(url=None, api_key=None):
        async with TesseraClient(url or server.url, api_key) as client:
            return await client.describe()

    return describe


@pytest.fixture
def judge(server):
    """Has the same client judge each right answer."""

    async def judge(*answers, mode="shared"):
        async with TesseraClient(server.url) as client:
            questions = [make_question(answers=(answer,) if answer else ()) for answer in answers]
            return [await client.judge(question, mode, OPTIONS) for question in questions]

    return judge


@pytest.mark.parametrize(
    ("mode", "cache"),
    [
        ("full", {"mode": "full"}),
        ("shared", {"position_strategy": "shared", "recompute": 0.0, "reread": 0.0}),
        ("offset+15%", {"position_strategy": "offset", "recompute": 0.15, "reread": 0.0}),
        ("offset~25%", {"position_strategy": "offset", "recompute": 0.0, "reread": 0.25}),
    ],
)
async def test_what_is_sent(server, ask, mode, cache):
    chunks = (Document("One.", title="A"), Document("Two."))
    await ask(mode, make_question(system="Answer.", chunks=chunks))
    (body,) = server.bodies(RAG)
    documents = [{"text": "One.", "title": "A"}, {"text": "Two."}]
    asked = {"system": "Answer.", "chunks": documents, "question": "Where is Falcon?", "cache": cache}
    assert body == {"model": "m", **asked, "stream": True, "temperature": 0, "max_tokens": 32}
    RagChatRequest(**body)


# The log probability of a right answer


async def test_it_is_that_of_its_tokens_behind_the_words_before(server, judge):
    server.forces = True
    first, again, other = await judge("Riga", "Riga", "No")
    assert (first.logprob, again.logprob, other.logprob) == (-5 / 4, -5 / 4, -3 / 4)  # each with a space before it
    said = f"{LEAD} Riga"
    assert first.top_logprobs == tuple({f"token_id:{ord(letter)}": -0.25} for letter in said)
    body, _, last = server.forced()
    assert body["vllm_xargs"] == {FORCED_TOKENS: [ord(letter) for letter in said]}
    assert (body["max_tokens"], body["ignore_eos"], body["top_logprobs"]) == (len(said), True, TOP)
    assert body["return_tokens_as_token_ids"]
    assert last["max_tokens"] == len(f"{LEAD} No")
    tokenized = [body["prompt"] for body in server.bodies("/tokenize")]
    assert tokenized == [LEAD, said, f"{LEAD} No"]  # each once


async def test_refusals_are_judged_where_no_chunk_has_the_answer_and_answers_in_another_mode_not(server, judge):
    server.forces = True
    (judged,) = await judge("")
    assert judged.logprob == -len("No idea") / 4
    server.forces, server.reply = True, lambda _: Reply("", make_report("full", reason="capacity"))
    server.requests.clear()
    assert await judge("Riga", "Riga") == [None, None]
    assert len(server.forced()) == 2


async def test_a_server_that_cannot_tell_it_is_not_asked_again(server, judge):
    assert await judge("Riga", "Riga") == [None, None]  # it doesn't force tokens
    assert len(server.forced()) == 1
    server.refuse_as_vllm(400, "Requested sample logprobs of 20, which is greater than max allowed: 5")
    assert await judge("Riga") == [None]
    server.refuse(404, {"detail": "Not Found"}, "/tokenize")
    assert await judge("Riga") == [None]
    assert len(server.forced()) == 2


# Documents ahead of time


async def test_documents_are_sent_ahead_of_time(server):
    async with TesseraClient(server.url) as client:
        lines = [line async for line in client.ingest("Answer.", [Document("One.", title="A"), Document("Two.")])]
        (body,) = server.bodies(CHUNKS)
        assert body == {"system": "Answer.", "chunks": [{"text": "One.", "title": "A"}, {"text": "Two."}]}
        assert [line.get("status") for line in lines] == ["filled", "filled", None]
        server.refuse(409, {"error": {"message": "the chunk cache is off: why"}}, path=CHUNKS)
        with pytest.raises(ServerError, match="the chunk cache is off: why"):
            [line async for line in client.ingest("", [Document("One.")])]


# Answers


async def test_the_answer_with_its_times_and_report(server, ask):
    report = make_report("shared", "hit", "filled", reused=90)
    server.reply = lambda _: Reply("In Riga.", report)
    answer = await ask()
    assert (answer.text, answer.cache) == ("In Riga.", report)
    assert 0 < answer.ttft_s < answer.total_s


@pytest.mark.parametrize("text", ["", "東京 – é", "a\u2028b\u0085c\x0bd", "data: [DONE]", "x\n\ny"])
async def test_any_text_comes_through(server, ask, text):
    server.reply = lambda _: Reply(text, make_report("shared"))
    answer = await ask()
    assert answer.text == text
    assert (answer.ttft_s is None) == (not text)  # an empty answer has no first token


async def test_a_connection_lost_midway(server, ask):
    async def crash():
        raise RuntimeError

    server.before = crash
    with pytest.raises(ServerError, match=rf"lost the server at {server.url}: ") as raised:
        await ask()
    assert not isinstance(raised.value, SetupError | RefusedError)


@pytest.mark.parametrize(
    ("reply", "kind", "words"),
    [
        (Reply("In Riga."), ServerError, r"ended before its cache report"),
        (Reply("In", None, {"message": "engine died", "code": 500}), ServerError, r"HTTP 500: engine died$"),
        (Reply("", None, {"message": "too long", "code": 400}), RefusedError, r"^too long$"),
    ],
)
async def test_streams_that_are_no_answer(server, ask, reply, kind, words):
    server.reply = lambda _: reply
    with pytest.raises(kind, match=words):
        await ask()


@pytest.mark.parametrize(
    ("status", "answer", "kind", "words"),
    [
        *((status, {"error": {"message": "9 tokens"}}, RefusedError, r"^9 tokens$") for status in (400, 413, 422)),
        (400, {"error": {"message": "no chat template"}}, SetupError, r"no chat template .* --chat-template FILE\)$"),
        (500, "oops", ServerError, r"HTTP 500: no message$"),
        (404, {"detail": "Not Found"}, SetupError, rf"is not a Tessera server: it has no {RAG}$"),
        (404, {"error": {"message": "The model does not exist."}}, SetupError, r": The model does not exist\.$"),
        (401, {"error": "Unauthorized"}, SetupError, r"wants another API key \(--api-key\): Unauthorized"),
    ],
    ids=str,
)
async def test_failures_in_the_servers_words(server, ask, status, answer, kind, words):
    server.refuse(status, answer)
    with pytest.raises(ServerError, match=words) as raised:
        await ask()
    assert type(raised.value) is kind


# What a server is


async def test_a_server_is_described_and_gets_the_api_key_if_there_is_one(server, ask, describe, unused_tcp_port):
    await ask(api_key="secret")
    assert await describe(f"{server.url}/", "secret") == ServerInfo("fake", "0.32.0", None, "full")
    assert server.authorizations == {"Bearer secret"}
    server.off = "ALiBi"
    assert await describe() == ServerInfo("fake", "0.32.0", "ALiBi", "full")
    with pytest.raises(SetupError, match=rf"^no server at http://127.0.0.1:{unused_tcp_port}: "):
        await describe(f"http://127.0.0.1:{unused_tcp_port}")


@pytest.mark.parametrize(
    ("status", "stats", "words"),
    [(404, {"detail": "Not Found"}, "has no /v1/cache/stats$"), *((200, each, "") for each in ("hello", [], {}, None))],
)
async def test_another_server_is_not_tessera(server, describe, status, stats, words):
    server.refuse(status, stats, "/v1/cache/stats")
    with pytest.raises(SetupError, match=f"is not a Tessera server: .*{words}"):
        await describe()
