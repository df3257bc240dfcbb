# SPDX-License-Identifier: Apache-2.0
"""The renderer tokenizes prompts with marks by segment and passes others to vLLM's renderer."""

from types import SimpleNamespace

import pytest
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams

from app.documents.document import CONTEXT_TOKENS, Document
from app.prompt.marks import Marks
from app.prompt.segments import SegmentRenderer, _check_length
from cache.errors import FullAttentionError
from cache.positions.layout import Chunk, ChunkedPrompt, pack, packed_length, unpack
from cache.report import FoundDocument
from engine_ext.client.defects import DefectError
from engine_ext.client.request import REQUEST_KEY, CacheOptions, Ticket, resolve
from engine_ext.wire.vllm_compat import ChatParams
from tests.app.helpers import CONTROL, make_tokenizer

CHUNKS = (Chunk(pack((1,) * 7)), Chunk(pack((1,) * 8), document=1), Chunk(pack((1,) * 3), document=1, part=(2, 2)))
PROMPT = ChunkedPrompt((1,) * 5, CHUNKS, (1,) * 3)


def limits(total=100, output=None, truncate=None):
    given = {"max_total_tokens": total, "max_output_tokens": output, "truncate_prompt_tokens": truncate}
    return SimpleNamespace(**given, add_special_tokens=False)


SEGMENTS = "system: 5, chunk 0: 7, chunk 1: 11, question: 3"


@pytest.mark.parametrize(
    ("prompt", "tok_params", "parameter", "message"),
    [
        (PROMPT, limits(26), "chunks", rf"the prompt has 26 tokens \({SEGMENTS}\), .* context length is 26"),
        (None, limits(20), "chunks", "the prompt has 26 tokens, the model's maximum context length is 20"),
        (PROMPT, limits(35, 10), "max_tokens", rf"max_tokens=10 does not fit: .* 26 tokens \({SEGMENTS}\)"),
        (PROMPT, limits(truncate=-1), "truncate_prompt_tokens", "can't be truncated"),
    ],
)
def test_other_prompts_are_refused_with_the_tokens_of_each_segment(prompt, tok_params, parameter, message):
    with pytest.raises(VLLMValidationError, match=message) as raised:
        _check_length(prompt, 26, tok_params)
    assert raised.value.parameter == parameter
    for enough in (limits(27), limits(27, 1), limits(None, 5), limits(36, 10)):
        _check_length(PROMPT, 26, enough)


class FakeRenderer:
    """Fake of vLLM's renderer; ``template`` formats a conversation's contents."""

    def __init__(self, template="<s>{}</s>"):
        self.template = template
        self.tokenizer = make_tokenizer()
        self.default_chat_tok_params = self.default_cmpl_tok_params = limits()
        self.media = {}

    def get_tokenizer(self):
        return self.tokenizer

    async def render_messages_async(self, conversation, params):
        contents = (message["content"] for message in conversation)
        texts = (each if isinstance(each, str) else "".join(part["text"] for part in each) for each in contents)
        text = self.template.replace("{}", "".join(texts))
        return "rendered", {"prompt": text, **self.media}

    async def render_chat_async(self, *args, **kwargs):
        return "passed", args, kwargs

    render_cmpl_async = render_chat_async


DOCUMENTS = [Document("one </s>", "d1"), Document("two")]
PLAIN = CacheOptions()


@pytest.fixture
def marks():
    return Marks()


async def render_chat(
    marks, vllms=None, documents=DOCUMENTS, cache=PLAIN, max_chunk_tokens=100, block_tokens=None, **given
):
    """The engine's input for these documents and a question, and its prompt."""
    renderer = SegmentRenderer(vllms or FakeRenderer(), marks, max_chunk_tokens, block_tokens)
    ticket = Ticket(cache, tuple(document.id for document in documents))
    with marks.issue(ticket, documents) as marked:
        chat = [[{"role": "user", "content": f"{marked}why?"}]]
        rendered, (engine_input,) = await renderer.render_chat_async(chat, ChatParams(), **given)
    assert rendered == ["rendered"]
    return engine_input, engine_input[REQUEST_KEY].prompt


