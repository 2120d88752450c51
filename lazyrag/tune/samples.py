"""Questions -> samples: which documents are trained on, which question comes when with which others, and its tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from random import Random

from lazyrag.client import SYSTEM, LazyRAG
from lazyrag.config import Config
from lazyrag.errors import ConfigError, InputError
from lazyrag.modes import ReuseMode
from lazyrag.plan import default_sink
from lazyrag.quality import ask
from lazyrag.quality.data import Passage, Question
from lazyrag.tune.layout import Part, Row, lay_out
from lazyrag.types import ChunkId, chunk_id

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Sample:
    """A question's tokens.

    Attributes:
        parts: literals and chunks of the prompt, in order; the last part is literal.
        prefix_len: tokens of the preamble.
        sink: tokens that chunks are computed behind in mode sink.
        answer: tokens of the answer.
        end: the token that ends an answer; empty if the model has none.
    """

    parts: tuple[Part, ...]
    prefix_len: int
    sink: tuple[int, ...]
    answer: tuple[int, ...]
    end: tuple[int, ...]

    @property
    def num_tail(self) -> int:
        """Tokens behind the last chunk, answer and end included."""
        return len(self.parts[-1][0]) + len(self.answer) + len(self.end)

    def prompt(self, mode: ReuseMode) -> Row:
        """The row of the prompt alone."""
        return lay_out(self.parts, mode, prefix_len=self.prefix_len, sink=self.sink)

    def row(self, mode: ReuseMode) -> Row:
        """The row of prompt, answer and end."""
        *parts, (last, _) = self.parts
        parts.append(([*last, *self.answer, *self.end], False))
        return lay_out(parts, mode, prefix_len=self.prefix_len, sink=self.sink)


class Sampler:
    """Makes samples with the client that asks engines, so that the tokens are those which an engine is sent.

    Args:
        model: the model's folder.
        passages: all that will be asked about; they are the known chunks.
    """

    def __init__(self, model: Path, passages: Iterable[Passage]) -> None:
        # The mode names the preamble's tokens; pieces and their tokens are the same in every mode.
        self._rag = LazyRAG(Config(model=str(model), mode="prefix", preamble=SYSTEM, block_size=BLOCK_SIZE))
        self._rag.register(passage.text for passage in passages)
        self.tokenizer = self._rag.tokenizer
        self._sink = default_sink(self.tokenizer)

    def sample(self, question: Question) -> Sample:
        """The tokens of a question with its passages, and of its first answer."""
        plan = self._rag.plan(ask.prompt(self._rag, question, chat=True))
        parts: list[tuple[list[int], bool]] = [([], False)]
        for piece in plan.pieces:
            if piece.reuse:
                parts += [(list(piece.token_ids), True), ([], False)]
            else:
                parts[-1][0].extend(piece.token_ids)
        is_chat = self.tokenizer.chat_template is not None and not question.few_shot
        answer = question.answers[0] if is_chat else f" {question.answers[0]}"
        end = self.tokenizer.eos_id
        return Sample(
            tuple(part for part in parts if part[0]),
            plan.prefix_len,
            self._sink,
            tuple(self.tokenizer.encode_plain(answer)),
            () if end is None else (end,),
        )


# ---------------------------------------------------------------- training and held-out documents


@dataclass(frozen=True, slots=True)
class Split:
    """Questions whose documents are trained on, and questions whose documents are not; no document is on both sides."""

    training: list[Question]
    held_out: list[Question]


def split(asked: Sequence[Question], share: float) -> Split:
    """Keep training and held-out documents apart.

    Questions that share a document, and those that share one with these, stay together. The side is decided by the
    digest of a document, so it does not depend on order, seed or file.

    Args:
        asked: all questions.
        share: of the groups of questions that is held out, in [0, 1).

    Raises:
        ConfigError: nothing is left to train on.
    """
    leader: dict[ChunkId, ChunkId] = {}

    def root(id: ChunkId) -> ChunkId:
        while (up := leader.setdefault(id, id)) != id:
            leader[id] = up = leader[up]
            id = up
        return id

    for question in asked:
        for passage in question.passages:
            a, b = sorted((root(chunk_id(question.passages[0].text)), root(chunk_id(passage.text))))
            leader[b] = a
    sides: tuple[list[Question], list[Question]] = ([], [])
    for question in asked:
        if question.passages:
            sides[_fraction(root(chunk_id(question.passages[0].text))) < share].append(question)
    if not sides[0]:
        raise ConfigError("No questions are left to train on.", why="They share documents, or have none.")
    return Split(*sides)


def _fraction(id: ChunkId) -> float:
    return int.from_bytes(blake2b(id.encode(), digest_size=8).digest(), "big") / 2**64


def passages_of(asked: Iterable[Question]) -> list[Passage]:
    """The different passages of questions, in order."""
    return list({passage.text: passage for question in asked for passage in question.passages}.values())


def ids_of(asked: Iterable[Question]) -> list[ChunkId]:
    """What names their passages: the ids that they have as chunks."""
    return [chunk_id(passage.text) for passage in passages_of(asked)]


def with_distractors(question: Question, pool: Sequence[Passage], count: int, random: Random) -> Question:
    """The question with `count` passages in random order: its own (the first ones if they are more) and others.

    Args:
        question: whose passages are kept.
        pool: where the others are drawn from, without replacement.
        count: of passages; fewer if the pool has no more.
        random: draws and shuffles.
    """
    passages = list(question.passages[:count])
    held = {passage.text for passage in question.passages}
    # Some of those drawn may be the question's own.
    drawn = random.sample(pool, min(len(pool), count + len(held)))
    passages += [passage for passage in drawn if passage.text not in held][: count - len(passages)]
    random.shuffle(passages)
    return replace(question, passages=tuple(passages))


# ---------------------------------------------------------------- order


class Draws:
    """Which questions each step trains on: a function of seed and step alone, so a run can go on anywhere.

    Args:
        asked: the training questions; each comes once in every epoch, in an order of that epoch.
        docs: passages of a prompt: the question's own, filled up with other questions' passages, shuffled.
        batch: questions of a step.
        seed: of everything that is drawn.
    """

    def __init__(self, asked: Sequence[Question], *, docs: int, batch: int, seed: int) -> None:
        self._asked, self._docs, self._batch, self._seed = asked, docs, batch, seed
        self._pool = passages_of(asked)
        self._epoch, self._order = -1, list[int]()

    def step(self, number: int) -> Iterator[tuple[Question, Random]]:
        """The questions of a step, and for each what else is to be drawn for it."""
        for index in range(number * self._batch, (number + 1) * self._batch):
            epoch, place = divmod(index, len(self._asked))
            if epoch != self._epoch:
                self._epoch, self._order = epoch, list(range(len(self._asked)))
                Random(f"{self._seed} epoch {epoch}").shuffle(self._order)
            random = Random(f"{self._seed} sample {index}")
            question = self._asked[self._order[place]]
            yield with_distractors(question, self._pool, self._docs, random), random


def check_length(rows: Iterable[Row], limit: int) -> None:
    """Refuse prompts that the model has no positions for.

    Raises:
        InputError: one is too long.
    """
    longest = max((max(row.positions) + 1 for row in rows), default=0)
    if longest > limit:
        raise InputError(
            f"A prompt with its answer has {longest} tokens, more than the model's {limit}.",
            fix="Ask with fewer documents (--docs), or leave the long ones out.",
        )
