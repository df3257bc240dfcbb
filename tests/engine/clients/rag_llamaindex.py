# SPDX-License-Identifier: Apache-2.0
"""Asks with LlamaIndex's query engines and their own prompts, about the passages given in an order."""

import json
import sys

from llama_index.core import MockEmbedding, Settings, VectorStoreIndex
from llama_index.core.query_engine import CitationQueryEngine
from llama_index.core.schema import TextNode
from llama_index.llms.openai_like import OpenAILike

url, model, asked = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
Settings.embed_model = MockEmbedding(embed_dim=4)
llm = OpenAILike(model=model, api_base=url, api_key="none", is_chat_model=True, context_window=8192, **asked["options"])
nodes = [TextNode(text=text) for text in asked["documents"]]
index = VectorStoreIndex(nodes)
found = {"llm": llm, "similarity_top_k": len(nodes)}
match asked["way"]:
    case "query":
        index.as_query_engine(**found).query(asked["question"])
    case "chat":
        index.as_chat_engine(chat_mode="context", **found).chat(asked["question"])
    case "citations":
        CitationQueryEngine.from_args(index, **found).query(asked["question"])
