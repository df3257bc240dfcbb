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
from cache.positions.layout import Chunk, ChunkedPrompt, pack, packed_length
from cache.report import FoundDocument
from engine_ext.client.request import REQUEST_KEY, CacheOptions, Ticket, resolve
from engine_ext.wire.vllm_compat import ChatParams
from tests.app.helpers import CONTROL, make_tokenizer

PROMPT = ChunkedPrompt(
    (1,) * 5,
    (
        Chunk(pack((1,) * 7)),
        Chunk(pack((1,) * 8), document=1),
        Chunk(pack((1,) * 3), document=1, part=(2, 2)),
    ),
    (1,) * 3,
)


def limits(total=100, output=None, truncate=None, special=False):
    return SimpleNamespace(
        max_total_tokens=total,
        max_output_tokens=output,
        truncate_prompt_tokens=truncate,
        add_special_tokens=special,
    )


@pytest.mark.parametrize("tok_params", [limits(27), limits(27, 1), limits(None), limits(None, 5), limits(36, 10)])
def test_a_prompt_that_leaves_room_for_the_answer_passes(tok_params):
    _check_length(PROMPT, 26, tok_params)


@pytest.mark.parametrize("total", [26, 20])
def test_a_prompt_that_is_too_long_names_the_tokens_of_each_segment(total):
    with pytest.raises(VLLMValidationError) as raised:
        _check_length(PROMPT, 26, limits(total))
    segments = "system: 5, chunk 0: 7, chunk 1: 11, question: 3"
    assert str(raised.value).startswith(
        f"the prompt has 26 tokens ({segments}), the model's maximum context length is {total}"
    )
    assert (raised.value.parameter, raised.value.value) == ("chunks", 26)


@pytest.mark.parametrize("total", [27, 35])
def test_an_answer_that_is_too_long_names_max_tokens(total):
    with pytest.raises(VLLMValidationError) as raised:
        _check_length(PROMPT, 26, limits(total, output=10))
    segments = "system: 5, chunk 0: 7, chunk 1: 11, question: 3"
    assert str(raised.value).startswith(f"max_tokens=10 does not fit: the prompt has 26 tokens ({segments})")
    assert (raised.value.parameter, raised.value.value) == ("max_tokens", 10)


def test_a_prompt_without_chunks_names_no_segments():
    with pytest.raises(VLLMValidationError, match="the prompt has 26 tokens, the model's maximum"):
        _check_length(None, 26, limits(20))


@pytest.mark.parametrize("truncate", [-1, 5, 1000])
def test_truncation_is_refused(truncate):
    with pytest.raises(VLLMValidationError, match="can't be truncated") as raised:
        _check_length(PROMPT, 26, limits(truncate=truncate))
    assert raised.value.parameter == "truncate_prompt_tokens"


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

    async def render_cmpl_async(self, *args, **kwargs):
        return "passed", args, kwargs


DOCUMENTS = [Document("one </s>", "d1"), Document("two")]
PLAIN = CacheOptions()
TICKET = Ticket(PLAIN, ("d1", None))


@pytest.fixture
def marks():
    return Marks()


async def render_chat(marks, vllms=None, documents=DOCUMENTS, max_chunk_tokens=100, cache=PLAIN, **kwargs):
    renderer = SegmentRenderer(vllms or FakeRenderer(), marks, max_chunk_tokens)
    ticket = Ticket(cache, tuple(document.id for document in documents))
    with marks.issue(ticket, documents) as marked:
        return await renderer.render_chat_async(
            [[{"role": "user", "content": f"{marked}why?"}]], ChatParams(), **kwargs
        )


async def test_a_marked_chat_is_tokenized_segment_by_segment(marks):
    (rendered,), (engine_input,) = await render_chat(marks, prompt_extras={"cache_salt": "salt"})
    request, encode = engine_input[REQUEST_KEY], make_tokenizer().encode
    assert rendered == "rendered"
    assert request.ticket.chunk_ids == ("d1", None)
    assert request.prompt.system == tuple(encode("<s>"))
    assert request.prompt.question == tuple(encode("why?</s>"))
    assert [chunk.id for chunk in request.prompt.chunks] == ["d1", None]
    assert request.prompt.chunks[1].token_ids == tuple(encode("two\n\n"))
    assert engine_input["prompt_token_ids"] == request.prompt.token_ids
    assert engine_input["prompt"] == "<s>one </s>\n\ntwo\n\nwhy?</s>"
    assert engine_input["cache_salt"] == "salt"


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
    ticket, documents = (
        Ticket(PLAIN, ("d1", None, None)),
        [Document("one", "d1"), Document("four"), Document("x" * 14)],
    )
    with marks.issue(ticket, documents) as marked:
        renderer = SegmentRenderer(FakeRenderer(), marks, 10, block_tokens=8)
        _, (engine_input,) = await renderer.render_chat_async(
            [[{"role": "user", "content": f"{marked}why?"}]], ChatParams()
        )
    prompt, tokenizer = engine_input[REQUEST_KEY].prompt, make_tokenizer()
    (filler,) = tokenizer.encode("\n")
    for tokens in (prompt.system, *(chunk.token_ids for chunk in prompt.chunks)):
        assert len(tokens) % 8 == 0
        assert len([token for token in tokens if token != filler]) > len(tokens) - 8
    assert prompt.question == tuple(tokenizer.encode("why?</s>"))
    assert [(chunk.document, chunk.part) for chunk in prompt.chunks] == [(0, None), (1, None), (2, (1, 2)), (2, (2, 2))]