async def test_a_marked_chat_is_tokenized_segment_by_segment(marks):
    engine_input, prompt = await render_chat(marks, prompt_extras={"cache_salt": "salt"})
    tokenizer = make_tokenizer()
    assert engine_input[REQUEST_KEY].ticket.chunk_ids == ("d1", None)
    assert prompt.system == tuple(tokenizer.encode("<s>"))
    assert prompt.question == tuple(tokenizer.encode("why?</s>"))
    assert [chunk.id for chunk in prompt.chunks] == ["d1", None]
    assert prompt.chunks[1].token_ids == tuple(tokenizer.encode("two\n\n"))
    assert prompt.opening is None
    assert engine_input["prompt_token_ids"] == prompt.token_ids
    assert engine_input["prompt"] == "<s>one </s>\n\ntwo\n\nwhy?</s>"
    assert engine_input["cache_salt"] == "salt"
    with pytest.raises(VLLMValidationError, match="chunk 0: 10, chunk 1: 5, question: 5"):
        await render_chat(marks, tok_params=limits(10))


async def test_a_failure_of_ours_is_not_the_clients(marks, monkeypatch):
    monkeypatch.setattr(SegmentRenderer, "_tokenize", lambda *_: unpack(None))
    with pytest.raises(DefectError):
        await render_chat(marks)


@pytest.mark.parametrize("length", [1000, 100_000])
async def test_what_is_too_long_by_its_characters_is_not_tokenized(marks, monkeypatch, length):
    """No token has more than the longest one's; and so says vLLM of prompts without documents."""
    monkeypatch.setattr(SegmentRenderer, "_tokenize", None)
    with pytest.raises(VLLMValidationError, match="context length of 10 tokens can't hold more than") as raised:
        await render_chat(marks, documents=[Document("x" * length)] * 2, tok_params=limits(10))
    assert raised.value.parameter == "chunks"


def test_a_document_that_no_prompt_can_hold_is_not_computed_ahead(marks):
    renderer = SegmentRenderer(FakeRenderer(), marks, 100, max_prompt_tokens=10)
    most = 10 * max(map(len, make_tokenizer().get_vocab()))
    renderer.check_documents([Document("x" * most)] * 9)
    with pytest.raises(VLLMValidationError, match="can't hold more than") as raised:
        renderer.check_documents([Document("x"), Document("x" * (most + 1))])
    assert raised.value.parameter == "chunks.1.text"


def test_only_the_end_of_a_long_context_is_tokenized(marks, monkeypatch):
    renderer, lengths = SegmentRenderer(FakeRenderer(), marks, 100), []
    pack_document = renderer._tokenizer.pack_document
    monkeypatch.setattr(
        renderer._tokenizer, "pack_document", lambda *given: lengths.append(len(given[0])) or pack_document(*given)
    )
    most = CONTEXT_TOKENS * max(map(len, make_tokenizer().get_vocab()))
    (whole,) = renderer.chunks(Document("one", context="x" * 3 * most), 0, "default")
    assert max(lengths) == most
    assert packed_length(whole.context) == CONTEXT_TOKENS
    (end,) = renderer.chunks(Document("one", context="x" * most), 0, "default")
    assert whole == end


async def test_segments_before_the_question_are_filled_up_to_whole_blocks(marks):
    documents = [Document("one", "d1"), Document("four"), Document("x" * 14)]
    _, prompt = await render_chat(marks, documents=documents, max_chunk_tokens=10, block_tokens=8)
    tokenizer = make_tokenizer()
    (filler,) = tokenizer.encode("\n")
    for tokens in (prompt.system, *(chunk.token_ids for chunk in prompt.chunks)):
        assert len(tokens) % 8 == 0
        assert len([token for token in tokens if token != filler]) > len(tokens) - 8
    assert prompt.question == tuple(tokenizer.encode("why?</s>"))
    assert [(chunk.document, chunk.part) for chunk in prompt.chunks] == [(0, None), (1, None), (2, (1, 2)), (2, (2, 2))]


