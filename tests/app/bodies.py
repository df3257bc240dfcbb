# SPDX-License-Identifier: Apache-2.0
"""Request bodies with documents, valid and invalid in any way."""

from hypothesis import strategies as st

from tests.fuzzing import objects, perhaps

texts = st.text(max_size=10) | st.sampled_from(["one##two##?", "why?", " ", "\U0001f600", "a\x00b"])
contents = texts | st.lists(objects(type=st.just("text"), text=perhaps(texts)), max_size=3)
source_types = st.sampled_from(["text", "content", "base64"])
sources = objects(type=perhaps(source_types), data=perhaps(texts), content=perhaps(contents))
part_types = st.sampled_from(["text", "input_text", "document", "image_url"])
named = {name: perhaps(texts) for name in ("text", "title", "context")}
parts = objects(type=perhaps(part_types), source=perhaps(sources), **named)
messages = objects(
    role=perhaps(st.sampled_from(["user", "user", "system", "developer", "assistant"])),
    content=perhaps(texts | st.lists(perhaps(parts), max_size=4)),
)
documents = texts | objects(
    id=perhaps(texts), text=perhaps(texts), title=perhaps(texts), data=perhaps(objects(snippet=perhaps(texts)))
)
caches = objects(
    mode=perhaps(st.sampled_from(["auto", "full"])),
    scope=perhaps(st.sampled_from(["system", "isolated"])),
    namespace=perhaps(texts),
    separator=perhaps(st.just("##")),
    explain=perhaps(st.booleans()),
)
bodies = objects(
    model=perhaps(st.just("m")),
    system=perhaps(texts | st.lists(perhaps(parts), max_size=2)),
    instructions=perhaps(texts),
    messages=perhaps(st.lists(perhaps(messages), max_size=3)),
    input=perhaps(texts | st.lists(perhaps(messages), max_size=3)),
    prompt=perhaps(texts),
    question=perhaps(texts),
    chunks=perhaps(st.lists(perhaps(documents), max_size=4)),
    documents=perhaps(st.lists(perhaps(documents), max_size=4)),
    cache=perhaps(caches),
    cache_salt=perhaps(st.just("salt")),
    tools=perhaps(st.just([{"type": "function"}])),
    chat_template_kwargs=perhaps(st.just({"x": 1})),
    stream=perhaps(st.booleans()),
    store=perhaps(st.just(False)),
    echo=perhaps(st.just(False)),
)
