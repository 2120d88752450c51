"""Why each part of a prompt was or was not reused, and which literal parts look like chunks that something altered.

`explain` reads the plan and the engine's report and decides nothing, so it cannot differ from what happened.
"""

from __future__ import annotations

import html
import re
import threading
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeAlias

from lazyrag.plan import AT_END
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
        nearest: of a literal that holds a chunk in changed form, that chunk; else None.
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
    """A chunk that a literal text holds in changed form.

    Attributes:
        kind: `ESCAPED`, `HTML`, `WHITESPACE`, `UNICODE` or (`Alterations.nearest`) `EDITED`.
        fix: what happened and what to do, a sentence or two.
    """

    kind: str
    chunk_id: ChunkId
    fix: str


Nearest: TypeAlias = Callable[[str], Sequence[Altered]]


def explain(
    plan: PromptPlan,
    reuse: Reuse | None = None,
    *,
    nearest: Nearest | None = None,
    why_computed: Callable[[ChunkId], str] = lambda id: FIRST_USE,
    is_anothers: Callable[[str], bool] = lambda text: False,
) -> list[Row]:
    """One row for each piece of the plan, in order.

    Args:
        plan: the prompt as it was (or would be) sent.
        reuse: the engine's report; None if the request has not run.
        nearest: finds altered chunks in literal text (`Alterations.nearest`).
        why_computed: says of a chunk that was computed why.
        is_anothers: whether a text holds a chunk of another namespace. For those only who may know.
    """
    rows = []
    position = 0
    for piece, source in zip(plan.pieces, plan.sources(reuse), strict=True):
        reason, altered = piece.reason, None
        if position < plan.prefix_len:
            kind = PREAMBLE
        elif piece.chunk_id is None:
            kind = LITERAL
            if nearest is not None and not reason:
                found = nearest(piece.text)
                reason = " ".join(dict.fromkeys(one.fix for one in found))
                altered = found[0].chunk_id if found else None
                if not reason and is_anothers(piece.text):
                    reason = OTHER_NAMESPACE
                elif not reason and len(piece.token_ids) >= MIN_TOKENS:
                    reason = NOT_REGISTERED
        else:
            kind = CHUNK
            if piece.reuse:
                reason = why_computed(piece.chunk_id) if source == COMPUTED else ""
                if piece.computed and not reason:
                    num_tokens = sum(end - start for start, end in piece.computed)
                    reason = f"{num_tokens} of its tokens are computed in their place, as mode {plan.mode} says"
        reused = bool(source) and source != COMPUTED
        rows.append(Row(piece, kind, len(piece.token_ids), reused, source, reason, altered))
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
        runs = set(_runs(text))
        proposed = dict.fromkeys(self._segmenter.index.candidates(text).chunk_ids)
        for id, chunk in self._segmenter.texts(list(islice(proposed, MOST_EDITED))).items():
            own = _runs(chunk)
            if own and chunk not in text and sum(run in runs for run in own) >= ALIKE * len(own):
                found.append(Altered(EDITED, id, FIXES[EDITED]))
        return found


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
        cut = _cut(plan.pieces)
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


def _cut(pieces: Sequence[Piece]) -> set[ChunkId]:
    """The chunks of which the prompt shows the beginning only."""
    out = set()
    for piece, after in zip(pieces, [*pieces[1:], None], strict=True):
        if piece.chunk_id is not None:
            shown = piece.text + (after.text if after is not None and after.reason == AT_END else "")
            if chunk_id(shown) != piece.chunk_id:
                out.add(piece.chunk_id)
    return out


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


def _squeezed(text: str) -> str:
    return "".join(text.split())


_UNDO: Sequence[tuple[str, Callable[[str], str]]] = (
    (ESCAPED, _unescaped),
    (HTML, html.unescape),
    (UNICODE, lambda text: unicodedata.normalize("NFC", text)),
    (WHITESPACE, lambda text: text.replace("\r\n", "\n")),
    # Indented lines, and the quotes of Markdown.
    (WHITESPACE, lambda text: re.sub(r"(?m)^[ \t>]+", "", text)),
)
