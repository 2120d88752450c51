"""LazyRAG for LangChain: models, a retriever, a vector store, and what makes other retrievers' documents known."""

from lazyrag.integrations.langchain.chat import ChatLazyRAG
from lazyrag.integrations.langchain.convert import format_docs
from lazyrag.integrations.langchain.llm import LazyRAGLLM
from lazyrag.integrations.langchain.retrieved import RetrievedTexts, know_retrieved, wrap_retriever
from lazyrag.integrations.langchain.retriever import LazyRAGRetriever
from lazyrag.integrations.langchain.vectorstore import FaissVectorStore, LazyRAGDocumentIndex, LazyRAGEmbeddings

__all__ = [
    "ChatLazyRAG",
    "FaissVectorStore",
    "LazyRAGDocumentIndex",
    "LazyRAGEmbeddings",
    "LazyRAGLLM",
    "LazyRAGRetriever",
    "RetrievedTexts",
    "format_docs",
    "know_retrieved",
    "wrap_retriever",
]
