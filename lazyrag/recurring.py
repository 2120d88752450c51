"""Which texts recur in prompts without being known: system prompts, examples, windows around what was found.

A text is taken apart into lines, and each line and each pair of neighbouring lines is counted, by a keyed digest, so
that nothing can be read out of the counts. Lines that were seen often enough, and each next to the one before it as
often, are one text:

    prompt 1   question 1 | A, line 1 | A, line 2 | B ...
    prompt 2   question 2 | C ...     | A, line 1 | A, line 2
    found      A: both lines as one text; never A and B together, unless they always come so

Memory is bounded: what was not seen for longest is forgotten.
"""

from __future__ import annotations

import secrets
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from typing import NamedTuple, TypeAlias

from lazyrag.anchors import MIN_CHARS
from lazyrag.library import Library
from lazyrag.tokens import Tokenizer
from lazyrag.types import ChunkId

MAX_COUNTED = 1 << 16
"""Lines and pairs of lines that are counted at one time; about 300 bytes each."""

MIN_TOKENS = 64
"""A shorter text is left alone: as a chunk it would not see what stands before it, and save little for that."""

Digest: TypeAlias = bytes


class _Line(NamedTuple):
    """A line of a text, `text[start:end]`, and a digest of all that the prompt says before it."""

    start: int
    end: int
    digest: Digest
    before: Digest


class Recurring:
    """Counts texts, and says which were seen often enough. Not thread-safe.

    Args:
        sightings: how often is often enough, 2 or more.
        max_counted: see `MAX_COUNTED`.
    """

    def __init__(self, sightings: int, max_counted: int = MAX_COUNTED) -> None:
        self._sightings = sightings
        self._max_counted = max_counted
        # How often it was seen, and what stood before it the last time; what was seen last comes last.
        self._seen: OrderedDict[Digest, tuple[int, Digest]] = OrderedDict()
        self._key = secrets.token_bytes(32)

    def __len__(self) -> int:
        return len(self._seen)

    def look(self, texts: Sequence[str], *, is_mixed: bool) -> list[str]:
        """Count one prompt's texts; those parts that were now seen often enough, in order.

        Args:
            texts: the parts of the prompt in which no chunk is known, in its order.
            is_mixed: whether chunks stand between them. If not, what comes behind the same as the last time is not
                counted: the engine has the beginning of that prompt in its cache already.
        """
        lines = list(self._lines(texts))
        counted: set[Digest] = set()
        for of_text in lines:
            for n, line in enumerate(of_text):
                for digest in {line.digest, *([_pair(of_text[n - 1], line)] if n else [])} - counted:
                    counted.add(digest)
                    count, before = self._seen.pop(digest, (0, b""))
                    self._seen[digest] = count + (is_mixed or line.before != before), line.before
        found = [run for text, of_text in zip(texts, lines, strict=True) for run in self._runs(text, of_text)]
        while len(self._seen) > self._max_counted:
            self._seen.popitem(last=False)
        return list(dict.fromkeys(found))

    def forget(self, text: str) -> None:
        """Count this text's lines from the beginning again."""
        for lines in self._lines([text]):
            for line in lines:
                self._seen.pop(line.digest, None)

    def _lines(self, texts: Iterable[str]) -> Iterator[list[_Line]]:
        """The lines of each text that are not blank, without the whitespace around them."""
        before = blake2b(key=self._key, digest_size=8)
        for text in texts:
            lines, start = [], 0
            for line in text.splitlines(keepends=True):
                if content := line.strip():
                    at = start + line.index(content)
                    data = content.encode("utf-8", "surrogatepass")
                    digest = blake2b(data, key=self._key, digest_size=8).digest()
                    lines.append(_Line(at, at + len(content), digest, before.digest()))
                    before.update(data)
                start += len(line)
            yield lines

    def _runs(self, text: str, lines: Sequence[_Line]) -> Iterator[str]:
        run: list[_Line] = []
        for line in lines:
            is_often = self._is_often(line.digest)
            if run and not (is_often and self._is_often(_pair(run[-1], line))):
                yield text[run[0].start : run[-1].end]
                run = []
            if is_often:
                run.append(line)
        if run:
            yield text[run[0].start : run[-1].end]

    def _is_often(self, digest: Digest) -> bool:
        return self._seen.get(digest, (0, b""))[0] >= self._sightings


def _pair(first: _Line, second: _Line) -> Digest:
    return first.digest + second.digest


class AutoRegister:
    """Registers what recurs, as long as its KV stays within a budget. Thread-safe.

    Texts that spell a control token are left alone: as a chunk's they would be inert, and mean something else. So are
    those that the tokenizer cannot give back. Whatever is registered, a prompt's text stays as it is.

    Args:
        sightings: see `Recurring`.
        budget_bytes: of KV (or of text, where KV is no larger); what was not used for longest goes first.
    """

    def __init__(self, sightings: int, budget_bytes: int) -> None:
        self._recurring = Recurring(sightings)
        self._budget_bytes = budget_bytes
        self._held: OrderedDict[ChunkId, int] = OrderedDict()
        self._lock = threading.Lock()

    def look(
        self,
        texts: Iterable[str],
        used: Sequence[ChunkId],
        library: Library,
        tokenizer: Tokenizer,
        bytes_per_token: int,
    ) -> list[ChunkId]:
        """Count a prompt's texts, and register what recurs; the chunks that had to go for it, which are the caller's
        to forget.

        Args:
            texts: all that the prompt says but for its template.
            used: the chunks that were found in it.
            library: where texts are known.
            tokenizer: the model's.
            bytes_per_token: of KV.
        """
        with self._lock:
            for id in used:
                if id in self._held:
                    self._held.move_to_end(id)
            literals = [part for text in texts for part in _literals(text, library)]
            for text in self._recurring.look(literals, is_mixed=bool(used)):
                if len(text) < MIN_CHARS or tokenizer.spells_control(text) or not tokenizer.round_trips(text):
                    continue
                num_tokens = len(tokenizer.encode_plain(text))
                size = max(num_tokens * bytes_per_token, len(text.encode("utf-8", "surrogatepass")))
                if num_tokens >= MIN_TOKENS and size <= self._budget_bytes:
                    (id,) = library.register([text])
                    self._held[id] = size
            dropped = []
            while sum(self._held.values()) > self._budget_bytes:
                dropped.append(self._held.popitem(last=False)[0])
            for text in library.texts(dropped).values():
                self._recurring.forget(text)
            return dropped

    def disown(self, ids: Iterable[ChunkId]) -> None:
        """Take these for registered by hand: they stay."""
        with self._lock:
            for id in ids:
                self._held.pop(id, None)


def _literals(text: str, library: Library) -> Iterator[str]:
    """The parts of a text in which no chunk is known."""
    at = 0
    for occurrence in library.segmenter.find(text):
        yield text[at : occurrence.start]
        at = occurrence.end
    yield text[at:]