async def test_control_text_is_a_control_token_in_the_template_only(marks):
    _, (engine_input,) = await render_chat(marks)
    tokenizer = make_tokenizer()
    prompt = engine_input[REQUEST_KEY].prompt
    control = {tokenizer.convert_tokens_to_ids(token) for token in CONTROL}
    assert control.isdisjoint(prompt.chunks[0].token_ids)
    assert tokenizer.decode(prompt.chunks[0].token_ids) == "one </s>\n\n"
    assert tokenizer.convert_tokens_to_ids("</s>") in prompt.question


async def test_without_chunks_the_prompt_is_tokenized_as_a_whole(marks):
    _, (engine_input,) = await render_chat(marks, documents=[])
    assert engine_input[REQUEST_KEY].prompt is None
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
    _, (engine_input,) = await render_chat(marks, renderer)
    assert renderer.conversations == [[{"role": "user", "content": "one </s>\n\ntwo\n\nwhy?"}]]
    request = engine_input.pop(REQUEST_KEY)
    assert engine_input == {"prompt_token_ids": [1, 2], "mm_kwargs": "image"}
    assert (request.prompt, request.refusal) == (None, ("media", "documents beside images, audio or video"))
    resolved = resolve(request, None, SamplingParams())
    with pytest.raises(FullAttentionError, match="documents beside images, audio or video"):
        resolved.chunked()


ONE, TWO = "The bridge is long.", "The mill is old."
FOUND = tuple(FoundDocument(by="app", at="messages.0.content", start=0, end=1) for _ in range(2))


async def render_found(marks, vllms=None, renderer=None, parts=("<1>", "</1>\n<2>", "</2> why?"), **options):
    ticket = Ticket(CacheOptions(scope="isolated", **options), (None, None), found=FOUND, leaves_scope=True)
    renderer = renderer or SegmentRenderer(vllms or FakeRenderer(), marks, 100)
    with marks.issue_within(ticket, 2) as (first, behind_first, second, behind_second):
        text = f"{parts[0]}{first}{ONE}{behind_first}{parts[1]}{second}{TWO}{behind_second}{parts[2]}"
        _, (engine_input,) = await renderer.render_chat_async(
            [[{"role": "user", "content": [{"type": "text", "text": text}]}]]
            if isinstance(vllms, RendererOfMedia)
            else [[{"role": "user", "content": text}]],
            ChatParams(),
        )
    return engine_input


async def test_documents_found_in_a_prompt_keep_its_text(marks):
    engine_input = await render_found(marks)
    prompt, tokenizer = engine_input[REQUEST_KEY].prompt, make_tokenizer()
    text = f"<s><1>{ONE}</1>\n<2>{TWO}</2> why?</s>"
    assert engine_input["prompt"] == tokenizer.decode(engine_input["prompt_token_ids"]) == text
    assert [chunk.is_text for chunk in prompt.chunks] == [False, True, False]
    assert [prompt.chunks[index].document for index in prompt.documents] == [0, 1]
    assert prompt.opening == tuple(tokenizer.encode("<s>"))


async def test_a_document_that_was_found_has_the_key_of_one_that_was_given(marks):
    renderer = SegmentRenderer(FakeRenderer(), marks, 100)
    (given,) = renderer.chunks(Document(ONE), 0, "default")
    for parts in (("", "", ""), ("a", "\n\n", "\n\nb"), ("a ", " b", "c")):
        prompt = (await render_found(marks, renderer=renderer, parts=parts))[REQUEST_KEY].prompt
        found = prompt.chunks[0]
        assert found.packed == given.packed
        assert found.token_ids == given.token_ids[: found.num_tokens]
        assert found.num_tokens >= given.num_tokens - 3


async def test_a_long_document_that_was_found_is_several_chunks(marks):
    renderer = SegmentRenderer(FakeRenderer(), marks, 4)
    engine_input = await render_found(marks, renderer=renderer)
    prompt = engine_input[REQUEST_KEY].prompt
    assert all(chunk.num_tokens <= 4 for chunk in prompt.chunks)
    assert make_tokenizer().decode(engine_input["prompt_token_ids"]) == engine_input["prompt"]
    parts = [chunk.part for chunk in prompt.chunks if not chunk.is_text and chunk.document == 0]
    assert [number for number, _ in parts] == list(range(1, len(parts) + 1))


