"""/v1/documents, /v1/chunks, /v1/search, /v1/segment, /v1/query: what is stored, and what becomes of it in prompts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from hashlib import blake2b
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, Query, Request

from lazyrag.backend.engine import Sampling, joined
from lazyrag.backend.server.native import place_values, to_prompt
from lazyrag.backend.server.problems import not_found, problem_of
from lazyrag.backend.server.schemas import (
    Digest,
    DocumentIn,
    DocumentsRequest,
    NeededRequest,
    PinRequest,
    QueryRequest,
    SearchRequest,
    SegmentRequest,
)
from lazyrag.backend.server.service import Call, Caller, Service, ServiceOf, unless_gone
from lazyrag.errors import ConfigError, EngineDeadError, QuotaError
from lazyrag.ingest import Summary, source_of
from lazyrag.loaders import Source
from lazyrag.types import Chunk, Document, Hit, PromptPlan, Reuse

if TYPE_CHECKING:
    from lazyrag.client import LazyRAG
    from lazyrag.explain import Row
    from lazyrag.retrievers.store import Store

router = APIRouter(prefix="/v1")

Limit = Annotated[int, Query(ge=1, le=10_000)]
Skip = Annotated[int, Query(ge=0, le=1 << 40)]

# ---------------------------------------------------------------- documents


@router.post("/documents")
async def add_documents(body: DocumentsRequest, rag: Caller, service: ServiceOf) -> dict[str, Any]:
    """Add documents, or take up what changed in them; the same documents again change nothing.

    With `warm`, the answer comes when their KV is computed; that of the namespace's others is, in the background.
    """
    return await service.write(rag, _ingest, service, [_document(given) for given in body.documents], body.warm)


def _document(given: DocumentIn | str) -> Document | Source:
    if isinstance(given, str):
        given = DocumentIn(text=given)
    id = given.id or blake2b(given.text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
    pages = tuple(given.pages)
    document = Document(id, given.text, given.source or id, title=given.title, metadata=given.metadata, pages=pages)
    return document if given.sha256 is None else source_of(document, given.sha256, given.mtime)


def _ingest(rag: LazyRAG, service: Service, documents: Sequence[Document | Source], warm: bool) -> dict[str, Any]:
    summary = Summary()
    with closing(rag.ingest(documents=documents, warm=warm, rest=False)) as events:
        for event in events:
            if isinstance(event, Summary):
                summary = event
            elif service.stopping.is_set():
                raise EngineDeadError("The server stops.", why="What it has stored stays.", fix="Send the same again.")
    if warm:
        service.rebuilding.start_if_needed(rag)
    full = [failure.error for failure in summary.failed if isinstance(failure.error, QuotaError)]
    if full and not (summary.added or summary.changed or summary.unchanged):
        raise full[0]
    failed = [
        {"id": failure.source, "error": str(failure.error), "code": problem_of(failure.error).code}
        for failure in summary.failed
    ]
    values: dict[str, Any] = asdict(replace(summary, failed=()))
    return {**values, "ids": [document.id for document in documents], "failed": failed}


@router.post("/documents/needed")
async def needed(body: NeededRequest, rag: Caller, service: ServiceOf) -> dict[str, list[str]]:
    """Of documents that were made from these bytes, those that are to be added, and those that are to be replaced."""
    return await service.write(rag, _needed, body.documents)


def _needed(rag: LazyRAG, digests: Sequence[Digest]) -> dict[str, list[str]]:
    sources = [Source(given.id, given.sha256, 0, None, _unread) for given in digests]
    plan = rag.plan_ingest(documents=sources)
    return {"added": [source.id for source in plan.added], "changed": [source.id for source in plan.changed]}


def _unread() -> Document:
    raise AssertionError("a comparison reads nothing")


@router.get("/documents")
async def list_documents(rag: Caller, limit: Limit = 1000, after: str = "") -> dict[str, Any]:
    """The documents, by id. `after`: the last id of the page before."""
    return {"data": await asyncio.to_thread(_documents, rag, limit, after)}


def _documents(rag: LazyRAG, limit: int, after: str) -> list[dict[str, Any]]:
    if rag.store is None:
        return []
    documents = rag.store.documents(rag.config.namespace, after=after)
    return [
        {"id": d.id, "source": d.source, "title": d.title, "metadata": dict(d.metadata), "pinned": d.pinned}
        for d in islice(documents, limit)
    ]


@router.delete("/documents/{id:path}")
async def delete_document(id: str, rag: Caller, service: ServiceOf) -> dict[str, Any]:
    """Delete a document, the chunks that only it held, and their KV on disk."""
    removed = await service.write(rag, _delete, id)
    return {"id": id, "deleted": True, **removed}


def _delete(rag: LazyRAG, id: str) -> dict[str, int]:
    store, namespace = rag.store, rag.config.namespace
    if store is None or store.document(id, namespace) is None:
        raise not_found("document_not_found", "There is no such document.", "GET /v1/documents lists them.", "id")
    gone = rag.delete([id])
    return {"chunks_removed": gone.chunks, "kv_files_removed": gone.kv_files}


@router.post("/pins")
async def pin(body: PinRequest, rag: Caller, service: ServiceOf) -> dict[str, Any]:
    """Keep the KV of documents' chunks, those of later versions included, in every tier; or no longer."""
    return {"changed": await service.write(rag, _pin, body.ids, body.pinned)}


