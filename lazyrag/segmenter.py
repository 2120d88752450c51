"""FIND: which registered chunks occur in a text, and where.

The anchor index proposes, the chunks' texts decide, and of what overlaps the best set is chosen: weighted interval
scheduling, where an occurrence weighs the characters that it covers, and fewer, longer ones win ties.

A chunk that was cut to fit weighs its longest common prefix less `CUT_LOSS`: reuse ends at a block border, so some of
it is lost. What the index cannot see (chunks below `anchors.MIN_CHARS`, chunks cut before their anchor) is found if the
caller hints at it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import NamedTuple, TypeAlias

from lazyrag.anchors import MAX_PLACES, AnchorIndex
from lazyrag.types import ChunkId, Occurrence, canonical, chunk_id

TextsOf: TypeAlias = Callable[[Sequence[ChunkId]], Mapping[ChunkId, str]]
"""Chunk ids -> canonical texts. What is not in the answer (deleted, another namespace) is not found."""

CUT_LOSS = 64
"""Characters; about a block of 16 tokens."""
SHORTEST_HINT = 16
"""Characters; a shorter text is not worth a piece of its own."""
MAX_SHORTER = 4


class Found(NamedTuple):
    """What a text holds.

    Attributes:
        occurrences: see `Segmenter.find`.
        known: ranges of characters, in any order, that are a chunk's text, chosen as an occurrence or not: what
            overlaps a better one, and what there was no time to compare (it may be a chunk's).
    """

    occurrences: list[Occurrence]
    known: list[tuple[int, int]]


class Segmenter:
    """Finds chunks in texts. Thread-safe if `get_text` is.

    Args:
        index: proposes chunks.
        get_text: the texts by which proposals are verified.
    """

    def __init__(self, index: AnchorIndex, get_text: TextsOf) -> None:
        self.index = index
        self._get_text = get_text

    def find(self, text: str, hints: Iterable[str] = ()) -> list[Occurrence]:
        """The occurrences, ordered and disjoint; each was compared with the chunk's text, character by character.

        Args:
            text: a prompt or a part of one.
            hints: texts that probably occur, registered or not.
        """
        return self.search(text, hints).occurrences

    def search(self, text: str, hints: Iterable[str] = ()) -> Found:
        """As `find`, and with it all else of the text that is known to be chunks' text."""
        hinted = _by_id(hints)
        proposed = self.index.candidates(text)
        texts = {**self.texts(proposed.chunk_ids), **hinted}
        places = dict.fromkeys(
            chain(zip(proposed.chunk_ids, proposed.start.tolist(), strict=True), _hinted_places(text, hinted))
        )
        whole: list[Occurrence] = []
        cut: list[Occurrence] = []
        for id, start in places:
            chunk = texts.get(id, "")
            shown = _num_shared(text, start, chunk)
            if shown and shown == len(chunk):
                whole.append(Occurrence(id, start, start + shown))
            elif shown > CUT_LOSS:
                cut.append(Occurrence(id, start, start + shown, whole=False))
        known = [*proposed.known, *((o.start, o.end) for o in chain(whole, cut))]
        return Found(_schedule([*whole, *_with_shorter(cut, whole)]), known)

    def texts(self, ids: Iterable[ChunkId], hints: Iterable[str] = ()) -> Mapping[ChunkId, str]:
        """The canonical texts of those chunks that are registered or hinted at."""
        hinted = _by_id(hints)
        missing = [id for id in dict.fromkeys(ids) if id not in hinted]
        return {**(self._get_text(missing) if missing else {}), **hinted}


def _by_id(hints: Iterable[str]) -> dict[ChunkId, str]:
    texts = (canonical(hint) for hint in hints)
    return {chunk_id(text): text for text in texts if len(text) >= SHORTEST_HINT}


def _hinted_places(text: str, hinted: Mapping[ChunkId, str]) -> Iterator[tuple[ChunkId, int]]:
    """Where a hinted text begins, whole or cut."""
    for id, chunk in hinted.items():
        for part in {chunk, chunk[: CUT_LOSS + 1]}:
            start, number = text.find(part), 1
            while start >= 0:
                yield id, start
                start = text.find(part, start + (1 if number < MAX_PLACES else len(chunk)))
                number += 1


def _num_shared(text: str, start: int, chunk: str) -> int:
    """How many characters `text`, from `start` on, and `chunk` have in common; takes time in proportion to them."""
    if text.startswith(chunk, start):
        return len(chunk)
    least, most = 0, CUT_LOSS
    while text.startswith(chunk[least:most], start + least):
        least, most = most, 2 * most
    return least + bisect_left(
        range(1, most - least + 1), True, key=lambda n: not text.startswith(chunk[least : least + n], start + least)
    )


def _with_shorter(cut: Sequence[Occurrence], whole: Sequence[Occurrence]) -> Iterator[Occurrence]:
    """Cut chunks, also ending where something else starts.

    What follows a cut chunk may by chance begin with the chunk's next characters; then the two overlap a little.
    """
    starts = sorted({occurrence.start for occurrence in chain(cut, whole)})
    for occurrence in cut:
        yield occurrence
        shortest = max(occurrence.start, occurrence.end - CUT_LOSS)
        nearby = range(bisect_left(starts, occurrence.end), bisect_right(starts, shortest), -1)
        for i in islice(nearby, MAX_SHORTER):
            end = starts[i - 1]
            if end - occurrence.start > CUT_LOSS:
                yield Occurrence(occurrence.chunk_id, occurrence.start, end, whole=False)


def _schedule(occurrences: Sequence[Occurrence]) -> list[Occurrence]:
    """The disjoint subset that weighs most (module docstring), in order."""
    by_end = sorted(occurrences, key=lambda o: (o.end, o.start))
    ends = [o.end for o in by_end]
    # best[n]: the most that the first n can weigh; before[n]: how many of them end before the n-th starts.
    best, before = [0], list[int]()
    for o in by_end:
        covered = o.end - o.start - (0 if o.whole else CUT_LOSS)
        before.append(bisect_right(ends, o.start, hi=len(before)))
        weight = covered * (len(by_end) + 1) - 1
        best.append(max(best[-1], best[before[-1]] + weight))
    chosen: list[Occurrence] = []
    n = len(by_end)
    while n:
        if best[n] == best[n - 1]:
            n -= 1
        else:
            chosen.append(by_end[n - 1])
            n = before[n - 1]
    return chosen[::-1]
