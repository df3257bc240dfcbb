# SPDX-License-Identifier: Apache-2.0
"""A byte-level tokenizer with a chat template, for models with random weights."""

from pathlib import Path

SPECIAL_TOKENS = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
BOS, EOS = SPECIAL_TOKENS[:2]

CHAT_TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages and messages[0]['role'] == 'system' %}
        {{- messages[0]['content'] + '\\n\\n' }}
    {%- endif %}
    {{- 'Tools:' }}
    {%- for tool in tools %}
        {{- '\\n' + (tool | tojson) }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if not (tools and loop.first and message['role'] == 'system') %}
        {{- '<|im_start|>' + message['role'] + '\\n' }}
        {{- message['content'] or '' }}
        {%- for call in message['tool_calls'] or [] %}
            {{- '\\n<tool_call>\\n' + (call['function'] | tojson) + '\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def vocabulary() -> list[str]:
    """All tokens, by id."""
    from tokenizers import pre_tokenizers

    return [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]


def vocabulary_size() -> int:
    """Number of tokens: 256 bytes and the special ones."""
    return 256 + len(SPECIAL_TOKENS)


def save_tokenizer(folder: Path, max_positions: int) -> None:
    """Saves a tokenizer of one token per UTF-8 byte and the special tokens; adds no BOS."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(vocabulary())}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=EOS,
        extra_special_tokens=list(SPECIAL_TOKENS[2:]),
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=max_positions,
    ).save_pretrained(folder)