def _pin(rag: LazyRAG, ids: Sequence[str], pinned: bool) -> int:
    store, namespace = rag.store, rag.config.namespace
    if store is None or any(store.document(id, namespace) is None for id in ids):
        raise not_found("document_not_found", "One of them is no document.", "GET /v1/documents lists them.", "ids")
    return rag.pin(ids, pinned=pinned)


# ---------------------------------------------------------------- chunks


@router.get("/chunks")
async def list_chunks(rag: Caller, limit: Limit = 1000, skip: Skip = 0) -> dict[str, Any]:
    """Every place of every chunk, in the order of the documents, without the texts."""

    def places() -> list[dict[str, Any]]:
        chunks: Iterable[Chunk] = rag.store.chunks(rag.config.namespace) if rag.store is not None else ()
        return [place_values(chunk) for chunk in islice(chunks, skip, skip + limit)]

    return {"data": await asyncio.to_thread(places)}


@router.get("/chunks/{id}")
async def get_chunk(id: str, rag: Caller) -> dict[str, Any]:
    """A chunk's text, and the places that hold it."""
    return await asyncio.to_thread(_chunk, rag, id)


def _chunk(rag: LazyRAG, id: str) -> dict[str, Any]:
    store: Store | None = rag.store
    places = store.spans_of([id], rag.config.namespace).get(id) if store is not None else None
    if not places:
        raise not_found("chunk_not_found", "There is no such chunk.", "GET /v1/chunks lists them.", "id")
    return {"id": id, "text": places[0].text, "places": [place_values(place) for place in places]}


def hit_values(hit: Hit) -> dict[str, Any]:
    """A retrieved chunk with its text, score and places."""
    also = [place_values(chunk) for chunk in hit.also]
    return {**place_values(hit.chunk), "text": hit.chunk.text, "score": hit.score, "also": also}


@router.get("/kv")
async def kv(rag: Caller, service: ServiceOf) -> dict[str, Any]:
    """How much of the chunks' KV is kept on disk for this model, and whether it is being computed.

    `on_disk`: whether any is, with the server's settings.
    """
    return await asyncio.to_thread(_kv, rag, service)


@router.post("/kv/rebuild", status_code=202)
async def rebuild_kv(rag: Caller, service: ServiceOf) -> dict[str, Any]:
    """Compute the KV of the chunks that have none on disk for this model, in the background."""
    state = await asyncio.to_thread(_kv, rag, service)
    service.rebuilding.start(rag)
    return {**state, "rebuilding": asdict(service.rebuilding.state(rag.config.namespace))}


