# SPDX-License-Identifier: Apache-2.0
"""Streams by LangChain, whose parts are added to one another."""

import json
import sys

from langchain_openai import ChatOpenAI

url, model, asked = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
messages = [(message["role"], message["content"]) for message in asked["messages"]]
options = {"base_url": url, "api_key": "none", "model": model, **asked["options"]}

print(json.dumps("".join(part.content for part in ChatOpenAI(**options).stream(messages))))

first, *parts = ChatOpenAI(**options, stream_usage=True).stream(messages, extra_body={"documents": asked["documents"]})
answer = sum(parts, start=first)
print(json.dumps(answer.content))
print(json.dumps(answer.usage_metadata["input_token_details"]["cache_read"]))
