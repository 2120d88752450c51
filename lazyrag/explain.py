"""Why each part of a prompt was or was not reused, and which literal parts look like chunks that something altered.

`explain` reads the plan and the engine's report and decides nothing, so it cannot differ from what happened.
"""

from __future__ import annotations

import html
import re
import threading
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import TypeAlias

from lazyrag.plan import AT_END, TOO_SHORT
from lazyrag.segmenter import Segmenter
from lazyrag.types import COMPUTED, ChunkId, Piece, PromptPlan, Reuse, chunk_id

PREAMBLE, CHUNK, LITERAL = "preamble", "chunk", "literal"
FIRST_USE = "its KV was nowhere yet; it was computed, and is kept for the next request"
EVICTED = "its KV was kept on disk and is not there any more: evicted to stay within a limit, or removed"
OTHER_MODEL = "its KV on disk is of another model, setting or preamble; lazyrag kv rebuild computes it for this one"
"""Why a chunk was computed."""

NOT_REGISTERED = "no document's text, and no registered one, is in it"
OTHER_NAMESPACE = "it holds text of another namespace's documents; namespaces share nothing"
"""Why a literal is none."""

ESCAPED, HTML, WHITESPACE, UNICODE, CUT, EDITED = "escaped", "html", "whitespace", "unicode", "cut", "edited"
FIXES = {
    ESCAPED: "A list or an object was turned into text, with quotes and line breaks escaped. Join the documents' texts"
    ' with "\\n\\n" (LangChain: format_docs; LlamaIndex: response_mode="compact"; tools: return a string).',
    HTML: "The prompt template escapes HTML. Use {{{name}}} in a mustache template, or an f-string template.",
    WHITESPACE: "Line breaks or spaces were changed on the way. Put the text in as it is, or register what is shown.",
    UNICODE: "The text was normalised to another Unicode form. Put it in as it is, or register what is shown.",
    CUT: "Chunks are cut off: of each, the whole KV blocks of its beginning are reused. Give prompts more room (fewer"
    " passages, max_model_len), or count with the model's tokenizer (LlamaIndex: configure(llm)).",
    EDITED: "Some words are others: it is another version. Put the text in as it is, or register what is shown.",
}
ALIKE = 0.5
"""A text is called an edited chunk if it holds this share of the chunk's runs of `RUN` words."""
RUN = 3
MOST_EDITED = 64
"""Chunks that are compared with a text to find one of which it is another version."""
MIN_TOKENS = 16
"""A shorter literal needs no reason: it is the application's own words."""

MAX_LOOKS = 64
"""How many prompts a `Watch` searches for altered chunks. What alters chunks alters them every time, and whoever asks
about no documents shall not pay for the search."""
SUSPECT = 256
"""Characters; a text so long in which no chunk was found may be an altered one."""


@dataclass(frozen=True, slots=True)
class Row:
    """What became of one piece of a prompt.

    Attributes:
        kind: `PREAMBLE`, `CHUNK` (found, reused or not) or `LITERAL`.
        reused: whether KV from before this request was used. Unknown, and False, for the preamble and literals.
        source: of a reusable chunk, where its KV came from (`types.HBM`, `DISK`, `COMPUTED`); empty if the request has
            not run.
        reason: why it, or a part of it, was not reused; empty if there is nothing to say.
        nearest: of a piece that holds a chunk in changed form, or the beginning of one, that chunk; else None.
    """

    piece: Piece
    kind: str
    num_tokens: int
    reused: bool
    source: str
    reason: str
    nearest: ChunkId | None = None


@dataclass(frozen=True, slots=True)
class Altered:
    """A chunk that a text holds in changed form.

    Attributes:
        kind: `ESCAPED`, `HTML`, `WHITESPACE`, `UNICODE`; of `Alterations.nearest` also `EDITED`; of
            `Alterations.in_pieces` also `CUT`.
        fix: what happened and what to do, a sentence or two.
    """

    kind: str
    chunk_id: ChunkId
    fix: str


AlteredIn: TypeAlias = Callable[[Sequence[Piece]], Mapping[int, Sequence[Altered]]]


