"""What other retrievers find becomes known before a prompt holds it, so that its KV is reused, too."""

from __future__ import annotations

import secrets
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from langchain_core.callbacks import (
    AsyncCallbackManagerForRetrieverRun,
    BaseCallbackHandler,
    CallbackManagerForRetrieverRun,
)
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from langchain_core.tracers.context import register_configure_hook
from pydantic import ConfigDict, PrivateAttr

from lazyrag.client import LazyRAG
from lazyrag.integrations.common import Connection
from lazyrag.types import ChunkId, chunk_id

MAX_KNOWN = 4096
"""How many retrieved texts are known at one time; the ones that were not retrieved for longest are forgotten."""


class RetrievedTexts(BaseCallbackHandler):
    """A callback handler that registers the text of every document that a retriever finds. Thread-safe.

    Args:
        client: whose prompts will hold them.
        max_known: see `MAX_KNOWN`.
    """

    run_inline = True  # in an async chain, too, the texts are known before the next step

    def __init__(self, client: LazyRAG, max_known: int = MAX_KNOWN) -> None:
        self._client = client
        self._max_known = max_known
        self._slots: OrderedDict[ChunkId, str] = OrderedDict()
        self._name = secrets.token_hex(4)
        self._lock = threading.Lock()

    def on_retriever_end(self, documents: Sequence[Document], **kwargs: Any) -> None:
        """Register the documents' texts."""
        texts = {chunk_id(document.page_content): document.page_content for document in documents}
        with self._lock:
            new = {}
            for id, text in texts.items():
                if id in self._slots:
                    self._slots.move_to_end(id)
                    continue
                slot = f"retrieved {self._name} {len(self._slots)}"
                if len(self._slots) >= self._max_known:
                    _, slot = self._slots.popitem(last=False)
                self._slots[id] = slot
                new[slot] = text
            if new:
                self._client.register(new)


class WrappedRetriever(Connection, BaseRetriever):
    """Another retriever, whose documents' texts are known when it has returned them; see `wrap_retriever`."""

    model_config = ConfigDict(extra="forbid")

    retriever: BaseRetriever

    _texts: RetrievedTexts | None = PrivateAttr(default=None)

    def _note(self, documents: list[Document]) -> list[Document]:
        if self._texts is None:
            self._texts = RetrievedTexts(self.embedded)
        self._texts.on_retriever_end(documents)
        return documents

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, **kwargs: Any
    ) -> list[Document]:
        return self._note(self.retriever.invoke(query, {"callbacks": run_manager.get_child()}, **kwargs))

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun, **kwargs: Any
    ) -> list[Document]:
        return self._note(await self.retriever.ainvoke(query, {"callbacks": run_manager.get_child()}, **kwargs))


def wrap_retriever(retriever: BaseRetriever, **settings: Any) -> WrappedRetriever:
    """Any retriever, whose documents' texts become chunks: the first prompt that holds one computes its KV.

    Args:
        retriever: one that does not retrieve from a LazyRAG store; what is in one is known anyway.
        **settings: those of the model (`lazyrag.integrations.common.Connection`); `lazyrag=` shares a client.

    Example:
        retriever = wrap_retriever(bm25, store="kb") | format_docs
    """
    return WrappedRetriever(retriever=retriever, **settings)


_watching: ContextVar[RetrievedTexts | None] = ContextVar("lazyrag_retrieved", default=None)
register_configure_hook(_watching, inheritable=True)


@contextmanager
def know_retrieved(**settings: Any) -> Iterator[None]:
    """While this is open, what any retriever of any chain finds becomes known, as by `wrap_retriever`.

    For chains whose retrievers cannot be reached. It holds for the calls that this thread or task makes.

    Args:
        **settings: those of the model (`lazyrag.integrations.common.Connection`); `lazyrag=` shares a client.

    Example:
        with know_retrieved(store="kb"):
            chain.invoke("What changed in the last release?")
    """
    token = _watching.set(RetrievedTexts(Connection(**settings).embedded))
    try:
        yield
    finally:
        _watching.reset(token)
