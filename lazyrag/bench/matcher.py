"""Which chunks stand in a text, the slow and simple way: an oracle for the segmenter, which shares no code with it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lazyrag.types import Occurrence

HEAD = 32
"""Characters; shorter chunks are not looked for."""


class Matcher:
    """Looks at every place of a text for every chunk that begins like it.

    Args:
        chunks: canonical texts by id.
    """

    def __init__(self, chunks: Iterable[tuple[str, str]]) -> None:
        self._texts = dict(chunks)
        # Chunks with the same beginning, by their lengths: boilerplate begins thousands of them.
        self._beginning_with: dict[str, dict[int, dict[str, str]]] = {}
        for id, text in self._texts.items():
            self._beginning_with.setdefault(text[:HEAD], {}).setdefault(len(text), {})[text] = id

    def whole(self, text: str) -> list[Occurrence]:
        """Every place where all of a chunk stands, overlapping or not, in order of their ends."""
        found = []
        for start in range(len(text)):
            for length, ids in self._beginning_with.get(text[start : start + HEAD], {}).items():
                if id := ids.get(text[start : start + length]):
                    found.append(Occurrence(id, start, start + length))
        return sorted(found, key=lambda occurrence: occurrence.end)

    def faults(self, text: str, found: Sequence[Occurrence], *, cut_loss: int) -> list[str]:
        """What is wrong with the answer of a segmenter; empty if nothing is.

        Wrong is an occurrence that is not what it says, that overlaps another one, or a cut one that is too short; and
        an answer that covers less than whole chunks could, or more than it can if there is nothing cut in it.

        Args:
            text: what was searched.
            found: the answer.
            cut_loss: characters that a cut chunk weighs less than a whole one.
        """
        whole = self.whole(text)
        faults = []
        end = 0
        for occurrence in found:
            if occurrence.whole and occurrence not in whole:
                faults.append(f"no such chunk at {occurrence.start}")
            if not occurrence.whole and not self._begins(text, occurrence, cut_loss):
                faults.append(f"no beginning of such a chunk at {occurrence.start}")
            if occurrence.start < end:
                faults.append(f"an overlap at {occurrence.start}")
            end = occurrence.end
        weight = sum(o.end - o.start - (0 if o.whole else cut_loss) for o in found)
        best = _most_characters(whole)
        if weight < best or (weight > best and all(occurrence.whole for occurrence in found)):
            faults.append(f"{weight} characters instead of {best}")
        return faults

    def _begins(self, text: str, occurrence: Occurrence, cut_loss: int) -> bool:
        shown = text[occurrence.start : occurrence.end]
        chunk = self._texts.get(occurrence.chunk_id, "")
        return len(shown) > cut_loss and chunk.startswith(shown) and chunk != shown


def _most_characters(occurrences: Sequence[Occurrence]) -> int:
    """The most characters that disjoint ones of them cover, given in order of their ends."""
    most = [0] * (len(occurrences) + 1)
    for n, last in enumerate(occurrences):
        before = [most[k] for k in range(n + 1) if k == 0 or occurrences[k - 1].end <= last.start]
        most[n + 1] = max(most[n], last.end - last.start + max(before))
    return most[-1]
