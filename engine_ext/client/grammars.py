# SPDX-License-Identifier: Apache-2.0
"""Structured outputs: what the engine must compile is compiled on trial first, within limits.

The engine compiles a schema, grammar or pattern in one thread for all requests. It gives up a pattern after five
seconds, though its work goes on, and all else never: a grammar of 30 KB would keep those of others waiting for hours.
"""

import json
import resource
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import aclosing, suppress
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from engine_ext.client.processes import Answers, LimitedProcesses, WorkFailedError, answer_all
from engine_ext.client.threads import in_thread

if TYPE_CHECKING:  # the processes need no engine
    from vllm.exceptions import VLLMValidationError
    from vllm.sampling_params import StructuredOutputsParams
    from vllm.v1.engine.async_llm import AsyncLLM

    from engine_ext.client.request import Outputs

MAX_SECONDS: Final = 2
"""Of CPU time: others wait as long, and longer if the engine's thread has no core of its own."""
MAX_MEMORY_BYTES: Final = 256 << 20
_MAX_PARSING_SECONDS: Final = 0.1
"""vLLM's serving layer parses what it is given once more, and holds the event loop meanwhile."""
_LONGEST: Final = {"regex": 1 << 12, "grammar": 1 << 15, "lark": 1 << 15, "json": 1 << 17, "structural_tag": 1 << 17}
"""Characters, by kind; choices become a grammar."""
_PROCESSES: Final = 2
_MOST_REMEMBERED: Final = 4096
_COMPILING_BACKENDS: Final = ("auto", "xgrammar")
"""vLLM's others compile while they generate, or are an administrator's choice."""


class Grammars:
    """Refuses what takes too long to compile; remembers what it has seen."""

    def __init__(self, llm: "AsyncLLM") -> None:
        self._llm = llm
        self._processes = LimitedProcesses("engine_ext.client.grammars", self._tokenizer, _PROCESSES)
        self._is_cheap: OrderedDict[bytes, bool] = OrderedDict()
        self.close = self._processes.close

    async def structured(self, outputs: "Outputs", asked: "StructuredOutputsParams") -> "Outputs":
        """The outputs of a request; raises :class:`VLLMValidationError` before the first one."""
        is_first = True
        async with aclosing(outputs):
            await self._check(asked)
            async for output in outputs:
                if is_first and any(each.finish_reason == "error" for each in output.outputs):
                    raise _refusal("the engine could not compile it, or not in time")
                is_first = False
                yield output

    async def _check(self, asked: "StructuredOutputsParams") -> None:
        """Raises :class:`VLLMValidationError`. What is no valid schema, grammar or pattern is left to vLLM."""
        config = self._llm.vllm_config.structured_outputs_config
        if config.backend not in _COMPILING_BACKENDS or (key := await in_thread(_compiled, asked)) is None:
            return
        digest = sha256(f"{key.kind} ".encode() + key.text).digest()
        if digest not in self._is_cheap:
            about = {"kind": key.kind, "any_whitespace": not config.disable_any_whitespace}
            try:
                (self._is_cheap[digest],) = await self._processes.ask(about, key.text, MAX_SECONDS)
            except WorkFailedError:
                self._is_cheap[digest] = False
            if len(self._is_cheap) > _MOST_REMEMBERED:
                self._is_cheap.popitem(last=False)
        if not self._is_cheap[digest]:
            raise _refusal(f"it can't be compiled in {MAX_SECONDS} s and {MAX_MEMORY_BYTES >> 20} MiB: simplify it")

    def _tokenizer(self) -> bytes:
        """The tokenizer as the engine's compiler sees it."""
        from xgrammar import TokenizerInfo

        size = self._llm.model_config.get_vocab_size()
        info = TokenizerInfo.from_huggingface(self._llm.renderer.tokenizer, vocab_size=size)
        return str(info.serialize_json()).encode()


class _Compiled(NamedTuple):
    kind: str
    text: bytes


def _compiled(asked: "StructuredOutputsParams") -> _Compiled | None:
    """The constraint that the engine will compile; ``None`` if it is vLLM's own, or no JSON."""
    from vllm.v1.structured_output.backend_guidance import has_guidance_unsupported_json_features
    from vllm.v1.structured_output.backend_xgrammar import has_xgrammar_unsupported_json_features
    from vllm.v1.structured_output.request import get_structured_output_key
    from vllm.v1.structured_output.utils import choice_as_grammar, grammar_is_likely_lark

    if asked.all_constraints_none() or asked.json_object is not None:
        return None
    if asked.choice is not None:
        _check_length("grammar", sum(map(len, asked.choice)))
        kind, text = "grammar", choice_as_grammar(asked.choice)
    else:
        option, text = get_structured_output_key(asked)
        kind = "lark" if asked.grammar is not None and grammar_is_likely_lark(text) else option.name.lower()
        _check_length(kind, len(text))
    if kind == "json":
        try:
            schema = json.loads(text)
        except json.JSONDecodeError:
            return None
        except (ValueError, RecursionError):
            raise _refusal("it is nested too deeply, or has a number of thousands of digits") from None
        if has_guidance_unsupported_json_features(schema) and has_xgrammar_unsupported_json_features(schema):
            # vLLM would take Outlines, which never ends either, and for all requests from then on.
            raise _refusal("no backend supports patternProperties together with the other keywords of this schema")
    return _Compiled(kind, text.encode("utf-8", "surrogatepass"))


def _check_length(kind: str, length: int) -> None:
    if length > _LONGEST[kind]:
        raise _refusal(f"it has {length} characters; {_LONGEST[kind]} are the most")


def _refusal(why: str) -> "VLLMValidationError":
    from vllm.exceptions import VLLMValidationError

    message = f"the schema, grammar or pattern can't be used: {why}"
    return VLLMValidationError(message, parameter="structured_outputs")


def _prepare(tokenizer: bytes) -> Answers:
    import xgrammar

    info = xgrammar.TokenizerInfo.deserialize_json(tokenizer.decode())
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    _limit_memory()

    def answers(about: dict[str, Any], text: bytes) -> Iterator[bool]:
        """Whether it is cheap to compile, or nothing that could be."""
        parse = {
            "json": partial(xgrammar.Grammar.from_json_schema, any_whitespace=about["any_whitespace"]),
            "regex": xgrammar.Grammar.from_regex,
            "grammar": xgrammar.Grammar.from_ebnf,
            "lark": xgrammar.Grammar.from_lark,
            "structural_tag": _structural_tag,
        }[about["kind"]]
        began, grammar = time.process_time(), None
        with suppress(Exception):
            grammar = parse(text.decode("utf-8", "surrogatepass"))
        is_cheap = time.process_time() - began <= _MAX_PARSING_SECONDS
        if grammar is not None and is_cheap:
            try:
                compiler.compile_grammar(grammar)
            except Exception:  # memory that lacks, too
                is_cheap = False
        yield is_cheap

    return answers


def _structural_tag(text: str) -> Any:
    """The grammar of structural tags, also of their earlier form."""
    from xgrammar import Grammar, StructuralTagItem

    tag = json.loads(text)
    if "structures" not in tag:
        return Grammar.from_structural_tag(text)
    items = [
        StructuralTagItem(begin=each["begin"], schema=json.dumps(each["schema"]), end=each["end"])
        for each in tag["structures"]
    ]
    return Grammar.from_structural_tag(items, tag["triggers"])


def _limit_memory() -> None:
    """To what its data has now and some more; not its addresses, of which PyTorch maps many that it never uses."""
    data = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_DATA, (data + MAX_MEMORY_BYTES,) * 2)


if __name__ == "__main__":
    answer_all(_prepare)
