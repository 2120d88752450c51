r"""Document -> chunks, counted in the model's own tokens, cut where a reader would cut.

    text    |  Intro.\n\n  |  First paragraph. Second sentence.  |  \n\nRest ...
    chunk     [----]          [-------------------------------]      outer whitespace belongs to no chunk

A chunk's text is canonical and stands in the document as it is: `document.text[start:end] == text`. Without overlap the
chunks cover all of the text but whitespace, in order.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from lazyrag.errors import ConfigError
from lazyrag.types import Chunk, Document, EncodedChunk, chunk_id

MIN_CHUNK_SIZE = 16
_WINDOW = 64  # chunks; so much text is tokenised at once, which bounds memory for a document of any length

# Where a cut may be made, from bad to good: between any two tokens, behind a word, a line, a sentence, a paragraph.
TOKEN, WORD, LINE, SENTENCE, PARAGRAPH = range(5)

# Whitespace, or the place behind a full stop of a script that has no spaces.
_BREAK = re.compile(r"\s+|(?<=[。！？])(?=\S)")
_SPACE = re.compile(r"\s*")
_SENTENCE_END = re.compile(r"[.!?…。！？][\"'”’)\]]*$")


class TextTokenizer(Protocol):
    """What splitting needs of a tokenizer (`lazyrag.tokens.Tokenizer` has it)."""

    @property
    def fingerprint(self) -> str: ...

    def encode_plain_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


@dataclass(frozen=True, slots=True)
class Splitter:
    """How documents are split.

    Attributes:
        tokenizer: the model's own, so that a chunk is as long as the engine sees it.
        chunk_size: tokens a chunk has at most.
        overlap: tokens that a chunk repeats of the one before, about. 0 is best here: retrieval that misses a neighbour
            is mended by asking for one hit more, while every repeated token is computed and kept once more.

    Raises:
        ConfigError: sizes that do not go together.
    """

    tokenizer: TextTokenizer
    chunk_size: int = 256
    overlap: int = 0

    def __post_init__(self) -> None:
        if self.chunk_size < MIN_CHUNK_SIZE:
            raise ConfigError(f"chunk_size is {self.chunk_size}.", fix=f"Use {MIN_CHUNK_SIZE} tokens or more.")
        if not 0 <= self.overlap <= self.chunk_size // 4:
            raise ConfigError(
                f"overlap is {self.overlap}.", fix=f"Use 0 to {self.chunk_size // 4}, a quarter of chunk_size."
            )

    @property
    def recipe(self) -> str:
        """Changes when the same document would be split in another way."""
        return f"tokens-1 {self.chunk_size} {self.overlap} {self.tokenizer.fingerprint}"

    def split(self, document: Document) -> list[EncodedChunk]:
        """The document's chunks, in order."""
        chunks = []
        for start, end, ids in self._spans(document.text):
            text = document.text[start:end]
            page = bisect_right(document.pages, start) if document.pages else None
            chunk = Chunk(
                id=chunk_id(text),
                text=text,
                num_tokens=len(ids),
                document_id=document.id,
                source=document.source,
                start=start,
                end=end,
                page=page,
                title=document.title,
                metadata=document.metadata,
            )
            chunks.append(EncodedChunk(chunk, tuple(ids) if self.tokenizer.decode(ids) == text else ()))
        return chunks

    def _spans(self, text: str) -> Iterator[tuple[int, int, list[int]]]:
        """Start, end and token ids of each chunk. Tokenises a window at a time; what is left of one begins the next."""
        start, width = 0, _WINDOW * self.chunk_size
        while start < len(text):
            is_last = start + width >= len(text)
            window = _Window(text[start : start + width], self.tokenizer)
            at = _skip_space(window.text, 0)
            while at < len(window.text) and (is_last or window.tokens_from(at) > 2 * self.chunk_size):
                end, num_chars, ids = self._take(window, at)
                yield start + at, start + at + num_chars, ids
                at = _skip_space(window.text, self._next(window, at, end))
            # A window that holds less than two chunks' tokens (it is all spaces, say) shows too little to cut well.
            width = width if at or is_last else 2 * width
            start += at

    def _take(self, window: _Window, start: int) -> tuple[int, int, list[int]]:
        """The chunk that begins at `start`: the break at which it ends, its length without outer space, its tokens."""
        limit = self.chunk_size
        while True:
            end = window.cut(start, limit)
            text = window.text[start:end].rstrip()
            ids, _ = self.tokenizer.encode_plain_with_offsets(text)
            excess = len(ids) - self.chunk_size
            # A text may have more tokens alone than it has in its context.
            if excess <= 0 or end - start == 1:
                return end, len(text), ids
            limit = max(1, limit - excess)

    def _next(self, window: _Window, start: int, end: int) -> int:
        """Where the next chunk begins: at the end of this one, or `overlap` tokens before, at a word."""
        if not self.overlap or end == len(window.text):
            return end
        earliest = window.char(max(0, window.token(end) - self.overlap))
        return next((place for place in window.breaks_in(max(earliest, start + 1) - 1, end)), end)


class _Window:
    """A piece of text with its tokens and its breaks."""

    def __init__(self, text: str, tokenizer: TextTokenizer) -> None:
        self.text = text
        _, offsets = tokenizer.encode_plain_with_offsets(text)
        self._starts = [start for start, _ in offsets]  # character at which each token begins, ascending
        matches = list(_BREAK.finditer(text))
        self._breaks = [match.end() for match in matches]  # where a next chunk may begin
        self._ranks = [_rank(text, match.start(), match.end()) for match in matches]

    def token(self, place: int) -> int:
        """The first token that begins at this place or behind it."""
        return bisect_left(self._starts, place)

    def char(self, token: int) -> int:
        """Where a token begins."""
        return self._starts[token] if token < len(self._starts) else len(self.text)

    def tokens_from(self, place: int) -> int:
        """How many tokens there are from here on."""
        return len(self._starts) - self.token(place)

    def breaks_in(self, after: int, to: int) -> list[int]:
        """The breaks in (after, to], ascending."""
        return self._breaks[bisect_right(self._breaks, after) : bisect_right(self._breaks, to)]

    def cut(self, start: int, limit: int) -> int:
        """The best end for a chunk of at most `limit` tokens that begins at `start`.

        The rest is thought of as chunks of equal size, so that no crumb is left at the end. Of the breaks that leave
        the chunk at least half of that size, the best kind wins, and of these the one that is nearest to that size.
        """
        first, rest = self.token(start), self.tokens_from(start)
        if rest <= limit:
            return len(self.text)
        size = -(-rest // -(-rest // limit))
        wanted, furthest = self.char(first + size), self.char(first + limit)
        low = bisect_right(self._breaks, self.char(first + size // 2))
        high = bisect_right(self._breaks, furthest)
        if low < high:
            best = max(range(low, high), key=lambda i: (self._ranks[i], -abs(self._breaks[i] - wanted)))
            return max(self._breaks[best], start + 1)
        return max(furthest, start + 1)


def _skip_space(text: str, place: int) -> int:
    """The first place from here on that is no whitespace."""
    match = _SPACE.match(text, place)
    assert match is not None
    return match.end()


def _rank(text: str, start: int, end: int) -> int:
    """What kind of break the whitespace in [start, end) is."""
    if start == end:
        return SENTENCE
    space = text[start:end]
    if space.count("\n") > 1 or "\f" in space or "\u2029" in space:
        return PARAGRAPH
    if _SENTENCE_END.search(text[max(0, start - 8) : start]) and not text[end : end + 1].islower():
        return SENTENCE
    return LINE if "\n" in space else WORD
