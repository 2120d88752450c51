"""LazyRAG for LlamaIndex: a language model, a retriever, a vector store and what goes with them.

`configure()` makes LlamaIndex use them.
"""

from lazyrag.integrations.llama_index.embedding import LazyRAGEmbedding
from lazyrag.integrations.llama_index.llm import LazyRAGLLM, configure
from lazyrag.integrations.llama_index.register import LazyRAGRegister
from lazyrag.integrations.llama_index.retriever import LazyRAGRetriever
from lazyrag.integrations.llama_index.vector_store import LazyRAGVectorStore

__all__ = [
    "LazyRAGEmbedding",
    "LazyRAGLLM",
    "LazyRAGRegister",
    "LazyRAGRetriever",
    "LazyRAGVectorStore",
    "configure",
]
