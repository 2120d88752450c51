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
from typing import TypeAlias

from lazyrag.plan import AT_END
from lazyrag.segmenter import Segmenter
from lazyrag.types import COMPUTED, ChunkId, Piece, PromptPlan, Reuse, chunk_id

PREAMBLE, CHUNK, LITERAL = "preamble", "chunk", "literal"
FIRST_USE = "its KV was nowhere yet; it was computed, and is kept for the next request"

ESCAPED, HTML, WHITESPACE, UNICODE, CUT = "escaped", "html", "whitespace", "unicode", "cut"
FIXES = {
    ESCAPED: "A list or an object was turned into text, with quotes and line breaks escaped. Join the documents' texts"
    ' with "\\n\\n" (LangChain: format_docs; LlamaIndex: response_mode="compact"; tools: return a string).',
    HTML: "The prompt template escapes HTML. Use {{{name}}} in a mustache template, or an f-string template.",
    WHITESPACE: "Line breaks or spaces were changed on the way. Put the text in as it is, or register what is shown.",
    UNICODE: "The text was normalised to another Unicode form. Put it in as it is, or register what is shown.",
    CUT: "Chunks are cut off: of each, the whole KV blocks of its beginning are reused. Give prompts more room (fewer"
    " passages, max_model_len), or count with the model's tokenizer (LlamaIndex: configure(llm)).",
}

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
        reason: why it was not reused; empty if it was, or if there is nothing to say.
    """

    piece: Piece
    kind: str
    num_tokens: int
    reused: bool
    source: str
    reason: str


@dataclass(frozen=True, slots=True)
class Altered:
    """A chunk that a literal text holds in changed form.

    Attributes:
        kind: `ESCAPED`, `HTML`, `WHITESPACE` or `UNICODE`.
        fix: what happened and what to do, a sentence or two.
    """

    kind: str
    chunk_id: ChunkId
    fix: str


Nearest: TypeAlias = Callable[[str], Sequence[Altered]]


def explain(plan: PromptPlan, reuse: Reuse | None = None, *, nearest: Nearest | None = None) -> list[Row]:
    """One row for each piece of the plan, in order.

    Args:
        plan: the prompt as it was (or would be) sent.
        reuse: the engine's report; None if the request has not run.
        nearest: finds altered chunks in literal text (`Alterations.find`).
    """
    sources = iter(reuse.sources if reuse else ())
    rows = []
    position = 0
    for piece in plan.pieces:
        source, reason = "", piece.reason
        if position < plan.prefix_len:
            kind = PREAMBLE
        elif piece.chunk_id is None:
            kind = LITERAL
            if nearest is not None and not reason:
                reason = " ".join(dict.fromkeys(altered.fix for altered in nearest(piece.text)))
        else:
            kind = CHUNK
            if piece.reuse:
                source = next(sources, "")
                reason = FIRST_USE if source == COMPUTED else ""
        reused = bool(source) and source != COMPUTED
        rows.append(Row(piece, kind, len(piece.token_ids), reused, source, reason))
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
