# SPDX-License-Identifier: Apache-2.0
"""One request to a server: its body, its stream, and messages of failures."""

import pytest

from app.documents.document import Document
from measuring.kit.client import RefusedError, ServerError, SetupError
from measuring.quality.client import FORCED_TOKENS, LEAD, AskOptions, ServerInfo, TesseraClient
from measuring.quality.divergence import TOP
from tests.measuring.quality.helpers import TEMPLATE_ERROR, Reply, make_question, make_report

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


@pytest.mark.parametrize(
    ("mode", "cache"),
    [
        ("full", {"mode": "full"}),
        ("shared", {"position_strategy": "shared", "recompute": 0.0}),
        ("parallel", {"position_strategy": "parallel", "recompute": 0.0}),
        ("offset", {"position_strategy": "offset", "recompute": 0.0}),
        ("offset+15%", {"position_strategy": "offset", "recompute": 0.15}),
    ],
)
async def test_what_is_sent(server, ask, mode, cache):
    chunks = (Document("One.", title="A"), Document("Two."))
    await ask(mode, make_question(system="Answer.", chunks=chunks))
    assert server.requests == [
        {
            "model": "m",
            "system": "Answer.",
            "chunks": [{"text": "One.", "title": "A"}, {"text": "Two."}],
            "question": "Where is Falcon?",
            "cache": cache,
            "stream": True,
            "temperature": 0,
            "max_tokens": 32,
        }
    ]


@pytest.fixture
def logprob(server):
    """Has the same client judge each right answer; returns their log probabilities."""

    async def logprob(*answers, mode="shared"):
        async with TesseraClient(server.url) as client:
            questions = [make_question(answers=(answer,) if answer else ()) for answer in answers]
            judged = [await client.judge(question, mode, OPTIONS) for question in questions]
            return [each and each.logprob for each in judged]

    return logprob


async def test_the_log_probability_of_an_answer_is_that_of_its_tokens(server, logprob):
    server.forces = True
    assert await logprob("Riga", "Riga", "No") == [-5 / 4, -5 / 4, -3 / 4]  # each with a space before it
    said, (first, _, last) = f"{LEAD} Riga", server.forced
    assert first["vllm_xargs"] == {FORCED_TOKENS: [ord(letter) for letter in said]}
    assert (first["stream"], first["max_tokens"], first["ignore_eos"]) == (False, len(said), True)
    assert last["max_tokens"] == len(f"{LEAD} No")
    assert server.tokenized == [LEAD, said, f"{LEAD} No"]  # each once


async def test_where_no_chunk_has_the_answer_the_refusal_is_judged_and_nothing_stands_before_it(server, logprob):
    server.forces = True
    assert await logprob("") == [-len("No idea") / 4]
    assert server.tokenized == ["No idea"]


async def test_predictions_are_kept_for_each_token_with_those_of_the_words_before(server):
    server.forces = True
    async with TesseraClient(server.url) as client:
        judged = await client.judge(make_question(), "shared", OPTIONS)
    assert judged.top_logprobs == tuple({f"token_id:{ord(letter)}": -0.25} for letter in f"{LEAD} Riga")
    assert (server.forced[0]["top_logprobs"], server.forced[0]["return_tokens_as_token_ids"]) == (TOP, True)


async def test_an_answer_in_another_mode_has_no_log_probability(server, logprob):
    server.forces, server.reply = True, lambda _: Reply("", make_report("full", reason="capacity"))
    assert await logprob("Riga", "Riga") == [None, None]
    assert len(server.forced) == 2


async def test_a_server_that_tells_fewer_likely_tokens_is_not_judged(server, logprob):
    server.refuse_as_vllm(400, "Requested sample logprobs of 20, which is greater than max allowed: 5")
    assert await logprob("Riga") == [None]


async def test_a_server_that_does_not_force_tokens_is_asked_once(server, logprob):
    assert await logprob("Riga", "Riga") == [None, None]
    assert len(server.forced) == 1


async def test_a_server_that_tells_no_tokens_is_not_asked(server, logprob):
    server.refuse(404, {"detail": "Not Found"}, "/tokenize")
    assert await logprob("Riga") == [None]
    assert server.forced == []


async def test_what_is_sent_is_a_valid_request(server, ask):
    rag = pytest.importorskip("app.documents.rag_request")
    await ask("offset", make_question(system="Answer."))
    request = rag.RagChatRequest(**server.requests[0])
    assert request.cache.position_strategy == "offset"


async def test_documents_are_sent_ahead_of_time(server):
    async with TesseraClient(server.url) as client:
        lines = [line async for line in client.ingest("Answer.", [Document("One.", title="A"), Document("Two.")])]
    assert server.requests == [{"system": "Answer.", "chunks": [{"text": "One.", "title": "A"}, {"text": "Two."}]}]
    assert [line.get("status") for line in lines] == ["filled", "filled", None]


async def test_a_refused_ingest_is_an_error(server):
    server.refuse(409, {"error": {"message": "the chunk cache is off: why"}}, path="/v1/rag/chunks")
    async with TesseraClient(server.url) as client:
        with pytest.raises(ServerError, match="the chunk cache is off: why"):
            [line async for line in client.ingest("", [Document("One.")])]


