"""LazyRAG for LangChain: a string model, a chat model and a retriever."""

from lazyrag.integrations.langchain.chat import ChatLazyRAG
from lazyrag.integrations.langchain.convert import format_docs
from lazyrag.integrations.langchain.llm import LazyRAGLLM
from lazyrag.integrations.langchain.retriever import LazyRAGRetriever

__all__ = ["ChatLazyRAG", "LazyRAGLLM", "LazyRAGRetriever", "format_docs"]
