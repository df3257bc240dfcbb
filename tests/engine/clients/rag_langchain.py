# SPDX-License-Identifier: Apache-2.0
"""Asks with LangChain's question-answering chain and its own prompts, about the passages given in an order."""

import json
import sys

from langchain_classic.chains import RetrievalQA
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from langchain_openai import ChatOpenAI, OpenAI

url, model, asked = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])


class Given(BaseRetriever):
    def _get_relevant_documents(self, query, *, run_manager):
        return [Document(text) for text in asked["documents"]]


kind = {"chat": ChatOpenAI, "completion": OpenAI}[asked["way"]]
llm = kind(base_url=url, api_key="none", model=model, **asked["options"])
RetrievalQA.from_chain_type(llm, retriever=Given()).invoke(asked["question"])
