# SPDX-License-Identifier: Apache-2.0
"""What takes too long to compile never reaches the engine; the rest does."""

import itertools
import json
from contextlib import closing
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast
from vllm.config import StructuredOutputsConfig
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams

from engine_ext.client import grammars
from engine_ext.client.grammars import Grammars

WORDS = ["?", *map("".join, itertools.chain(*(itertools.product("abcd<", repeat=length) for length in range(1, 6))))]
COSTLY = "(a|b)*" * 600
LEGACY_TAG = {"structures": [{"begin": "<a", "schema": {"type": "string"}, "end": "<"}], "triggers": ["<a"]}
TAG = {
    "type": "structural_tag",
    "format": {"type": "tag", "begin": "<a", "content": {"type": "regex", "pattern": COSTLY}, "end": "<"},
}
GRAMMAR = "root ::= " + " ".join(['("a" | "b")*'] * 600)
LARK = f"start: /{COSTLY}/"
RANGES = [{"type": "integer", "minimum": -123456789012 - number, "maximum": 987654321098} for number in range(1000)]
BEYOND_ALL_BACKENDS = {"type": "integer", "multipleOf": 3, "patternProperties": {"^a": {"type": "string"}}}


def make(backend: str = "auto") -> Grammars:
    tokenizer = Tokenizer(WordLevel(dict(map(reversed, enumerate(WORDS))), unk_token="?"))
    llm = SimpleNamespace(
        vllm_config=SimpleNamespace(structured_outputs_config=StructuredOutputsConfig(backend=backend)),
        model_config=SimpleNamespace(get_vocab_size=lambda: len(WORDS)),
        renderer=SimpleNamespace(tokenizer=PreTrainedTokenizerFast(tokenizer_object=tokenizer)),
    )
    return Grammars(llm)


@pytest.fixture(scope="module")
def compiled():
    with closing(make()) as made:
        yield made


async def outputs(*reasons):
    for reason in reasons:
        yield SimpleNamespace(outputs=[SimpleNamespace(finish_reason=reason)])


async def answered(made: Grammars, *reasons, **asked) -> int:
    """How many outputs a request with these constraints gets."""
    params = StructuredOutputsParams(**asked)
    return len([each async for each in made.structured(outputs(*(reasons or (None, "stop"))), params)])


@pytest.mark.parametrize(
    "asked",
    [
        {"regex": "[ab]{4}"},
        {"grammar": 'root ::= "a" | "b"'},
        {"grammar": 'start: "a" | "b"'},
        {"choice": ["a", 'b"\n']},
        {"json": {"type": "object", "properties": {"a": {"type": "integer"}}}},
        {"json": '{"type": "string", "pattern": "[ab]"}'},
        {"json_object": True},
        {"structural_tag": json.dumps(LEGACY_TAG)},
        # Nothing that compiles: vLLM says what is wrong.
        {"regex": "(a"},
        {"grammar": "root ::= ("},
        {"json": {"type": 3}},
        {"json": "{"},
        {"structural_tag": "{}"},
        {"structural_tag": json.dumps({"structures": 3})},
    ],
    ids=str,
)
async def test_what_is_cheap_or_invalid_passes(asked, compiled):
    assert await answered(compiled, **asked) == 2


@pytest.mark.parametrize(
    "asked",
    [
        {"regex": COSTLY},
        {"grammar": GRAMMAR},
        {"grammar": LARK},
        {"structural_tag": json.dumps(TAG)},
        {"json": BEYOND_ALL_BACKENDS},
        {"choice": ["a" * 4000 + str(number) for number in range(1024)]},
        {"json": {"enum": ["a" * 4000 + str(number) for number in range(1024)]}},
        {"json": {"type": "array", "prefixItems": RANGES}},
        {"json": "[" * 100_000},
        {"json": "9" * 5000},
        {"regex": "a" * 5000},
    ],
    ids=["regex", "grammar", "lark", "tag", "no_backend", "choice", "enum", "ranges", "nested", "digits", "long"],
)
async def test_what_takes_too_long_is_refused_and_remembered(asked, compiled, monkeypatch):
    monkeypatch.setattr(grammars, "MAX_SECONDS", 1)
    for _ in range(2):
        with pytest.raises(VLLMValidationError, match="the schema, grammar or pattern can't be used") as refused:
            await answered(compiled, **asked)
        assert refused.value.parameter == "structured_outputs"
        monkeypatch.setattr(compiled._processes, "ask", None)  # nothing is compiled a second time
    monkeypatch.undo()
    assert await answered(compiled, regex="[ab]{4}") == 2


async def test_a_failure_of_the_engine_is_the_grammars_if_nothing_was_generated(compiled):
    with pytest.raises(VLLMValidationError, match="could not compile it"):
        await answered(compiled, "error", regex="[ab]{4}")
    assert await answered(compiled, None, "error", regex="[ab]{4}") == 2


async def test_a_backend_that_an_administrator_chose_is_left_alone():
    with closing(make("guidance")) as other:
        assert await answered(other, regex=COSTLY) == 2
        assert not other._processes._running