def explain(
    plan: PromptPlan,
    reuse: Reuse | None = None,
    *,
    altered_in: AlteredIn = lambda pieces: {},
    why_computed: Callable[[ChunkId], str] = lambda id: FIRST_USE,
    holds_short: Callable[[str], bool] = lambda text: False,
    is_anothers: Callable[[str], bool] = lambda text: False,
) -> list[Row]:
    """One row for each piece of the plan, in order.

    Args:
        plan: the prompt as it was (or would be) sent.
        reuse: the engine's report; None if the request has not run.
        altered_in: finds altered chunks (`Alterations.in_pieces`).
        why_computed: says of a chunk that was computed why.
        holds_short: whether a text holds a chunk that is too short to be found.
        is_anothers: whether a text holds a chunk of another namespace. For those only who may know.
    """
    rows = []
    position = 0
    altered = altered_in(plan.pieces)
    for number, (piece, source) in enumerate(zip(plan.pieces, plan.sources(reuse), strict=True)):
        found = altered.get(number, ())
        reason = ""
        if position < plan.prefix_len:
            kind, found = PREAMBLE, ()
        elif piece.chunk_id is None:
            kind = LITERAL
            if not (piece.reason or found):
                if is_anothers(piece.text):
                    reason = OTHER_NAMESPACE
                elif len(piece.token_ids) >= MIN_TOKENS:
                    reason = TOO_SHORT if holds_short(piece.text) else NOT_REGISTERED
        else:
            kind = CHUNK
            if piece.reuse and source == COMPUTED:
                reason = why_computed(piece.chunk_id)
            elif piece.computed:
                num_tokens = sum(end - start for start, end in piece.computed)
                reason = f"{num_tokens} of its tokens are computed in their place, as mode {plan.mode} says"
        fixes = dict.fromkeys(one.fix for one in found)
        reason = ". ".join(filter(None, (piece.reason or reason, " ".join(fixes))))
        reused = bool(source) and source != COMPUTED
        nearest = found[0].chunk_id if found else None
        rows.append(Row(piece, kind, len(piece.token_ids), reused, source, reason, nearest))
        position += len(piece.token_ids)
    return rows


class Alterations:
    """Finds chunks that a text holds in changed form: escaped, HTML-escaped, respaced, normalised.

    Each change that can be undone is undone, and the result searched. Lost line breaks cannot be put back: such chunks
    are found if their anchor lost none, so not each of them, but seldom none of several.
    """

    def __init__(self, segmenter: Segmenter) -> None:
        self._segmenter = segmenter

    def find(self, text: str) -> list[Altered]:
        """The altered chunks in a text; those that it also holds unchanged are left out."""
        found: dict[ChunkId, str] = {}
        for kind, undo in _UNDO:
            restored = undo(text)
            if restored != text:
                whole = (occurrence for occurrence in self._segmenter.find(restored) if occurrence.whole)
                found = {occurrence.chunk_id: kind for occurrence in whole} | found
        squeezed = _squeezed(text)
        for id, chunk in self._segmenter.texts(self._segmenter.index.candidates(text).chunk_ids).items():
            if _squeezed(chunk) in squeezed:
                found.setdefault(id, WHITESPACE)
        texts = self._segmenter.texts(found)
        return [Altered(kind, id, FIXES[kind]) for id, kind in found.items() if texts.get(id, "") not in text]

    def nearest(self, text: str) -> list[Altered]:
        """As `find`; if that finds none, the chunks of which the text looks like another version."""
        found = self.find(text)
        if found:
            return found
        proposed = dict.fromkeys(self._segmenter.index.candidates(text).chunk_ids)
        for id, chunk in self._segmenter.texts(list(islice(proposed, MOST_EDITED))).items():
            if chunk not in text and _is_like(chunk, text):
                found.append(Altered(EDITED, id, FIXES[EDITED]))
        return found

    def in_pieces(self, pieces: Sequence[Piece]) -> dict[int, list[Altered]]:
        """By number, the pieces that hold chunks in changed form, and these chunks.

        What comes before the first change may have been found as the beginning of a chunk. If there is no change, the
        chunk is cut.
        """
        out: dict[int, list[Altered]] = {}
        begun: Altered | None = None
        shown = ""
        for number, piece in enumerate(pieces):
            if piece.chunk_id is not None:
                shown = piece.text
                begun = self._begun(pieces, number) if _is_cut(pieces, number) else None
                found = [begun] if begun is not None else []
            elif piece.reason:
                continue
            else:
                shown += piece.text
                found = self.nearest(piece.text)
                if begun is not None and (begun.kind != CUT or self._text(begun.chunk_id).startswith(shown)):
                    found = [begun, *found]
            if found:
                out[number] = found
        return out

    def _begun(self, pieces: Sequence[Piece], number: int) -> Altered:
        """What happened to the chunk that a piece shows the beginning of."""
        id = pieces[number].chunk_id
        assert id is not None
        after = takewhile(lambda piece: piece.chunk_id is None, pieces[number + 1 :])
        own = "".join([pieces[number].text, *(piece.text for piece in after)])
        everything = "".join(piece.text for piece in pieces)  # other chunks may have been found in the rest of it
        found = (altered for text in (own, everything) for altered in self.nearest(text) if altered.chunk_id == id)
        shown = len(pieces[number].text)
        for altered in found:
            # Of a chunk that is cut, the beginning looks like an edited whole; after an edit, a chunk goes on.
            if altered.kind != EDITED or _is_like(self._text(id)[shown:], own[shown:]):
                return altered
        return Altered(CUT, id, FIXES[CUT])

    def _text(self, id: ChunkId) -> str:
        return self._segmenter.texts([id]).get(id, "")


