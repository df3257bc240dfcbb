# SPDX-License-Identifier: Apache-2.0
"""Streams by OpenAI's client, whose events are read as its documentation does."""

import json
import sys

from openai import OpenAI
from openai.lib.streaming.chat import ChatCompletionStreamState

url, model, asked = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
client = OpenAI(base_url=url, api_key="none")
messages, documents = asked["messages"], {"documents": asked["documents"]}

plain = client.chat.completions.create(model=model, messages=messages, stream=True, **asked["options"])
print(json.dumps("".join(event.choices[0].delta.content or "" for event in plain)))

state = ChatCompletionStreamState()
streamed = {"stream": True, "stream_options": {"include_usage": True}, "extra_body": documents, **asked["options"]}
for event in client.chat.completions.create(model=model, messages=messages, **streamed):
    state.handle_chunk(event)
completion = state.current_completion_snapshot
print(json.dumps(completion.choices[0].message.content))
print(json.dumps(completion.usage.prompt_tokens_details.cached_tokens))

system, question = (message["content"] for message in messages)
given = {"model": model, "instructions": system, "input": question, "temperature": 0, "extra_body": documents}
with client.responses.stream(**given, max_output_tokens=asked["options"]["max_tokens"]) as stream:
    text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    assert stream.get_final_response().output_text == text
    print(json.dumps(text))
