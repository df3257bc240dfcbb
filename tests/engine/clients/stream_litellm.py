# SPDX-License-Identifier: Apache-2.0
"""Streams by LiteLLM, as of any server with OpenAI's interface and as of vLLM."""

import json
import sys

import litellm

litellm.suppress_debug_info = True  # else it prints that it doesn't know the model's price
url, model, asked = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
server = {"api_base": url, "api_key": "none", "messages": asked["messages"], "stream": True, **asked["options"]}

plain = litellm.completion(model=f"openai/{model}", **server)
print(json.dumps("".join(event.choices[0].delta.content or "" for event in plain)))

events = list(
    litellm.completion(
        model=f"hosted_vllm/{model}",
        stream_options={"include_usage": True},
        extra_body={"documents": asked["documents"]},
        **server,
    )
)
completion = litellm.stream_chunk_builder(events)
print(json.dumps(completion.choices[0].message.content))
print(json.dumps(completion.usage.prompt_tokens_details.cached_tokens))