class Watch:
    """Finds, in the prompts that it is shown, what keeps chunks from being reused; says each kind of it once.

    Thread-safe.
    """

    def __init__(self) -> None:
        self._looks_left = MAX_LOOKS
        self._said: set[str] = set()
        self._lock = threading.Lock()

    def look(self, plan: PromptPlan, segmenter: Segmenter) -> list[str]:
        """What this prompt shows that was not said before: for each, what happened and what to do."""
        pieces = plan.pieces
        cut = {piece.chunk_id for number, piece in enumerate(pieces) if _is_cut(pieces, number)}
        if not cut and plan.chunk_ids and max(map(len, _literals(plan.pieces)), default=0) < SUSPECT:
            return []
        with self._lock:
            if not self._looks_left:
                return []
            self._looks_left -= 1
        found = Alterations(segmenter).find(plan.text)
        kinds = {altered.kind for altered in found}
        # Of an escaped text, what comes before the first escape looks like a chunk that was cut.
        if cut - {altered.chunk_id for altered in found}:
            kinds.add(CUT)
        with self._lock:
            new = sorted(kinds - self._said)
            self._said.update(new)
        return [FIXES[kind] for kind in new]


def _is_cut(pieces: Sequence[Piece], number: int) -> bool:
    """Whether a piece shows the beginning of a chunk only."""
    piece, *after = pieces[number : number + 2]
    shown = piece.text + (after[0].text if after and after[0].reason == AT_END else "")
    return piece.chunk_id is not None and chunk_id(shown) != piece.chunk_id


def _literals(pieces: Sequence[Piece]) -> list[str]:
    return [piece.text for piece in pieces if piece.chunk_id is None]


_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})|([nrt\"'\\/]))")
_NAMED_ESCAPES = {"n": "\n", "r": "\r", "t": "\t"}


def _unescaped(text: str) -> str:
    """Undo the escapes of JSON and of Python's repr."""

    def character(found: re.Match[str]) -> str:
        code = found[1] or found[2]
        return chr(int(code, 16)) if code else _NAMED_ESCAPES.get(found[3], found[3])

    # JSON writes a character beyond U+FFFF as two escapes, a surrogate pair.
    return _ESCAPE.sub(character, text).encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _runs(text: str) -> list[tuple[str, ...]]:
    """Every `RUN` words that follow each other."""
    words = text.split()
    return [tuple(words[i : i + RUN]) for i in range(len(words) - RUN + 1)]


def _is_like(chunk: str, text: str) -> bool:
    """Whether a text could be an edited chunk, or more than that."""
    own, runs = _runs(chunk), set(_runs(text))
    return bool(own) and sum(run in runs for run in own) >= ALIKE * len(own)


def _squeezed(text: str) -> str:
    return "".join(text.split())


_UNDO: Sequence[tuple[str, Callable[[str], str]]] = (
    (ESCAPED, _unescaped),
    (ESCAPED, lambda text: _unescaped(_unescaped(text))),  # JSON in JSON, as results of tools often are
    (HTML, html.unescape),
    (UNICODE, lambda text: unicodedata.normalize("NFC", text)),
    (WHITESPACE, lambda text: text.replace("\r\n", "\n")),
    # Indented lines, and the quotes of Markdown.
    (WHITESPACE, lambda text: re.sub(r"(?m)^[ \t>]+", "", text)),
)
