"""LazyRAG for LlamaIndex: a language model, a retriever, and `configure()`, which makes LlamaIndex use both halves."""

from lazyrag.integrations.llama_index.llm import LazyRAGLLM, configure
from lazyrag.integrations.llama_index.retriever import LazyRAGRetriever

__all__ = ["LazyRAGLLM", "LazyRAGRetriever", "configure"]
