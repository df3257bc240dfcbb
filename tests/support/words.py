# SPDX-License-Identifier: Apache-2.0
"""A tokenizer whose tokens are words."""

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from app.documents.document import Document


def words(document: Document) -> int:
    """Counts tokens as words of title and text."""
    return len(document.render().split())


def _tokenizer() -> str:
    tokenizer = Tokenizer(WordLevel({"?": 0}, unk_token="?"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return str(tokenizer.to_str())


TOKENIZER = _tokenizer()
"""Its JSON."""
