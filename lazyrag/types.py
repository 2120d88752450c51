"""The nouns that every part of LazyRAG shares. No dependency but the standard library.

Units: `start` and `end` count characters (Python `str` indices), half-open; `num_tokens` and a segment's `start` count
tokens; `page` counts from 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

ChunkId: TypeAlias = str
"""32 hex digits: BLAKE2b-128 of the chunk's canonical text (`chunk_id`)."""

MetadataValue: TypeAlias = str | int | float | bool | None
Metadata: TypeAlias = Mapping[str, MetadataValue]

EMPTY: Metadata = MappingProxyType({})

CONTENT, DOCUMENT = "_content", "_document"
"""Metadata of a framework's node that is kept in a store as a document (`lazyrag.records`): the node in its own form,
and the id of the document that it is from. No document may have metadata of these names: it could pass for a node."""


def canonical(text: str) -> str:
    """A chunk's canonical text: outer whitespace belongs to the prompt around it, never to the chunk."""
    return text.strip()


_BLAKE2B = blake2b(digest_size=16)


def chunk_id(text: str) -> ChunkId:
    """The id of the chunk with this text; metadata, document and position play no part in it."""
    return digest(canonical(text))


def digest(canonical_text: str | bytes) -> ChunkId:
    """`chunk_id` of a text that is known to be canonical, if it is one at all; as characters or in UTF-8."""
    if isinstance(canonical_text, str):
        canonical_text = canonical_text.encode("utf-8", "surrogatepass")
    hash = _BLAKE2B.copy()  # which takes less time than making one
    hash.update(canonical_text)
    return hash.hexdigest()


# ---------------------------------------------------------------- documents (filled by loaders and splitter)


