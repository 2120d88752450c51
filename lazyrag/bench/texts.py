"""Texts that resemble a company's documents, as many as one likes, from a seed.

Words come from a vocabulary whose frequencies follow Zipf's law. Documents are cut into chunks of one length, and share
boilerplate: many begin with one of a few notices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

VOCABULARY = 50_000
NOTICES = 40
LETTERS = "etaoinshrdlucmfwypvbgkjqxz"
LETTER_WEIGHTS = (12, 9, 8, 8, 7, 7, 6, 6, 6, 4, 4, 3, 3, 2.5, 2, 2, 2, 2, 1, 1.5, 2, 0.8, 0.2, 0.1, 0.2, 0.1)
SEPARATORS = (" ", ", ", ". ", ".\n\n")
SEPARATOR_WEIGHTS = (84, 8, 6, 2)
SHORTEST_WORD = 2


@dataclass(frozen=True, slots=True)
class Corpus:
    """A shape of chunks.

    Attributes:
        num_chunks: how many.
        chunk: characters in each; a few less where whitespace falls on its border.
        overlap: characters that neighbouring chunks of a document share.
        per_document: chunks of a document.
        notice: characters of a notice.
        shared_by_all: every chunk begins with one and the same notice, and shares nothing else. If not, a third of the
            documents begin with one of `NOTICES`, some far more often than others.
    """

    num_chunks: int
    chunk: int = 800
    overlap: int = 0
    per_document: int = 8
    notice: int = 243
    shared_by_all: bool = False

    def chunks(self, seed: int) -> Iterator[str]:
        """The chunks, document by document; the same ones for the same seed."""
        rng = np.random.default_rng(seed)
        words = Words(rng)
        notices = [words.text(self.notice) for _ in range(NOTICES)]
        popularity = _zipf(NOTICES)
        stride = self.chunk - self.overlap
        left = self.num_chunks
        while left > 0:
            if self.shared_by_all:
                cut = [notices[0] + words.text(self.chunk - self.notice)]
            else:
                notice = notices[rng.choice(NOTICES, p=popularity)] if rng.random() < 1 / 3 else ""
                document = notice + words.text(self.overlap + stride * self.per_document - len(notice))
                cut = [document[i * stride : i * stride + self.chunk] for i in range(self.per_document)]
            yield from (chunk.strip() for chunk in cut[:left])
            left -= len(cut)


class Words:
    """An endless text of random words.

    Args:
        rng: draws vocabulary and text.
    """

    BATCH = 1 << 20

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        words = np.maximum(rng.poisson(5.5, VOCABULARY), SHORTEST_WORD)
        weights = np.array(LETTER_WEIGHTS)
        letters = rng.choice(np.frombuffer(LETTERS.encode(), np.uint8), words.sum(), p=weights / weights.sum())
        # Words, then separators: the bytes of all one after the other, and where each begins.
        self._bytes = np.append(letters, np.frombuffer("".join(SEPARATORS).encode(), np.uint8))
        self._lengths = np.append(words, [len(separator) for separator in SEPARATORS])
        self._starts = np.cumsum(self._lengths) - self._lengths
        self._words = np.cumsum(_zipf(VOCABULARY))
        self._separators = np.cumsum(SEPARATOR_WEIGHTS) / sum(SEPARATOR_WEIGHTS)
        self._text, self._at = "", 0

    def text(self, length: int) -> str:
        """The next characters."""
        if self._at + length > len(self._text):
            self._text, self._at = self._text[self._at :] + self._more(max(self.BATCH, length)), 0
        self._at += length
        return self._text[self._at - length : self._at]

    def _more(self, length: int) -> str:
        """So many characters at least."""
        count = length // (SHORTEST_WORD + 1) + 1
        pieces = np.empty(2 * count, np.int64)
        pieces[::2] = np.searchsorted(self._words[:-1], self._rng.random(count))
        pieces[1::2] = VOCABULARY + np.searchsorted(self._separators[:-1], self._rng.random(count))
        lengths = self._lengths[pieces]
        ends = np.cumsum(lengths)
        # Counts up within each piece, from where the piece begins.
        place = np.arange(ends[-1]) + np.repeat(self._starts[pieces] - ends + lengths, lengths)
        return str(self._bytes[place].tobytes(), "ascii")


def _zipf(count: int) -> npt.NDArray[np.float64]:
    """Frequencies of ranks, by the law of Zipf and Mandelbrot."""
    weights = 1 / (np.arange(count) + 2.7)
    return np.asarray(weights / weights.sum())


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt, and which chunks were put where into it.

    Attributes:
        text: all of it.
        chunks: (start, index of the chunk), ascending.
    """

    text: str
    chunks: list[tuple[int, int]]


def retrieved(
    chunks: Sequence[str], rng: np.random.Generator, words: Words, *, count: int = 117, length: int = 100_000
) -> Prompt:
    """A prompt of `length` characters that shows so many chunks, numbered and with their sources, and goes on in words.

    Args:
        chunks: to draw from, without repetition.
        rng: draws.
        words: for the rest of the text.
        count: chunks.
        length: at least what the chunks need.
    """
    parts, shown = ["Answer the question from these documents.\n\n"], []
    at = len(parts[0])
    for number, index in enumerate(rng.choice(len(chunks), count, replace=False).tolist()):
        head = f"[Document {number}] (source: reports/{rng.integers(10_000)}.pdf, page {rng.integers(100)})\n"
        shown.append((at + len(head), index))
        parts += [head, chunks[index], "\n\n"]
        at += len(head) + len(chunks[index]) + 2
    return Prompt("".join([*parts, words.text(max(length - at, 1))]), shown)


def puzzling(chunks: Sequence[str], rng: np.random.Generator, words: Words, *, overlap: int) -> str:
    """A prompt of whole, cut, edited and continued chunks and other text, side by side or with something between.

    Args:
        chunks: to draw from; neighbours in it may be neighbours in a document.
        rng: draws.
        words: for what is no chunk.
        overlap: characters that neighbours share.
    """
    parts = []
    for _ in range(rng.integers(1, 9)):
        index = int(rng.integers(len(chunks) - 1))
        chunk = chunks[index]
        cut = int(rng.integers(1, len(chunk)))
        kinds = {
            "whole": chunk,
            "with the next one": chunk + chunks[index + 1][overlap:],
            "beginning": chunk[:cut],
            "end": chunk[cut:],
            "edited": f"{chunk[:cut]}*{chunk[cut + 1 :]}",
            "words": words.text(cut),
        }
        parts.append(kinds[rng.choice(list(kinds), p=(0.5, 0.1, 0.1, 0.1, 0.1, 0.1))])
        parts.append(rng.choice(("\n\n", " ", "", "\n---\n", "</doc>\n<doc>", "\n\n[2] ")))
    return "".join(parts)