async def test_control_text_is_a_control_token_in_the_template_only(marks):
    _, prompt = await render_chat(marks)
    tokenizer = make_tokenizer()
    control = {tokenizer.convert_tokens_to_ids(token) for token in CONTROL}
    assert control.isdisjoint(prompt.chunks[0].token_ids)
    assert tokenizer.decode(prompt.chunks[0].token_ids) == "one </s>\n\n"
    assert tokenizer.convert_tokens_to_ids("</s>") in prompt.question


async def test_without_chunks_the_prompt_is_tokenized_as_a_whole(marks):
    engine_input, prompt = await render_chat(marks, documents=[])
    assert prompt is None
    assert engine_input["prompt_token_ids"] == make_tokenizer().encode("<s>why?</s>")


@pytest.mark.parametrize("template", ["{}{}", "no documents"])
async def test_a_template_that_breaks_marks_is_an_error_that_says_what_is_needed(template, marks):
    with pytest.raises(VLLMValidationError, match="documents need a chat template that prints the user's message once"):
        await render_chat(marks, FakeRenderer(template))


class RendererOfMedia(FakeRenderer):
    """Has an image in each prompt, and tells the conversations that vLLM's own rendering gets."""

    def __init__(self):
        super().__init__()
        self.media = {"multi_modal_data": {"image": []}}
        self.conversations = []

    async def render_chat_async(self, conversations, *args, **kwargs):
        self.conversations += conversations
        return ["rendered"], [{"prompt_token_ids": [1, 2], "mm_kwargs": "image"}]


async def test_documents_beside_images_are_answered_in_full_attention(marks):
    renderer = RendererOfMedia()
    engine_input, _ = await render_chat(marks, renderer)
    assert renderer.conversations == [[{"role": "user", "content": "one </s>\n\ntwo\n\nwhy?"}]]
    request = engine_input.pop(REQUEST_KEY)
    assert engine_input == {"prompt_token_ids": [1, 2], "mm_kwargs": "image"}
    assert (request.prompt, request.refusal) == (None, ("media", "documents beside images, audio or video"))
    with pytest.raises(FullAttentionError, match="documents beside images, audio or video"):
        resolve(request, None, SamplingParams()).chunked()


ONE, TWO = "The bridge is long.", "The mill is old."
FOUND = tuple(FoundDocument(by="app", at="messages.0.content", start=0, end=1) for _ in range(2))


async def render_found(
    marks, vllms=None, max_chunk_tokens=100, parts=("<1>", "</1>\n<2>", "</2> why?"), as_parts=False
):
    """The engine's input for a prompt in which two documents were found, and its prompt."""
    ticket = Ticket(CacheOptions(scope="isolated"), (None, None), found=FOUND, leaves_scope=True)
    renderer = SegmentRenderer(vllms or FakeRenderer(), marks, max_chunk_tokens)
    with marks.issue_within(ticket, 2) as (first, behind_first, second, behind_second):
        text = f"{parts[0]}{first}{ONE}{behind_first}{parts[1]}{second}{TWO}{behind_second}{parts[2]}"
        content = [{"type": "text", "text": text}] if as_parts else text
        _, (engine_input,) = await renderer.render_chat_async([[{"role": "user", "content": content}]], ChatParams())
    return engine_input, engine_input[REQUEST_KEY].prompt


async def test_documents_found_in_a_prompt_keep_its_text(marks):
    engine_input, prompt = await render_found(marks)
    tokenizer, text = make_tokenizer(), f"<s><1>{ONE}</1>\n<2>{TWO}</2> why?</s>"
    assert engine_input["prompt"] == tokenizer.decode(engine_input["prompt_token_ids"]) == text
    assert [chunk.is_text for chunk in prompt.chunks] == [False, True, False]
    assert [prompt.chunks[index].document for index in prompt.documents] == [0, 1]
    assert prompt.opening == tuple(tokenizer.encode("<s>"))


async def test_a_document_that_was_found_has_the_key_of_one_that_was_given(marks):
    (given,) = SegmentRenderer(FakeRenderer(), marks, 100).chunks(Document(ONE), 0, "default")
    for parts in (("", "", ""), ("a", "\n\n", "\n\nb"), ("a ", " b", "c")):
        _, prompt = await render_found(marks, parts=parts)
        found = prompt.chunks[0]
        assert found.packed == given.packed
        assert found.token_ids == given.token_ids[: found.num_tokens]
        assert found.num_tokens >= given.num_tokens - 3


