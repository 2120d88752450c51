"""DECIDE: a prompt -> pieces with their tokens, and which of them reuse a chunk's KV.

    prompt   preamble | literal |   chunk A   | literal |  chunk B, cut | literal ...
    tokens   by itself  by itself  A's own ids  by itself   B's first blocks   by itself

Each piece is tokenised by itself, and a chunk always has its own ids, whatever stands around it. The ids depend on the
prompt, the chunks and the preamble, never on the mode, so that modes can be compared token by token. The pieces' texts
concatenate to the prompt: nothing is sent that the application did not write, except the BOS token of models that want
one. (A sink's tokens are no part of the prompt: what the prompt's own tokens see of them are the chunks behind them.)

In mode `sink`, the first block of a chunk that the prompt begins with is computed in its place: no token of the prompt
sees the sink, and one that attention can rest on must stand at the front, where nothing else does.

What a mode says is computed in its place of a chunk (`ReuseMode`) is whole blocks. Of the chunk's blocks that
`recompute` may choose, it takes those with the highest scores; of a chunk without scores the first ones, which are the
ones that know least of what stands before them.

In a prompt given as a string, control tokens are meant, except in what is known to be documents' text: chunks, what is
left of a chunk that lost to an overlapping one, chunks too short to be found otherwise, hints. That holds even where
the application's own text is the same as a chunk's: a document that spells a prompt's header makes the header inert,
for nothing tells the two apart, and this is the safe side. Text that was altered, or never registered, is not known;
`special="plain"` makes everything inert.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from operator import itemgetter
from typing import TypeAlias

from lazyrag.chat import CONTENT, MIXED, TEMPLATE, TextPiece
from lazyrag.errors import ConfigError
from lazyrag.modes import ReuseMode, check_blocks
from lazyrag.segmenter import SHORTEST_HINT, Segmenter
from lazyrag.tokens import Tokenizer
from lazyrag.types import ChunkId, Occurrence, Piece, PromptPlan, canonical

TOO_SHORT = "shorter than the minimum"
CUT_TOO_EARLY = "too little of it is shown: less than a KV block"
AT_END = "the prompt ends in it, and its last token must be computed to go on from"
NO_ROUND_TRIP = "its text does not survive the tokenizer"
NO_PREAMBLE = "the prompt does not begin with the preamble that chunks are computed behind"
TOO_MANY = "more chunks than one request may have; the shortest are left out"
MODE_EXACT = "mode exact reuses only prefixes"
ALL_COMPUTED = "nearly all of it is computed in its place, as the mode says of a chunk's first tokens"
REASONS = (TOO_SHORT, CUT_TOO_EARLY, AT_END, NO_ROUND_TRIP, NO_PREAMBLE, TOO_MANY, MODE_EXACT, ALL_COMPUTED)
"""Why a chunk is not reused (`Piece.reason`)."""

TokensOf: TypeAlias = Callable[[ChunkId], Sequence[int]]
"""A chunk's own token ids; empty if they are not known."""

Scores: TypeAlias = Callable[[ChunkId, Sequence[int]], Sequence[float]]
"""(chunk, tokens that its KV is computed behind) -> for each of its tokens, how much its reused KV will differ from the
KV that it would have in its place, by any measure; empty if that is not known."""

SINK_TOKENS = 4
"""Of a sink that nobody chose. StreamingLLM's number; more make no difference there."""


def default_sink(tokenizer: Tokenizer) -> tuple[int, ...]:
    """What a model's prompts begin with, and line breaks: tokens that say nothing.

    The first is the model's BOS token if it has one, also where prompts are not given it, or else its EOS token, which
    stands between texts in training.
    """
    first = tokenizer.bos_id if tokenizer.bos_id is not None else tokenizer.eos_id
    line_break = tokenizer.encode_plain("\n")[-1:]
    begin = [first] if first is not None else []
    return tuple([*begin, *line_break * SINK_TOKENS][:SINK_TOKENS])