@dataclass(frozen=True, slots=True)
class Document:
    """A loaded document.

    Attributes:
        id: stable over runs; a changed text keeps it (a file's absolute path, a URL, a record's key).
        text: the whole text.
        source: what a citation shows (a path, a URL).
        pages: the character offset at which each page starts, ascending, first 0; empty if the format has no pages.
    """

    id: str
    text: str
    source: str
    title: str | None = None
    metadata: Metadata = field(default_factory=lambda: EMPTY, hash=False)
    pages: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a document with the place it came from: `document.text[start:end] == text`.

    `text` is canonical. Two places with the same text are two `Chunk`s with one `id` and one KV.
    """

    id: ChunkId
    text: str
    num_tokens: int
    document_id: str
    source: str
    start: int
    end: int
    page: int | None = None
    title: str | None = None
    metadata: Metadata = field(default_factory=lambda: EMPTY, hash=False)


@dataclass(frozen=True, slots=True)
class EncodedChunk:
    """A chunk and the tokens that it is sent to the model as.

    `token_ids` is empty if the text does not survive encoding and decoding: such a chunk is found and cited, but never
    reused.
    """

    chunk: Chunk
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Hit:
    """A retrieved chunk. `score` is the cosine similarity to the query, higher is nearer.

    `also`: the other places that hold the same text.
    """

    chunk: Chunk
    score: float
    also: tuple[Chunk, ...] = ()


@dataclass(frozen=True, slots=True)
class Quota:
    """What a namespace may hold at most; None: no limit.

    Attributes:
        documents, chunks: in the store. What would exceed them is refused; what is there stays, and may shrink.
        kv_bytes: of its chunks' KV on disk, of all models together. A chunk beyond it is computed when it is used.
    """

    documents: int | None = None
    chunks: int | None = None
    kv_bytes: int | None = None


# ---------------------------------------------------------------- prompts (filled by segmenter and plan)


class Occurrence(NamedTuple):
    """A registered chunk found in a text, and verified: `text[start:end]` is its canonical text.

    With `whole=False` the text shows only the chunk's first `end - start` characters. A tuple, for a long prompt has
    hundreds of them.
    """

    chunk_id: ChunkId
    start: int
    end: int
    whole: bool = True


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens `[start, start + num_tokens)` of the logical prompt whose KV may be reused.

    Attributes:
        offset: index in the chunk of the segment's first token, a multiple of the engine's block size.
        chunk_tokens: tokens of the chunk, whose KV is computed as a whole; 0: up to the segment's end. The chunk stands
            in the prompt from `start - offset` on; what is in no segment is literal, and computed in its place. A
            segment ends between two blocks, or where the chunk ends.
    """

    chunk_id: ChunkId
    start: int
    num_tokens: int
    offset: int = 0
    chunk_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of the prompt that is tokenised by itself. The pieces' texts concatenate to the prompt.

    Attributes:
        chunk_id: the chunk that this text is, or None for literal text.
        reuse: whether the engine may reuse the chunk's KV here.
        computed: half-open ranges of the chunk's tokens that are computed in their place all the same; ascending,
            apart, from block border to block border.
        reason: why not, if `chunk_id` is set and `reuse` is False, or if this is the computed end of a chunk that the
            prompt ends in; else empty.
    """

    text: str
    token_ids: tuple[int, ...]
    chunk_id: ChunkId | None = None
    reuse: bool = False
    reason: str = ""
    computed: tuple[tuple[int, int], ...] = ()

    @property
    def reused(self) -> tuple[tuple[int, int], ...]:
        """Half-open ranges of the tokens whose KV may be reused, ascending."""
        if not self.reuse:
            return ()
        starts = (0, *(end for _, end in self.computed))
        ends = (*(start for start, _ in self.computed), len(self.token_ids))
        return tuple((start, end) for start, end in zip(starts, ends, strict=True) if start < end)


@dataclass(frozen=True, slots=True)
class PromptPlan:
    """What is sent to the engine for one prompt, in the prompt's own order.

    Attributes:
        prefix_len: the first `prefix_len` tokens are the preamble that chunks were computed behind (mode `prefix`);
            else 0.
        sink: tokens that chunks were computed behind and that are no part of the prompt (mode `sink`); else empty.
        mode: the `ReuseMode` that was planned for, as text; empty if the plan was made elsewhere.
    """

    pieces: tuple[Piece, ...]
    prefix_len: int = 0
    sink: tuple[int, ...] = ()
    mode: str = ""

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(token for piece in self.pieces for token in piece.token_ids)

    @property
    def segments(self) -> tuple[Segment, ...]:
        out, start = [], 0
        for piece in self.pieces:
            num_tokens = len(piece.token_ids)
            if piece.chunk_id is not None:
                for first, end in piece.reused:
                    out.append(Segment(piece.chunk_id, start + first, end - first, first, num_tokens))
            start += num_tokens
        return tuple(out)

    @property
    def chunk_ids(self) -> tuple[ChunkId, ...]:
        return tuple(piece.chunk_id for piece in self.pieces if piece.chunk_id is not None)

    def sources(self, reuse: Reuse | None) -> tuple[str, ...]:
        """For each piece, where its reused KV came from: of several parts, that of the one that took most work.

        Empty for literal text, and if it is not known.
        """
        sources = iter(reuse.sources if reuse is not None else ())
        of_parts = ([next(sources, "") for _ in piece.reused if piece.chunk_id is not None] for piece in self.pieces)
        return tuple(max(found, key=("", HBM, HOST, DISK, COMPUTED).index, default="") for found in of_parts)


# ---------------------------------------------------------------- answers (filled by the engine)


@dataclass(frozen=True, slots=True)
class Choice:
    """The reuse mode that runs.

    Attributes:
        mode: a `ReuseMode` as text.
        why: where it comes from, in words.
        fix: what to type for another one; empty where nothing needs to be done.
        detail: more of the reason. This and `fix` name folders: they are for who works on this machine, and are not
            sent to clients elsewhere.
    """

    mode: str
    why: str
    fix: str = ""
    detail: str = ""

    @property
    def reason(self) -> str:
        """All of it, for who works on this machine."""
        return f"{self.why} ({self.detail})" if self.detail else self.why


HBM, HOST, DISK, COMPUTED = "hbm", "host", "disk", "computed"
"""Where a segment's KV came from: the engine's pool (there already, or on its way for an earlier request), loaded from
host memory or disk for this request, or computed for it."""


@dataclass(frozen=True, slots=True)
class Reuse:
    """What one request reused and what it computed, reported by the scheduler.

    Attributes:
        prompt_tokens: tokens of the logical prompt, no padding.
        reused_tokens: of these, tokens that were not computed for it (chunk segments and preamble from `hbm`,
            `host` or `disk`, and literal tokens that vLLM's own prefix cache held).
        sources: for each segment of the request, in prompt order, one of `HBM`, `HOST`, `DISK`, `COMPUTED`.
    """

    prompt_tokens: int
    reused_tokens: int
    sources: tuple[str, ...] = ()

    @property
    def computed_tokens(self) -> int:
        return self.prompt_tokens - self.reused_tokens


@dataclass(frozen=True, slots=True)
class Citation:
    """A known chunk that a prompt held, and the documents that it comes from.

    Attributes:
        kv: where its KV came from, one of `HBM`, `DISK`, `COMPUTED`; empty if none was asked for.
        places: where documents hold it, the oldest document first. `end` and `text` are those of what the prompt shows,
            which for a chunk that was cut is its beginning. Empty for a text of no document (`LazyRAG.register`).
    """

    chunk_id: ChunkId
    kv: str = ""
    places: tuple[Chunk, ...] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished generation.

    Attributes:
        finish_reason: "stop", "length" or "abort".
        plan: the prompt as it was sent; None if the caller gave token ids.
        ttft_s: seconds from submission to the first token.
        hits: what was retrieved for it (`LazyRAG.query`).
        citations: for each known chunk in the prompt, in its order, where it comes from.
        mode: the reuse mode that ran, and why that one.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    reuse: Reuse
    plan: PromptPlan | None = None
    ttft_s: float | None = None
    hits: tuple[Hit, ...] = field(default=())
    citations: tuple[Citation, ...] = ()
    mode: Choice | None = None