async def test_a_prompt_that_ends_with_a_document_leaves_a_token_to_compute(marks):
    engine_input = await render_found(marks, FakeRenderer("<s>{}"), parts=("", " ", ""))
    prompt = engine_input[REQUEST_KEY].prompt
    assert len(prompt.question) >= 1
    assert make_tokenizer().decode(engine_input["prompt_token_ids"]) == f"<s>{ONE} {TWO}"


@pytest.mark.parametrize("template", ["{}{}", "no documents"])
async def test_a_template_that_breaks_marks_of_found_documents_gets_its_prompt_without(template, marks):
    renderer = RendererOfMedia()
    renderer.media, renderer.template = {}, template
    engine_input = await render_found(marks, renderer)
    assert renderer.conversations[0][0]["content"][0]["text"] == f"<1>{ONE}</1>\n<2>{TWO}</2> why?"
    kind, words = engine_input[REQUEST_KEY].refusal
    assert (kind, "chat template" in words) == ("template", True)


async def test_lengths_are_checked(marks):
    with pytest.raises(VLLMValidationError, match="chunk 0: 10, chunk 1: 5, question: 5"):
        await render_chat(marks, tok_params=limits(10))


async def test_unmarked_prompts_go_to_vllms_renderer_unchanged(marks):
    renderer = SegmentRenderer(FakeRenderer(), marks, 100)
    chat = [[{"role": "user", "content": f"[tessera-{'0' * 32}-question]"}, {"role": "tool", "content": None}]]
    assert await renderer.render_chat_async(chat, "p", "t", prompt_extras={"a": 1}, other=2) == (
        "passed",
        (chat, "p", "t"),
        {"prompt_extras": {"a": 1}, "other": 2},
    )
    prompts = [{"prompt": "why?"}, {"prompt_token_ids": [1]}, "why?"]
    assert await renderer.render_cmpl_async(prompts, "t", prompt_extras=None, other=2) == (
        "passed",
        (prompts, "t"),
        {"prompt_extras": None, "other": 2},
    )


async def test_messages_that_are_no_objects_are_left_to_vllm(marks):
    """Messages in vLLM's Harmony format."""
    chat = [[SimpleNamespace(content="x")]]
    assert (await SegmentRenderer(FakeRenderer(), marks, 100).render_chat_async(chat, "p"))[0] == "passed"


async def test_a_marked_completion_is_tokenized_segment_by_segment(marks):
    renderer = SegmentRenderer(FakeRenderer(), marks, 100)
    with marks.issue(TICKET, DOCUMENTS) as marked:
        (engine_input,) = await renderer.render_cmpl_async([{"prompt": f"<s>sys{marked}why?"}])
    prompt, tokenizer = engine_input[REQUEST_KEY].prompt, make_tokenizer()
    assert prompt.system == tuple(tokenizer.encode("<s>sys"))
    assert prompt.question == tuple(tokenizer.encode("why?"))
    assert tokenizer.decode(engine_input["prompt_token_ids"]) == "<s>sysone </s>\n\ntwo\n\nwhy?"


async def test_a_document_longer_than_a_chunk_may_be_is_several(marks):
    _, (engine_input,) = await render_chat(marks, max_chunk_tokens=4)
    prompt, whole = engine_input[REQUEST_KEY].prompt, make_tokenizer().encode("two\n\n")
    pieces = [chunk for chunk in prompt.chunks if chunk.document == 1]
    assert [token for chunk in pieces for token in chunk.token_ids] == whole
    assert [(chunk.num_tokens, chunk.part, chunk.id) for chunk in pieces] == [(4, (1, 2), None), (1, (2, 2), None)]
    assert {chunk.id for chunk in prompt.chunks if chunk.document == 0} == {"d1"}
    assert engine_input["prompt"] == "<s>one </s>\n\ntwo\n\nwhy?</s>"


async def test_scope_isolated_brings_the_opening_of_a_lone_user_message(marks):
    _, (engine_input,) = await render_chat(marks, FakeRenderer("<s>hello {}</s>"), cache=CacheOptions(scope="isolated"))
    prompt = engine_input[REQUEST_KEY].prompt
    assert prompt.opening == tuple(make_tokenizer().encode("<s>hello "))
    _, (engine_input,) = await render_chat(marks)
    assert engine_input[REQUEST_KEY].prompt.opening is None


async def test_everything_else_is_vllms_renderers(marks):
    renderer = FakeRenderer()
    assert SegmentRenderer(renderer, marks, 100).tokenizer is renderer.tokenizer
