"""FIND: which registered chunks occur in a text, and where.

The anchor index proposes; a chunk's id, which is a digest of its text, proves that all of it stands there, and for a
chunk that was cut the text itself is compared. Of what overlaps the best set is chosen: weighted interval scheduling,
where an occurrence weighs the characters that it covers, and fewer, longer ones win ties.

A chunk that was cut to fit weighs its longest common prefix less `CUT_LOSS`: reuse ends at a block border, so some of
it is lost. What the index cannot see (chunks below `anchors.MIN_CHARS`, chunks cut before their anchor) is found if the
caller hints at it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain, islice, pairwise
from typing import NamedTuple, TypeAlias

from lazyrag.anchors import MAX_PLACES, AnchorIndex
from lazyrag.types import ChunkId, Occurrence, canonical, chunk_id, digest

TextsOf: TypeAlias = Callable[[Sequence[ChunkId]], Mapping[ChunkId, str]]
"""Chunk ids -> canonical texts, asked for where a chunk may have been cut. What is not in the answer is not found."""

CUT_LOSS = 64
"""Characters; about a block of 16 tokens."""
SHORTEST_HINT = 16
"""Characters; a shorter text is not worth a piece of its own."""
MAX_SHORTER = 4
MAX_HINTED = 1 << 22
"""Characters of hinted texts that are compared, over all hints; what lies beyond is known without a look."""
PLACE_COST = 256
"""Characters; about as many are compared in the time that one place takes."""

_Span: TypeAlias = tuple[int, int, bool, ChunkId]
"""An occurrence as long as there are many: start, end, whether it is whole, chunk."""


class Found(NamedTuple):
    """What a text holds.

    Attributes:
        occurrences: see `Segmenter.find`.
        spans: all that was verified, chosen as an occurrence or not.
        unproposed: see `Candidates`; what hinted texts there was no time to look at, too.
    """

    occurrences: list[Occurrence]
    spans: list[_Span]
    unproposed: list[tuple[int, int]]

    @property
    def known(self) -> list[tuple[int, int]]:
        """Ranges of characters, in any order, that are a chunk's text, chosen as an occurrence or not.

        What overlaps a better one is among them, and what there was no time to compare (it may be a chunk's).
        """
        return self.unproposed + [(start, end) for start, end, *_ in self.spans]


class Segmenter:
    """Finds chunks in texts. Thread-safe if `get_text` is.

    Args:
        index: proposes chunks.
        get_text: see `TextsOf`.
    """

    def __init__(self, index: AnchorIndex, get_text: TextsOf) -> None:
        self.index = index
        self._get_text = get_text

    def find(self, text: str, hints: Iterable[str] = ()) -> list[Occurrence]:
        """The occurrences, ordered and disjoint; each is verified (module docstring).

        Args:
            text: a prompt or a part of one.
            hints: texts that probably occur, registered or not.
        """
        return self.search(text, hints).occurrences

    def search(self, text: str, hints: Iterable[str] = ()) -> Found:
        """As `find`, and with it all else of the text that is known to be chunks' text."""
        hinted = _by_id(hints) if hints else {}
        proposed = self.index.candidates(text)
        whole: list[_Span] = []
        doubtful: list[tuple[ChunkId, int]] = []
        places = (proposed.start, proposed.end, proposed.first, proposed.last, proposed.whole)
        columns = [column.tolist() for column in places]
        for id, start, end, first, last, hashes_agree in zip(proposed.chunk_ids, *columns, strict=True):
            if hashes_agree and digest(proposed.utf_8[first:last]) == id:
                whole.append((start, end, True, id))
            else:
                doubtful.append((id, start))
        texts = self._get_text([id for id, _ in doubtful]) if doubtful else {}
        in_order = sorted(whole) if doubtful and not hinted else []
        starts = [span[0] for span in in_order]
        cut: list[_Span] = []
        passed_over = proposed.unproposed
        if hinted:
            texts = {**texts, **hinted}
            spans, unseen = _hinted_spans(text, hinted)
            whole += [span for span in spans if span[2]]
            cut += [span for span in spans if not span[2]]
            passed_over = passed_over + unseen
        inside: list[tuple[ChunkId, int, _Span]] = []
        for id, start in doubtful:
            chunk = texts.get(id, "")
            i = bisect_right(starts, start) - 1
            if (
                i >= 0
                and not text.startswith(chunk[: max(0, in_order[i][1] - start) + 1], start)
                and _is_apart(in_order, i)
            ):
                # It ends inside a whole chunk: it adds nothing to what is known, and is chosen only if that one is not.
                inside.append((id, start, in_order[i]))
                continue
            shown = _num_shared(text, start, chunk)
            if shown and shown == len(chunk):
                whole.append((start, start + shown, True, id))
            elif shown > CUT_LOSS:
                cut.append((start, start + shown, False, id))
        if cut and inside:
            cut += _in_overlapped(text, cut, inside, texts)
        chosen = _schedule(dict.fromkeys([*whole, *_with_shorter(cut, whole)]) if hinted or cut else whole)
        occurrences = [Occurrence(id, start, end, is_whole) for start, end, is_whole, id in chosen]
        return Found(occurrences, whole + cut, passed_over)

    def texts(self, ids: Iterable[ChunkId], hints: Iterable[str] = ()) -> Mapping[ChunkId, str]:
        """The canonical texts of those chunks that are registered or hinted at."""
        hinted = _by_id(hints)
        missing = [id for id in dict.fromkeys(ids) if id not in hinted]
        return {**(self._get_text(missing) if missing else {}), **hinted}


def _by_id(hints: Iterable[str]) -> dict[ChunkId, str]:
    texts = (canonical(hint) for hint in hints)
    return {chunk_id(text): text for text in texts if len(text) >= SHORTEST_HINT}


def _hinted_spans(text: str, hinted: Mapping[ChunkId, str]) -> tuple[list[_Span], list[tuple[int, int]]]:
    """Where hinted texts stand, whole or cut, and ranges that may be theirs, which there was no time to look at.

    Together they hold all that is a hinted text's. Each hint has its share of the time, and what others left of
    theirs; its first place is always looked at.
    """
    # Whole texts first, side by side where they overlap themselves: these are worth most. Then wherever one begins.
    parts = [(id, chunk, chunk, len(chunk)) for id, chunk in hinted.items()]
    parts += [(id, chunk, chunk[: CUT_LOSS + 1], 1) for id, chunk in hinted.items()]
    spans: dict[_Span, None] = {}
    unseen: list[tuple[int, int]] = []
    left = MAX_HINTED
    for i, (id, chunk, part, step) in enumerate(parts):
        share = left // (len(parts) - i)
        left -= share
        start, number = text.find(part), 1
        while start >= 0 and share > 0:
            shown = _num_shared(text, start, chunk)
            spans[start, start + shown, shown == len(chunk), id] = None
            share -= PLACE_COST + shown
            start = text.find(part, start + (1 if number < MAX_PLACES else step))
            number += 1
        left += max(share, 0)
        if start >= 0 and i >= len(hinted):
            unseen.append((start, min(text.rfind(part) + len(chunk), len(text))))
    return list(spans), unseen


def _is_apart(spans: Sequence[_Span], i: int) -> bool:
    """Whether one of them, in order, overlaps neither the one before nor the one after."""
    start, end, *_ = spans[i]
    return (i == 0 or spans[i - 1][1] <= start) and (i + 1 == len(spans) or end <= spans[i + 1][0])


def _in_overlapped(
    text: str, cut: Sequence[_Span], inside: Iterable[tuple[ChunkId, int, _Span]], texts: Mapping[ChunkId, str]
) -> Iterator[_Span]:
    """Of cut chunks that end inside a whole one, those where a cut one that does not overlaps the whole one."""
    in_order = sorted(cut)
    reached = list(accumulate((span[1] for span in in_order), max))
    for id, start, (whole_start, whole_end, *_) in inside:
        number = bisect_left(in_order, (whole_end,))
        if number and reached[number - 1] > whole_start:
            shown = _num_shared(text, start, texts.get(id, ""))
            if shown > CUT_LOSS:
                yield start, start + shown, False, id


def _num_shared(text: str, start: int, chunk: str) -> int:
    """How many characters `text`, from `start` on, and `chunk` have in common; takes time in proportion to them."""
    least, most = 0, CUT_LOSS
    while text.startswith(chunk[least:most], start + least):
        if most >= len(chunk):
            return len(chunk)
        least, most = most, 2 * most
    while least + 1 < most:
        middle = (least + most) // 2
        if text.startswith(chunk[least:middle], start + least):
            least = middle
        else:
            most = middle
    return least


def _with_shorter(cut: Sequence[_Span], whole: Sequence[_Span]) -> Iterator[_Span]:
    """Cut chunks, also ending where something else starts.

    What follows a cut chunk may by chance begin with the chunk's next characters; then the two overlap a little.
    """
    starts = sorted({start for start, *_ in chain(cut, whole)}) if cut else []
    for span in cut:
        yield span
        start, end, is_whole, id = span
        nearby = range(bisect_left(starts, end), bisect_right(starts, max(start, end - CUT_LOSS)), -1)
        for i in islice(nearby, MAX_SHORTER):
            if starts[i - 1] - start > CUT_LOSS:
                yield start, starts[i - 1], is_whole, id


def _schedule(spans: Iterable[_Span]) -> list[_Span]:
    """The disjoint subset that weighs most (module docstring), in order."""
    in_order = sorted(spans)
    if all(one[1] <= other[0] for one, other in pairwise(in_order)):
        return in_order
    chosen: list[_Span] = []
    group: list[_Span] = []  # of spans that hang together
    group_end = 0
    for span in in_order:
        if span[0] >= group_end:
            chosen += _heaviest(group) if len(group) > 1 else group
            group = []
        group.append(span)
        group_end = max(group_end, span[1])
    return chosen + (_heaviest(group) if len(group) > 1 else group)


def _heaviest(spans: Iterable[_Span]) -> list[_Span]:
    """The same, all at once."""
    by_end = sorted(spans, key=lambda span: (span[1], span[0]))
    ends = [end for _, end, *_ in by_end]
    # best[n]: the most that the first n can weigh; before[n]: how many of them end before the n-th starts.
    best, before = [0], list[int]()
    for start, end, is_whole, _ in by_end:
        before.append(bisect_right(ends, start, hi=len(before)))
        weight = (end - start - (0 if is_whole else CUT_LOSS)) * (len(by_end) + 1) - 1
        best.append(max(best[-1], best[before[-1]] + weight))
    chosen: list[_Span] = []
    n = len(by_end)
    while n:
        if best[n] == best[n - 1]:
            n -= 1
        else:
            chosen.append(by_end[n - 1])
            n = before[n - 1]
    return chosen[::-1]
