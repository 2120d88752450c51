"""What other retrievers find becomes known before a prompt holds it, so that its KV is reused, too."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

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

MAX_BYTES = 64 << 20
"""How much retrieved text a client knows at one time; what was not retrieved for longest is forgotten."""
BESIDE = 1024
"""Bytes that a known text takes beside itself, about: its id, its name, its place in the index."""


@dataclass(slots=True)
class _Latest:
    """What was retrieved for a client, the latest last, and the bytes of each. It names no client, whom it outlives."""

    sizes: OrderedDict[ChunkId, int] = field(default_factory=OrderedDict)
    total: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


_latest: WeakKeyDictionary[LazyRAG, _Latest] = WeakKeyDictionary()
_latest_lock = threading.Lock()


class RetrievedTexts(BaseCallbackHandler):
    """A callback handler that registers the text of every document that a retriever finds. Thread-safe.

    An async chain waits for that, and its event loop does not.

    Args:
        client: whose prompts will hold them. All handlers of a client share what they remember.
        max_bytes: see `MAX_BYTES`. What one retriever finds at once is known in any case.
    """

    def __init__(self, client: LazyRAG, max_bytes: int = MAX_BYTES) -> None:
        self._client = client
        self._max_bytes = max_bytes
        with _latest_lock:
            self._latest = _latest.setdefault(client, _Latest())

    def on_retriever_end(self, documents: Sequence[Document], **kwargs: Any) -> None:
        """Register the documents' texts, and forget the oldest ones that there is no room for.

        An engine that runs begins to bring up what it has of them.
        """
        texts = {chunk_id(document.page_content): document.page_content for document in documents}
        latest = self._latest
        with latest.lock:
            new = {id: text for id, text in texts.items() if id not in latest.sizes}
            if new:  # noted only then, for it may fail
                self._client.register({_name(id): text for id, text in new.items()})
            for id, text in new.items():
                latest.sizes[id] = len(text.encode("utf-8", "surrogatepass")) + BESIDE
                latest.total += latest.sizes[id]
            for id in texts:
                latest.sizes.move_to_end(id)
            old, total = [], latest.total
            for id, size in latest.sizes.items():
                if total <= self._max_bytes or id in texts:  # these stand last
                    break
                old.append(id)
                total -= size
            if old:  # dropped only then, for it may fail
                self._client.unregister(map(_name, old))
            for id in old:
                latest.total -= latest.sizes.pop(id)
        self._client.prefetch(texts)


def _name(id: ChunkId) -> str:
    return f"retrieved {id}"


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
        documents = await self.retriever.ainvoke(query, {"callbacks": run_manager.get_child()}, **kwargs)
        return await asyncio.to_thread(self._note, documents)


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
