# SPDX-License-Identifier: Apache-2.0
"""Conversations in the forms in which apps write retrieved passages into them, after the apps' sources."""

from collections.abc import Callable, Sequence
from typing import Any

Messages = list[dict[str, Any]]
QUESTION = "Which of these is true?"


def asked(system: str | None, user: str = QUESTION) -> Messages:
    opening = [] if system is None else [{"role": "system", "content": system}]
    return [*opening, {"role": "user", "content": user}]


def open_webui(passages: Sequence[str], first: int) -> Messages:
    sources = [
        f'<source id="{number}" name="file {number}.pdf" resource-type="file">{text}</source>'
        for number, text in enumerate(passages, first)
    ]
    joined = "\n".join(sources)
    return asked(None, f"### Task:\nAnswer, and cite.\n\n<context>\n{joined}\n</context>\n\n{QUESTION}")


def anything_llm(passages: Sequence[str], first: int) -> Messages:
    contexts = (f"[CONTEXT {i}]:\n{text}\n[END CONTEXT {i}]\n\n" for i, text in enumerate(passages, first))
    return asked(f"Answer the user's prompt.\nContext:\n{''.join(contexts)}")


def ragflow(passages: Sequence[str], first: int) -> Messages:
    nodes = [f"\nID: {i}\n├── Title: file {i}.pdf\n└── Content:\n{text}" for i, text in enumerate(passages, first)]
    knowledge = "\n------\n" + "\n\n------\n\n".join(nodes)
    return asked(
        f"You answer.\n      Here is the knowledge base:\n      {knowledge}\n      The above is the knowledge base."
    )


def librechat(passages: Sequence[str], first: int) -> Messages:
    items = "".join(
        f"\n            <contextItem>\n              <![CDATA[{text}]]>\n            </contextItem>"
        for text in passages
    )
    context = f"\n          <file>\n            <filename>{first}.pdf</filename>\n            <context>{items}"
    return asked(
        f"A file:\n        <context>{context}\n            </context>\n          </file>\n        </context>\n"
    )


def librechat_tool(passages: Sequence[str], first: int) -> Messages:
    results = [f"File: {first + i}.pdf\nRelevance: 0.{first + i}\nContent: {t}\n" for i, t in enumerate(passages)]
    call = {"id": "c1", "type": "function", "function": {"name": "file_search", "arguments": "{}"}}
    return [
        *asked(None),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "\n---\n".join(results)},
    ]


def lobechat(passages: Sequence[str], first: int) -> Messages:
    chunks = [
        f'<chunk fileId="{i}" fileName="{i}.pdf" similarity="0.{i}"  pageNumber="{i}" >{text}</chunk>'
        for i, text in enumerate(passages, first)
    ]
    return asked(None, f"{QUESTION}\n<retrieved_chunks>\n" + "\n".join(chunks) + "\n</retrieved_chunks>")


def dify(passages: Sequence[str], first: int) -> Messages:
    joined = "\n".join(passages)
    return asked(
        f"Use the following, inside <context></context> XML tags.\n\n<context>\n{joined}\n</context>\n\nAnswer."
    )


def langchain(passages: Sequence[str], first: int) -> Messages:
    joined = "\n\n".join(passages)
    return asked(None, f"Don't try to make up an answer.\n\n{joined}\n\nQuestion: {QUESTION}\nHelpful Answer:")


def langchain_chat(passages: Sequence[str], first: int) -> Messages:
    return asked("Don't try to make up an answer.\n----------------\n" + "\n\n".join(passages))


def langchain_tags(passages: Sequence[str], first: int) -> Messages:
    return asked("Answer from this:\n\n<context>\n" + "\n\n".join(passages) + "\n</context>")


def langchain_hub(passages: Sequence[str], first: int) -> Messages:
    return asked(None, f"Answer.\nQuestion: {QUESTION} \nContext: " + "\n\n".join(passages) + " \nAnswer:")


def llama_index(passages: Sequence[str], first: int) -> Messages:
    dashes, joined = "-" * 21, "\n\n".join(passages)
    return asked(None, f"Context information is below.\n{dashes}\n{joined}\n{dashes}\nQuery: {QUESTION}\nAnswer: ")


def llama_index_citations(passages: Sequence[str], first: int) -> Messages:
    sources = "\n\n".join(f"Source {i}:\n{text}\n" for i, text in enumerate(passages, first))
    return asked(None, f"Cite.\n------\n{sources}\n------\nQuery: {QUESTION}\nAnswer: ")


def document_tags(passages: Sequence[str], first: int) -> Messages:
    documents = "".join(
        f'<document index="{i}">\n<source>{i}</source>\n<document_content>\n{text}\n</document_content>\n</document>\n'
        for i, text in enumerate(passages, first)
    )
    return asked(None, f"<documents>\n{documents}</documents>\n\n{QUESTION}")


_APPS = (open_webui, anything_llm, ragflow, librechat, librechat_tool, lobechat, dify)
_FRAMEWORKS = (langchain, langchain_chat, langchain_tags, langchain_hub, llama_index, llama_index_citations)
_FORMS = (*_APPS, *_FRAMEWORKS, document_tags)
FORMS: dict[str, Callable[[Sequence[str], int], Messages]] = {each.__name__: each for each in _FORMS}