async def test_the_answer_with_its_times_and_report(server, ask):
    report = make_report("shared", "hit", "filled", reused=90)
    server.reply = lambda _: Reply("In Riga.", report)
    answer = await ask()
    assert (answer.text, answer.cache) == ("In Riga.", report)
    assert 0 < answer.ttft_s < answer.total_s


async def test_an_empty_answer_has_no_first_token(server, ask):
    server.reply = lambda _: Reply("", make_report("shared"))
    answer = await ask()
    assert (answer.text, answer.ttft_s) == ("", None)


@pytest.mark.parametrize("text", ["東京 – é", "a\u2028b\u0085c\x0bd", "data: [DONE]", "x\n\ny"])
async def test_any_text_comes_through(server, ask, text):
    server.reply = lambda _: Reply(text, make_report("shared"))
    assert (await ask()).text == text


async def test_an_answer_in_another_mode_says_so(server, ask):
    server.reply = lambda _: Reply("In Riga.", make_report("full", reason="the chunk cache is off"))
    answer = await ask("shared")
    assert (answer.cache["mode"], answer.cache["reason"]) == ("full", "the chunk cache is off")


async def test_an_answer_without_a_report_is_an_error(server, ask):
    server.reply = lambda _: Reply("In Riga.", None)
    with pytest.raises(ServerError, match=r"ended before its cache report"):
        await ask()


async def test_a_connection_lost_midway(server, ask):
    def crash():
        raise RuntimeError

    server.reply = lambda _: Reply("In Riga.", make_report("shared"), before=crash)
    with pytest.raises(ServerError, match=rf"lost the server at {server.url}: ") as raised:
        await ask()
    assert not isinstance(raised.value, SetupError | RefusedError)


async def test_an_error_in_the_stream(server, ask):
    server.reply = lambda _: Reply("In", None, error={"message": "engine died", "type": "x", "code": 500})
    with pytest.raises(ServerError, match=r"HTTP 500: engine died$"):
        await ask()


async def test_a_request_refused_in_the_stream(server, ask):
    server.reply = lambda _: Reply("", None, error={"message": "too long", "type": "x", "code": 400})
    with pytest.raises(RefusedError, match=r"^too long$"):
        await ask()


@pytest.mark.parametrize("status", [400, 413, 422])
async def test_a_refused_request_has_the_servers_words(server, ask, status):
    server.refuse_as_vllm(status, "your prompt has 9 tokens")
    with pytest.raises(RefusedError, match=r"^your prompt has 9 tokens$"):
        await ask()


async def test_a_missing_chat_template_comes_with_advice(server, ask):
    server.refuse_as_vllm(400, TEMPLATE_ERROR)
    with pytest.raises(SetupError, match=r"must provide a chat template .* --chat-template FILE\)$"):
        await ask()


async def test_a_failing_server(server, ask):
    server.refuse(500, "oops")
    with pytest.raises(ServerError, match=r"HTTP 500: no message$") as raised:
        await ask()
    assert not isinstance(raised.value, SetupError | RefusedError)


async def test_a_server_without_the_endpoint_is_not_tessera(server, ask):
    server.refuse(404, {"detail": "Not Found"})
    with pytest.raises(SetupError, match=r"is not a Tessera server: it has no /v1/rag/chat$"):
        await ask()


async def test_another_404_is_not_taken_for_that(server, ask):
    server.refuse_as_vllm(404, "The model `x` does not exist.")
    with pytest.raises(SetupError, match=r": The model `x` does not exist\.$"):
        await ask()


async def test_a_wanted_api_key(server, ask):
    server.refuse(401, {"error": "Unauthorized"})
    with pytest.raises(SetupError, match=r"wants another API key \(--api-key\): Unauthorized"):
        await ask()


async def test_the_api_key_is_sent(server, ask, describe):
    await ask(api_key="secret")
    await describe(api_key="secret")
    assert {headers.get("authorization") for headers in server.headers} == {"Bearer secret"}


async def test_a_server_is_described(server, describe):
    assert await describe(f"{server.url}/") == ServerInfo("m", "0.32.0", None, "full")
    server.stats = {"enabled": False, "reason": "ALiBi"}
    assert await describe() == ServerInfo("m", "0.32.0", "ALiBi", "full")


async def test_no_server(describe, unused_tcp_port):
    with pytest.raises(SetupError, match=rf"^no server at http://127.0.0.1:{unused_tcp_port}: "):
        await describe(f"http://127.0.0.1:{unused_tcp_port}")


async def test_stock_vllm_is_not_tessera(server, describe):
    server.refuse(404, {"detail": "Not Found"}, "/v1/cache/stats")
    with pytest.raises(SetupError, match=r"is not a Tessera server: it has no /v1/cache/stats$"):
        await describe()


@pytest.mark.parametrize("stats", ["hello", [], {}, None])
async def test_a_server_that_answers_anything_is_not_tessera(server, describe, stats):
    server.stats = stats
    with pytest.raises(SetupError, match="is not a Tessera server"):
        await describe()