class Planner:
    """Plans prompts for one engine. Thread-safe if `get_tokens` is.

    Args:
        tokenizer: the model's.
        segmenter: finds the chunks.
        mode: of plans that ask for no other.
        block_size: tokens a KV block of the engine.
        preamble: text that prompts begin with: a string prompt's own beginning, or a chat's first content (its system
            message). In mode `prefix` chunks are computed behind it. It is a piece of its own in every mode.
        sink: tokens that chunks are computed behind in mode `sink`; empty: the tokenizer's `default_sink`.
        min_tokens: chunks with fewer tokens are not reused.
        max_segments: how many chunks one request may reuse; None: any number.
        get_tokens: where chunks' ids are kept; None, or what it does not know, is encoded here.
        get_short: chunks that are too short for the segmenter and spell control tokens.
        scores: for modes with `recompute`; None: no chunk has any.

    Raises:
        ConfigError: an unknown mode, or one that cannot be had with these settings.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        segmenter: Segmenter,
        *,
        mode: str | ReuseMode,
        block_size: int,
        preamble: str = "",
        sink: Sequence[int] = (),
        min_tokens: int = 16,
        max_segments: int | None = None,
        get_tokens: TokensOf | None = None,
        get_short: Callable[[], Iterable[str]] = tuple,
        scores: Scores | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.segmenter = segmenter
        self.block_size = block_size
        self.preamble = preamble
        self.sink = tuple(sink) or default_sink(tokenizer)
        self.mode = self._checked(mode)
        self.min_tokens = min_tokens
        self.max_segments = max_segments
        self._get_tokens = get_tokens
        self._get_short = get_short
        self.scores = scores
        self._chunk_ids = lru_cache(maxsize=4096)(self._encode_chunk)

    def plan_text(
        self,
        text: str,
        hints: Sequence[str] = (),
        *,
        special: str = "allow",
        mode: str | ReuseMode | None = None,
    ) -> PromptPlan:
        """Plan a prompt that the application wrote as one string.

        Args:
            text: the prompt.
            hints: see `Segmenter.find`.
            special: "allow": control tokens in it are meant, except in documents' text (module docstring); "plain":
                they are text.
            mode: None: the planner's.

        Raises:
            InputError: the text holds a lone surrogate.
            ConfigError: as of the planner.
        """
        if special not in ("allow", "plain"):
            raise ConfigError(f"special={special!r} is unknown.", fix='Use "allow" or "plain".')
        pieces = [TextPiece(text, MIXED if special == "allow" else CONTENT)]
        return self._plan(pieces, hints, may_add_bos=True, mode=self._checked(mode))

    def plan_pieces(
        self,
        pieces: Sequence[TextPiece],
        hints: Sequence[str] = (),
        *,
        may_add_bos: bool = False,
        mode: str | ReuseMode | None = None,
    ) -> PromptPlan:
        """Plan a prompt whose parts are told apart: a rendered chat (`RenderedChat.pieces`), for example.

        Args:
            pieces: they concatenate to the prompt.
            hints: see `Segmenter.find`.
            may_add_bos: whether it gets the BOS token that a string gets. A chat's template wrote one, if it wants one.
            mode: None: the planner's.

        Raises:
            InputError: the text holds a lone surrogate.
            ConfigError: as of the planner.
        """
        return self._plan(pieces, hints, may_add_bos=may_add_bos, mode=self._checked(mode))

    def _checked(self, mode: str | ReuseMode | None) -> ReuseMode:
        if mode is None:
            return self.mode
        mode = ReuseMode.parse(mode)
        if mode.kind == "prefix" and not self.preamble:
            raise ConfigError("Mode prefix needs a preamble.", fix="Set preamble=... or use mode sink.")
        check_blocks(mode, self.block_size)
        return mode

    def _plan(
        self, pieces: Sequence[TextPiece], hints: Sequence[str], *, may_add_bos: bool, mode: ReuseMode
    ) -> PromptPlan:
        split = self._preamble_end(pieces)
        preamble, rest = _split_at(pieces, split)
        out: list[Piece] = []
        for piece in preamble:
            out.append(self._literal(piece.text, piece.kind, start=not out))
        num_preamble = len(out)
        for piece in rest:
            for part in self._parts(piece, hints):
                out.append(part if isinstance(part, Piece) else self._literal(part.text, part.kind, start=not out))
        if may_add_bos and (front := self.tokenizer.front(out[0].token_ids if out else ())):
            out.insert(0, Piece("", tuple(front)))
            num_preamble += 1
        prefix_len = 0
        if mode.kind == "prefix" and split and len(out) > num_preamble:
            prefix_len = sum(len(piece.token_ids) for piece in out[:num_preamble])
        sink = self.sink if mode.kind == "sink" else ()
        behind = sink or [token for piece in out for token in piece.token_ids][:prefix_len]
        decided = tuple(self._decide(out, prefix_len, mode, behind))
        return PromptPlan(decided, prefix_len, sink if any(piece.reuse for piece in decided) else (), str(mode))

    # ---------------------------------------------------------------- pieces

    def _preamble_end(self, pieces: Sequence[TextPiece]) -> int:
        """How many characters of the prompt the preamble and what stands before it are; 0 if it does not begin so."""
        if not self.preamble:
            return 0
        text = "".join(piece.text for piece in pieces)
        if text.startswith(self.preamble):
            return len(self.preamble)
        opening = next((len(piece.text) for piece in pieces[:1] if piece.kind == TEMPLATE), 0)
        preamble = self.preamble.strip()
        content = text[opening:].lstrip()
        return len(text) - len(content) + len(preamble) if opening and content.startswith(preamble) else 0

    def _parts(self, piece: TextPiece, hints: Sequence[str]) -> Iterator[TextPiece | Piece]:
        """Literal texts and chunks in order."""
        if piece.kind == TEMPLATE:
            yield piece
            return
        found = self.segmenter.search(piece.text, hints)
        inert = _merged([*found.known, *self._short_places(piece.text, hints)]) if piece.kind == MIXED else []
        at = 0
        for occurrence in found.occurrences:
            yield from _divided(piece, at, occurrence.start, inert)
            chunk = self._chunk(piece.text[occurrence.start : occurrence.end], occurrence, hints)
            yield chunk
            at = occurrence.end
            if rest := piece.text[occurrence.start + len(chunk.text) : at]:
                # The last tokens of a cut chunk: still a document's text, in which nothing is a control token.
                yield TextPiece(rest, CONTENT)
        yield from _divided(piece, at, len(piece.text), inert)

    def _short_places(self, text: str, hints: Sequence[str]) -> Iterator[tuple[int, int]]:
        """Where texts stand that no segmenter finds and that spell a control token."""
        hinted = (hint for hint in map(canonical, hints) if len(hint) < SHORTEST_HINT)
        for short in {*self._get_short(), *filter(self.tokenizer.spells_control, hinted)}:
            start = text.find(short)
            while start >= 0:
                yield start, start + len(short)
                start = text.find(short, start + 1)

    def _literal(self, text: str, kind: str, *, start: bool) -> Piece:
        if kind == CONTENT:
            return Piece(text, tuple(self.tokenizer.encode_plain(text, start=start)))
        return Piece(text, tuple(self.tokenizer.encode_template(text, start=start)))

    def _chunk(self, shown: str, found: Occurrence, hints: Sequence[str]) -> Piece:
        """The piece of a chunk that is `shown`; of a cut one, its whole blocks."""
        if found.whole:
            ids = self._chunk_ids(found.chunk_id, shown)
            reason = NO_ROUND_TRIP
        else:
            text = self.segmenter.texts([found.chunk_id], hints).get(found.chunk_id, shown)
            ids, num_chars = self._head(text, max_chars=len(shown))
            shown = shown[: num_chars or None]
            reason = CUT_TOO_EARLY
        if ids:
            return Piece(shown, ids, found.chunk_id, reuse=True)
        return Piece(shown, tuple(self.tokenizer.encode_plain(shown)), found.chunk_id, reason=reason)

    def _encode_chunk(self, chunk_id: ChunkId, text: str) -> tuple[int, ...]:
        """The chunk's ids, checked against its text; empty if the text does not survive the tokenizer."""
        known = tuple(self._get_tokens(chunk_id)) if self._get_tokens else ()
        for ids in (known, tuple(self.tokenizer.encode_plain(text))):
            if ids and self.tokenizer.decode(ids) == text:
                return ids
        return ()

    def _head(self, text: str, *, max_chars: int, max_tokens: int | None = None) -> tuple[tuple[int, ...], int]:
        """The most whole blocks of a chunk within its first characters and tokens: their ids and their characters.

        Both are empty if no block fits, or if the ids do not stand for exactly that text.
        """
        ids, offsets = self.tokenizer.encode_plain_with_offsets(text)
        fitting = sum(end <= max_chars for _, end in offsets)
        fitting = min(fitting, len(ids) if max_tokens is None else max_tokens)
        for num_tokens in range(fitting // self.block_size * self.block_size, 0, -self.block_size):
            num_chars = offsets[num_tokens - 1][1]
            # A character may take several tokens; a block that ends among them decodes to something else.
            if self.tokenizer.decode(ids[:num_tokens]) == text[:num_chars]:
                return tuple(ids[:num_tokens]), num_chars
        return (), 0

    # ---------------------------------------------------------------- reuse

    def _decide(
        self, pieces: Sequence[Piece], prefix_len: int, mode: ReuseMode, behind: Sequence[int]
    ) -> Iterator[Piece]:
        """The pieces, with every chunk that the engine cannot or may not reuse marked so."""
        usable = [i for i, p in enumerate(pieces) if p.reuse and len(p.token_ids) >= self.min_tokens]
        longest_first = sorted(usable, key=lambda i: -len(pieces[i].token_ids))
        allowed = set(longest_first[: self.max_segments])
        spoken = [i for i, piece in enumerate(pieces) if piece.token_ids]  # a literal may have no tokens at all
        for i, piece in enumerate(pieces):
            if not piece.reuse:
                yield piece
            elif i not in usable:
                yield replace(piece, reuse=False, reason=TOO_SHORT)
            elif mode.is_exact:
                yield replace(piece, reuse=False, reason=MODE_EXACT)
            elif mode.kind == "prefix" and not prefix_len:
                yield replace(piece, reuse=False, reason=NO_PREAMBLE)
            elif i not in allowed:
                yield replace(piece, reuse=False, reason=TOO_MANY)
            else:
                needs_rest = mode.kind == "sink" and i == spoken[0]
                this = replace(mode, first_k=max(mode.first_k, self.block_size)) if needs_rest else mode
                first, *rest = self._without_end(piece) if i == spoken[-1] else [piece]
                yield from (self._in_part(first, this, behind), *rest)

    def _in_part(self, piece: Piece, mode: ReuseMode, behind: Sequence[int]) -> Piece:
        """A reusable chunk, with the blocks marked that are computed in its place all the same."""
        num_tokens = len(piece.token_ids)
        if not piece.reuse or piece.chunk_id is None or not (mode.first_k or mode.recompute):
            return piece
        starts = range(0, num_tokens, self.block_size)
        head = min(mode.first_k, num_tokens)
        chosen = set(range(0, head, self.block_size))
        if mode.recompute:
            scores = self.scores(piece.chunk_id, behind) if self.scores is not None else ()
            chosen |= self._most_different(scores, [start for start in starts if start >= head], mode.recompute)
        computed: list[tuple[int, int]] = []
        for start in sorted(chosen):
            end = min(start + self.block_size, num_tokens)
            if computed and computed[-1][1] == start:
                computed[-1] = computed[-1][0], end
            else:
                computed.append((start, end))
        if num_tokens - sum(end - start for start, end in computed) < self.min_tokens:
            return replace(piece, reuse=False, reason=ALL_COMPUTED)
        return replace(piece, computed=tuple(computed))

    def _most_different(self, scores: Sequence[float], starts: Sequence[int], share: float) -> set[int]:
        """That share of a chunk's blocks, given by their first tokens, in which reused KV is expected to be worst."""

        def score(start: int) -> float:
            block = scores[start : start + self.block_size]
            return sum(block) / len(block) if len(block) else 0.0

        return set(sorted(starts, key=lambda start: (-score(start), start))[: int(share * len(starts) + 0.5)])

    def _without_end(self, piece: Piece) -> Iterator[Piece]:
        """A chunk that the prompt ends in: its last tokens, up to a block border, are computed."""
        ids, num_chars = self._head(piece.text, max_chars=len(piece.text), max_tokens=len(piece.token_ids) - 1)
        if len(ids) < self.min_tokens or ids != piece.token_ids[: len(ids)]:
            yield replace(piece, reuse=False, reason=AT_END)
            return
        yield replace(piece, text=piece.text[:num_chars], token_ids=ids)
        yield Piece(piece.text[num_chars:], piece.token_ids[len(ids) :], reason=AT_END)


def _merged(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The union of ranges, as disjoint ones, ascending."""
    out: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if out and start <= out[-1][1]:
            out[-1] = out[-1][0], max(end, out[-1][1])
        else:
            out.append((start, end))
    return out


def _divided(piece: TextPiece, start: int, end: int, inert: Sequence[tuple[int, int]]) -> Iterator[TextPiece]:
    """A range of a literal text, in which these (disjoint, ascending) ranges are content."""
    at = start
    for inert_start, inert_end in inert[bisect_right(inert, start, key=itemgetter(1)) :]:
        if inert_start >= end or at >= end:
            break
        if at < inert_start:
            yield TextPiece(piece.text[at:inert_start], piece.kind)
        yield TextPiece(piece.text[max(at, inert_start) : min(inert_end, end)], CONTENT)
        at = min(inert_end, end)
    if at < end:
        yield TextPiece(piece.text[at:end], piece.kind)


def _split_at(pieces: Sequence[TextPiece], end: int) -> tuple[list[TextPiece], list[TextPiece]]:
    """The pieces of the first `end` characters, and the others; empty ones are left out."""
    before, after = [], []
    for piece in pieces:
        cut = min(len(piece.text), max(end, 0))
        before.append(TextPiece(piece.text[:cut], piece.kind))
        after.append(TextPiece(piece.text[cut:], piece.kind))
        end -= len(piece.text)
    return [piece for piece in before if piece.text], [piece for piece in after if piece.text]
