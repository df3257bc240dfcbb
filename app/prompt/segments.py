# SPDX-License-Identifier: Apache-2.0
"""Extension of vLLM's prompt renderer: prompts with marks are tokenized by segment."""

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, Final

from vllm.exceptions import VLLMValidationError

from app.documents.document import CONTEXT_TOKENS, Document
from app.http.messages import QUICK_BYTES
from app.prompt.known import KnownPassages
from app.prompt.marks import BrokenMarksError, MarkedPrompt, Marks
from app.prompt.tokenization import SegmentTokenizer
from cache.positions.layout import (
    Chunk,
    ChunkedPrompt,
    PackedTokens,
    TokenIds,
    num_in_common,
    pack,
    packed_length,
    split_packed,
    take,
    unpack,
)
from engine_ext.client.defects import blamed
from engine_ext.client.request import REQUEST_KEY, ChunkedRequest, Ticket
from engine_ext.client.threads import in_thread
from engine_ext.wire.vllm_compat import ChatParams, bare_chat_params, tokens_input

_BLANK: Final = "N/A"
"""A question without content: attention to chunks is compared with what it pays."""


class SegmentRenderer:
    """Wraps vLLM's renderer; prompts without marks pass through unchanged.

    With ``block_tokens``, white space pads each segment before the question to whole blocks.
    """

    def __init__(
        self,
        renderer: Any,
        marks: Marks,
        max_chunk_tokens: int,
        block_tokens: int | None = None,
        max_prompt_tokens: int | None = None,
    ) -> None:
        """``max_prompt_tokens`` is the longest prompt, if there is one: no longer document is tokenized."""
        self._max_prompt_tokens = max_prompt_tokens
        self._renderer = renderer
        self._marks = marks
        self._max_chunk_tokens = max(1, max_chunk_tokens)
        self._frames: dict[str | None, tuple[str, str] | None] = {}
        self.known = KnownPassages()
        """The documents that were tokenized."""
        self._tokenizer = SegmentTokenizer(renderer.get_tokenizer(), self.known.add)
        self._block_tokens = block_tokens

    def __getattr__(self, name: str) -> Any:
        return getattr(self._renderer, name)

    @property
    def can_pad(self) -> bool:
        """Whether the model's tokenizer has a white-space token for padding."""
        return self._tokenizer.filler is not None

    async def render_chat_async(
        self,
        conversations: Sequence[Any],
        chat_params: Any,
        tok_params: Any = None,
        *,
        prompt_extras: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> tuple[list[Any], list[Any]]:
        """Overrides vLLM's method; a conversation with marks yields a prompt with a :class:`ChunkedRequest`."""
        if not any(self._marks.are_in(_content(message)) for c in conversations for message in c):
            return await self._renderer.render_chat_async(  # type: ignore[no-any-return]
                conversations, chat_params, tok_params, prompt_extras=prompt_extras, **kwargs
            )
        try:
            return await self._with_segments(conversations, chat_params, tok_params, prompt_extras, kwargs)
        except Exception as error:
            raise blamed(error) from None

    async def _with_segments(
        self,
        conversations: Sequence[Any],
        chat_params: Any,
        tok_params: Any,
        prompt_extras: dict[str, Any] | None,
        kwargs: dict[str, Any],
    ) -> tuple[list[Any], list[Any]]:
        (conversation,) = conversations
        rendered, prompt = await self._renderer.render_messages_async(conversation, chat_params)
        if prompt.get("multi_modal_data"):
            refusal = ("media", "documents beside images, audio or video")
            return await self._unsegmented(conversation, refusal, chat_params, tok_params, prompt_extras, kwargs)
        try:
            marked = self._split(prompt["prompt"])
        except VLLMValidationError:
            if not self._ticket_of(conversation).found:
                raise
            refusal = ("template", "the chat template doesn't print the text around the documents once, unchanged")
            return await self._unsegmented(conversation, refusal, chat_params, tok_params, prompt_extras, kwargs)
        frame = await self._frame(chat_params)
        if frame is None and marked.ticket.options.scope == "isolated" and not marked.ticket.leaves_scope:
            raise VLLMValidationError(
                "scope isolated needs a chat template that takes a user message without a system prompt: ask for "
                "scope system, the default of servers without --chunk-scope",
                parameter="cache.scope",
            )
        tok_params = tok_params or self._renderer.default_chat_tok_params
        return [rendered], [await self._engine_input(marked, frame, tok_params, prompt_extras)]

    async def render_cmpl_async(
        self,
        prompts: Sequence[Any],
        tok_params: Any = None,
        *,
        prompt_extras: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """As vLLM's, for completions."""
        texts = [prompt.get("prompt") if isinstance(prompt, dict) else None for prompt in prompts]
        if not any(text and self._marks.are_in(text) for text in texts):
            return await self._renderer.render_cmpl_async(  # type: ignore[no-any-return]
                prompts, tok_params, prompt_extras=prompt_extras, **kwargs
            )
        tok_params = tok_params or self._renderer.default_cmpl_tok_params
        try:
            return [await self._engine_input(self._split(str(t)), ("", ""), tok_params, prompt_extras) for t in texts]
        except Exception as error:
            raise blamed(error) from None

    def chunks(self, document: Document, index: int, namespace: str) -> list[Chunk]:
        """Splits a document into one or, if it exceeds the chunk limit, several chunks; thread-safe."""
        if document.title:
            self.known.add(namespace, document.text)
        return self._chunks(document.render(), document.id, index, namespace, document.context or "")

    def check_documents(self, documents: Sequence[Document]) -> None:
        """Refuse documents that no prompt has room for, by their characters: tokenizing takes longer."""
        for i, document in enumerate(documents):
            self._check_characters(document.text, self._max_prompt_tokens, f"chunks.{i}.text")

    def _check_characters(self, text: str, limit: int | None, parameter: str) -> None:
        if limit is None or len(text) <= (most := limit * self._tokenizer.most_characters):
            return
        raise VLLMValidationError(
            f"{len(text)} characters: the model's maximum context length of {limit} tokens can't hold more than {most}",
            parameter=parameter,
            value=len(text),
        )

    @property
    def tokenizer_json(self) -> str:
        """The model's tokenizer."""
        return self._tokenizer.json

    def _split(self, text: str) -> MarkedPrompt:
        try:
            return self._marks.split(text)
        except BrokenMarksError as error:
            raise VLLMValidationError(
                f"{error}; documents need a chat template that prints the user's message once, unchanged",
                parameter="messages",
            ) from error

    def _ticket_of(self, conversation: Sequence[Any]) -> Ticket:
        return next(filter(None, (self._marks.ticket_of(_content(message)) for message in conversation)))

    async def _unsegmented(
        self,
        conversation: Sequence[Any],
        refusal: tuple[str, str],
        chat_params: Any,
        tok_params: Any,
        prompt_extras: dict[str, Any] | None,
        kwargs: dict[str, Any],
    ) -> tuple[list[Any], list[Any]]:
        """vLLM's own prompt of a conversation with marks, which can only be answered in full attention."""
        request = ChunkedRequest(self._ticket_of(conversation), None, refusal)
        unmarked = [_with_content(message, self._marks.without) for message in conversation]
        rendered, (engine_input,) = await self._renderer.render_chat_async(
            [unmarked], chat_params, tok_params, prompt_extras=prompt_extras, **kwargs
        )
        return rendered, [{**engine_input, REQUEST_KEY: request}]

    async def _frame(self, chat_params: ChatParams) -> tuple[str, str] | None:
        """The template's text before and behind a sole user message, the same for every request, if it takes one."""
        template = chat_params.chat_template
        if template not in self._frames:
            options = {"add_generation_prompt": True, "tokenize": False}
            bare = bare_chat_params(chat_params, options)
            message = f"[tessera-{secrets.token_hex(16)}]"
            try:
                _, prompt = await self._renderer.render_messages_async([{"role": "user", "content": message}], bare)
                rendered = str(prompt["prompt"])
            except Exception:  # a template may refuse such a conversation in any way
                rendered = ""
            opening, mark, closing = rendered.partition(message)
            self._frames[template] = (opening, closing) if mark else None
        return self._frames[template]

    async def _engine_input(
        self, marked: MarkedPrompt, frame: tuple[str, str] | None, tok_params: Any, prompt_extras: dict[str, Any] | None
    ) -> Any:
        self._check_characters(marked.text, tok_params.max_total_tokens, "chunks")
        salt = (prompt_extras or {}).get("cache_salt")
        # Long prompts, in their turns, leave a thread for short ones.
        run = in_thread if len(marked.text) > QUICK_BYTES else asyncio.to_thread
        request, token_ids = await run(self._tokenize, marked, frame, tok_params.add_special_tokens)
        _check_length(request.prompt, len(token_ids), tok_params)
        engine_input: dict[str, Any] = {
            **tokens_input(token_ids, prompt=marked.text, cache_salt=salt),
            "arrival_time": time.time(),
            REQUEST_KEY: request,
        }
        return engine_input

    def _tokenize(
        self, marked: MarkedPrompt, frame: tuple[str, str] | None, add_special_tokens: bool
    ) -> tuple[ChunkedRequest, list[int]]:
        encode, (opening, closing) = self._tokenizer.encode_template, frame or ("", "")
        if not marked.chunks:
            token_ids = list(encode(marked.text, add_special_tokens=add_special_tokens))
            return ChunkedRequest(marked.ticket, None), token_ids
        options = marked.ticket.options
        is_isolated, namespace = options.scope == "isolated" and frame is not None, options.namespace
        contexts = marked.ticket.contexts or ("",) * len(marked.chunks)
        documents = zip(marked.chunks, marked.ticket.chunk_ids, contexts, strict=True)
        system, question = encode(marked.system, add_special_tokens=add_special_tokens), encode(marked.question)
        before = encode(opening, add_special_tokens=add_special_tokens) if is_isolated else None
        blank = encode(f"{_BLANK}{closing}")
        if marked.ticket.found:
            chunks, rest = self._found_chunks(marked, namespace, has_question=bool(question))
            prompt = ChunkedPrompt(system, chunks, (*rest, *question), before, blank)
            if not prompt.documents:
                refusal = ("no chunks", "the documents found share their tokens with the text around them")
                return ChunkedRequest(marked.ticket, None, refusal), prompt.token_ids
            return ChunkedRequest(marked.ticket, prompt), prompt.token_ids
        prompt = ChunkedPrompt(
            self._padded(system),
            tuple(
                chunk
                for i, (text, id, context) in enumerate(documents)
                for chunk in self._chunks(text, id, i, namespace, context)
            ),
            question,
            self._padded(before) if before is not None else None,
            blank,
        )
        return ChunkedRequest(marked.ticket, prompt), prompt.token_ids

    def _found_chunks(
        self, marked: MarkedPrompt, namespace: str, *, has_question: bool
    ) -> tuple[tuple[Chunk, ...], TokenIds]:
        """The chunks of documents found in the prompt, the text between them, and the last one's last tokens.

        A document's key is that of the same document given otherwise, which ends with a blank line. The prompt uses its
        first tokens, as far as they don't depend on that; what is left of it is text.
        """
        chunks = list[Chunk]()
        rest: TokenIds = ()
        for index, (text, between) in enumerate(zip_longest(marked.chunks, marked.between)):
            tokens = self._tokenizer.pack_document(text, namespace)
            stored = self._tokenizer.pack_document(Document(text).render(), namespace)
            num_used = num_in_common(tokens, stored)
            if between is None and not has_question:
                num_used = min(num_used, packed_length(tokens) - 1)  # at least one token must be computed
            chunks += self._parts(stored, num_used, index)
            rest = unpack(take(tokens, num_used, packed_length(tokens) - num_used))
            if between is not None:
                behind = pack((*rest, *self._tokenizer.encode_template(between)))
                chunks += [Chunk(piece, is_text=True) for piece in split_packed(behind, self._max_chunk_tokens)]
        return tuple(chunks), rest

    def _parts(self, stored: PackedTokens, num_used: int, document: int) -> list[Chunk]:
        pieces = split_packed(stored, self._max_chunk_tokens)
        parts, left = list[Chunk](), num_used
        for number, piece in enumerate(pieces, start=1):
            used = min(left, packed_length(piece))
            if used:
                whole = used == packed_length(piece)
                part = (number, len(pieces)) if len(pieces) > 1 else None
                parts.append(Chunk(piece, None, document, part, num_used=None if whole else used))
            left -= used
        return parts

    def _chunks(self, text: str, id: str | None, document: int, namespace: str, context: str) -> list[Chunk]:
        before = b""
        if context:
            # No longer text has its last tokens in it, and tokenizing takes time in proportion.
            context = context[-CONTEXT_TOKENS * self._tokenizer.most_characters :]
            before = self._tokenizer.pack_document(context, namespace)
            length = packed_length(before)
            before = take(before, max(0, length - CONTEXT_TOKENS), min(length, CONTEXT_TOKENS))
        tokens = self._tokenizer.pack_document(text, namespace)
        pieces = split_packed(tokens, self._max_chunk_tokens)
        padded = [self._tokenizer.padded(piece, self._block_tokens) for piece in pieces]
        if len(padded) == 1:
            return [Chunk(padded[0], id, document, context=before)]
        return [
            Chunk(piece, id, document, (number, len(padded)), before) for number, piece in enumerate(padded, start=1)
        ]

    def _padded(self, token_ids: tuple[int, ...]) -> tuple[int, ...]:
        return unpack(self._tokenizer.padded(pack(token_ids), self._block_tokens))


def _content(message: Any) -> str:
    """A message's content; the string form of a message that is no mapping (vLLM's Harmony format)."""
    return str(message.get("content") if isinstance(message, Mapping) else message)


def _with_content(message: Any, changed: Callable[[str], str]) -> Any:
    """A message with its texts changed."""
    content = message.get("content") if isinstance(message, Mapping) else None
    if isinstance(content, str):
        return {**message, "content": changed(content)}
    if not isinstance(content, list):
        return message
    parts = [{**part, "text": changed(part["text"])} if _has_text(part) else part for part in content]
    return {**message, "content": parts}


def _has_text(part: Any) -> bool:
    return isinstance(part, Mapping) and isinstance(part.get("text"), str)


def _check_length(prompt: ChunkedPrompt | None, num_tokens: int, tok_params: Any) -> None:
    """Refuses prompts that vLLM would truncate or refuse with a generic message."""
    if tok_params.truncate_prompt_tokens is not None:
        raise VLLMValidationError("a prompt with documents can't be truncated", parameter="truncate_prompt_tokens")
    limit, wanted = tok_params.max_total_tokens, tok_params.max_output_tokens or 0
    if limit is None or num_tokens + max(wanted, 1) <= limit:
        return
    detail = f" ({_segment_lengths(prompt)})" if prompt else ""
    if num_tokens < limit and wanted:
        raise VLLMValidationError(
            f"max_tokens={wanted} does not fit: the prompt has {num_tokens} tokens{detail}, "
            f"the model's maximum context length is {limit}",
            parameter="max_tokens",
            value=wanted,
        )
    raise VLLMValidationError(
        f"the prompt has {num_tokens} tokens{detail}, the model's maximum context length is {limit}, "
        "of which at least one must be left for the answer",
        parameter="chunks",
        value=num_tokens,
    )


def _segment_lengths(prompt: ChunkedPrompt) -> str:
    lengths: Counter[int] = Counter()
    for chunk in prompt.chunks:  # a long document has several chunks
        lengths[chunk.document] += chunk.num_tokens
    chunks = ", ".join(f"chunk {document}: {length}" for document, length in lengths.items())
    return f"system: {len(prompt.system)}, {chunks}, question: {len(prompt.question)}"