def _kv(rag: LazyRAG, service: Service) -> dict[str, Any]:
    state = asdict(rag.kv_state()) if rag.store is not None else {"chunks": 0, "kept": 0, "of_another": False}
    return {**state, "on_disk": rag.keeps_kv, "rebuilding": asdict(service.rebuilding.state(rag.config.namespace))}


# ---------------------------------------------------------------- retrieval and prompts


def _check_store(rag: LazyRAG) -> None:
    """Refuse as the client would, without the server's folders."""
    if rag.store is None:
        raise ConfigError("There is no store yet.", fix="Add documents: POST /v1/documents.")


@router.post("/search")
async def search(body: SearchRequest, rag: Caller, service: ServiceOf) -> dict[str, Any]:
    """The stored chunks that are nearest to a query."""
    with service.queue.places():
        _check_store(rag)
        return {"data": [hit_values(hit) for hit in await rag.asearch(body.query, body.k)]}


@router.post("/segment")
async def segment(body: SegmentRequest, request: Request, rag: Caller, service: ServiceOf) -> dict[str, Any]:
    """Which parts of a prompt are known chunks, and why the others are not."""
    call = Call(rag, to_prompt(body.prompt), Sampling(max_tokens=1), body.hints, body.tools, body.special, body.mode)
    with service.queue.places():
        reuse = joined(await unless_gone(request, service.whole(call))).reuse if body.run else None
        may_know = service.keys.is_operator(rag.config.namespace)
        plan, rows = await asyncio.to_thread(_rows, call, reuse, may_know)
    return {
        "mode": plan.mode,
        "prefix_len": plan.prefix_len,
        "sink": plan.sink,
        "num_tokens": len(plan.token_ids),
        "pieces": [
            {
                "text": row.piece.text,
                "token_ids": row.piece.token_ids,
                "chunk_id": row.piece.chunk_id,
                "reuse": row.piece.reuse,
                "computed": row.piece.computed,
                "why_not": row.piece.reason or None,
                "kind": row.kind,
                "reused": row.reused,
                "kv": row.source or None,
                "reason": row.reason or None,
                "nearest": row.nearest,
            }
            for row in rows
        ],
    }


def _rows(call: Call, reuse: Reuse | None, may_know: bool) -> tuple[PromptPlan, list[Row]]:
    plan = call.plan or call.planned()
    return plan, call.rag.explain_plan(plan, reuse, all_namespaces=may_know)


@router.post("/query")
async def query(body: QueryRequest, request: Request, rag: Caller, service: ServiceOf) -> dict[str, Any]:
    """Retrieve, and answer from what was found; `sources` are the passages in the order of their numbers."""
    sampling = Sampling(
        max_tokens=body.max_tokens or rag.config.max_tokens,
        temperature=rag.config.temperature if body.temperature is None else body.temperature,
    )
    with service.queue.places():
        _check_store(rag)
        prompt, hits = await asyncio.to_thread(rag.question, body.question, body.k)
        call = Call(rag, prompt, sampling, mode=body.mode)
        whole = joined(await unless_gone(request, service.whole(call)))
    reuse = whole.reuse
    assert call.plan is not None
    kv = dict(zip((s.chunk_id for s in call.plan.segments), reuse.sources if reuse else (), strict=False))
    return {
        "answer": whole.text,
        "finish_reason": whole.finish_reason,
        "sources": [{**hit_values(hit), "kv": kv.get(hit.chunk.id)} for hit in hits],
        "prompt_tokens": reuse and reuse.prompt_tokens,
        "reused_tokens": reuse and reuse.reused_tokens,
        "generated_tokens": len(whole.token_ids),
        "ttft_s": whole.ttft_s,
        "mode": whole.mode and whole.mode.mode,
        "mode_why": whole.mode and whole.mode.why,
    }