async def test_a_long_document_that_was_found_is_several_chunks(marks):
    engine_input, prompt = await render_found(marks, max_chunk_tokens=4)
    assert all(chunk.num_tokens <= 4 for chunk in prompt.chunks)
    assert make_tokenizer().decode(engine_input["prompt_token_ids"]) == engine_input["prompt"]
    parts = [chunk.part for chunk in prompt.chunks if not chunk.is_text and chunk.document == 0]
    assert [number for number, _ in parts] == list(range(1, len(parts) + 1))


async def test_a_prompt_that_ends_with_a_document_leaves_a_token_to_compute(marks):
    engine_input, prompt = await render_found(marks, FakeRenderer("<s>{}"), parts=("", " ", ""))
    assert len(prompt.question) >= 1
    assert make_tokenizer().decode(engine_input["prompt_token_ids"]) == f"<s>{ONE} {TWO}"


@pytest.mark.parametrize("template", ["{}{}", "no documents"])
async def test_a_template_that_breaks_marks_of_found_documents_gets_its_prompt_without(template, marks):
    renderer = RendererOfMedia()
    renderer.media, renderer.template = {}, template
    engine_input, _ = await render_found(marks, renderer, as_parts=True)
    assert renderer.conversations[0][0]["content"][0]["text"] == f"<1>{ONE}</1>\n<2>{TWO}</2> why?"
    kind, words = engine_input[REQUEST_KEY].refusal
    assert (kind, "chat template" in words) == ("template", True)


async def test_everything_else_is_vllms_renderers(marks):
    vllms = FakeRenderer()
    renderer = SegmentRenderer(vllms, marks, 100)
    assert renderer.tokenizer is vllms.tokenizer
    harmony = SimpleNamespace(content="x")
    chat = [[{"role": "user", "content": f"[tessera-{'0' * 32}-question]"}, {"role": "tool", "content": None}, harmony]]
    options = {"prompt_extras": {"a": 1}, "other": 2}
    assert await renderer.render_chat_async(chat, "p", "t", **options) == ("passed", (chat, "p", "t"), options)
    prompts = [{"prompt": "why?"}, {"prompt_token_ids": [1]}, "why?"]
    assert await renderer.render_cmpl_async(prompts, "t", **options) == ("passed", (prompts, "t"), options)


async def test_a_marked_completion_is_tokenized_segment_by_segment(marks):
    renderer = SegmentRenderer(FakeRenderer(), marks, 100)
    with marks.issue(Ticket(PLAIN, ("d1", None)), DOCUMENTS) as marked:
        (engine_input,) = await renderer.render_cmpl_async([{"prompt": f"<s>sys{marked}why?"}])
    prompt, tokenizer = engine_input[REQUEST_KEY].prompt, make_tokenizer()
    assert prompt.system == tuple(tokenizer.encode("<s>sys"))
    assert prompt.question == tuple(tokenizer.encode("why?"))
    assert tokenizer.decode(engine_input["prompt_token_ids"]) == "<s>sysone </s>\n\ntwo\n\nwhy?"


async def test_a_document_longer_than_a_chunk_may_be_is_several(marks):
    engine_input, prompt = await render_chat(marks, max_chunk_tokens=4)
    pieces = [chunk for chunk in prompt.chunks if chunk.document == 1]
    assert [token for chunk in pieces for token in chunk.token_ids] == make_tokenizer().encode("two\n\n")
    assert [(chunk.num_tokens, chunk.part, chunk.id) for chunk in pieces] == [(4, (1, 2), None), (1, (2, 2), None)]
    assert {chunk.id for chunk in prompt.chunks if chunk.document == 0} == {"d1"}
    assert engine_input["prompt"] == "<s>one </s>\n\ntwo\n\nwhy?</s>"


async def test_scope_isolated_brings_the_opening_of_a_lone_user_message(marks):
    _, prompt = await render_chat(marks, FakeRenderer("<s>hello {}</s>"), cache=CacheOptions(scope="isolated"))
    assert prompt.opening == tuple(make_tokenizer().encode("<s>hello "))
