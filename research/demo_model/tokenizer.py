# SPDX-License-Identifier: Apache-2.0
"""The demo model's tokenizer: byte-level BPE over its language; numbers split into digit pairs."""

import random
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from measuring.quality.questions.demo_episodes import Shape, make_episode
from measuring.quality.questions.demo_language import DEFAULT_SYSTEM

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

VOCABULARY = 2048
SYSTEM, USER, ASSISTANT, END = SPECIAL_TOKENS = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")

CHAT_TEMPLATE = """\
{%- if messages[0]['role'] != 'system' -%}
    {{- '<|system|>DEFAULT_SYSTEM<|end|>' -}}
{%- endif -%}
{%- for message in messages -%}
    {{- '<|' + message['role'] + '|>' + message['content'] + '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|assistant|>' -}}
{%- endif -%}
""".replace("DEFAULT_SYSTEM", DEFAULT_SYSTEM)

# A word with its preceding space; at most two digits; other characters; white space.
_PIECES = r" ?\p{L}+| ?\p{N}{1,2}| ?[^\s\p{L}\p{N}]+|\s+"


def train_tokenizer(seed: int, max_length: int) -> "PreTrainedTokenizerFast":
    """Learns the vocabulary from generated training text."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(seed), trainer)
    options: dict[str, Any] = {"chat_template": CHAT_TEMPLATE, "clean_up_tokenization_spaces": False}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=END,
        extra_special_tokens=[SYSTEM, USER, ASSISTANT],
        model_max_length=max_length,
        **options,
    )


def _corpus(seed: int) -> Iterator[str]:
    rng = random.Random(f"tokenizer {seed}")
    for _ in range(3000):
        episode = make_episode(rng, "train", Shape(chunks=4, questions=8))
        yield episode.system
        yield from (document.render() for document in episode.documents)
        for question in episode.questions:
            yield question.text
            yield question.answer
