"""Questions with passages and known answers: read from JSONL, given distractors, made from documents, put into prompts.

A line of a file is `{"id", "question", "answers": [text], "docs": [{"title", "text"}]}`; other keys are passed over.
What measures a model and what trains it send the same prompt, `prompt`: that of `LazyRAG.query`.
"""

from __future__ import annotations

import json
import re
import string
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from lazyrag.chat import CONTENT, MIXED, Message, TextPiece
from lazyrag.errors import InputError
from lazyrag.types import ChunkId, chunk_id

_SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[\"“(]?[A-Z0-9])")
_WORD = re.compile(r"[^\W_]+(?:['’.,-][^\W_]+)*")
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
BLANK = "_____"
SENTENCE_WORDS = range(8, 60)
"""Words of a sentence that is asked about: with fewer there is no context, with more it is a list or a table."""


@dataclass(frozen=True, slots=True)
class Passage:
    """A document, or a part of one, that a question is to be answered from. `id` is that of its text as a chunk."""

    title: str
    text: str

    @property
    def id(self) -> ChunkId:
        return chunk_id(self.text)


@dataclass(frozen=True, slots=True)
class Question:
    """A question, the answers that count as right (the first is the one to learn), and its passages in given order."""

    id: str
    question: str
    answers: tuple[str, ...]
    passages: tuple[Passage, ...]


def read(path: Path) -> list[Question]:
    """The questions of a JSONL file.

    Raises:
        InputError: the file cannot be read, or a line is no such question; the message names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # not at U+2028, which JSON may hold
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise InputError(f"The questions in {path} cannot be read:", why=f"{why}.") from None
    questions = [_parsed(line, f"line {number} of {path}") for number, line in enumerate(lines, 1) if line.strip()]
    if not questions:
        raise InputError(f"There are no questions in {path}.")
    return questions


def _parsed(line: str, where: str) -> Question:
    try:
        row: Any = json.loads(line)
        question, answers = row["question"], row["answers"]
        passages = tuple(Passage(doc.get("title") or "", doc["text"]) for doc in row["docs"])
        texts = [question, *answers, *(text for passage in passages for text in (passage.title, passage.text))]
        for text in texts:
            text.encode()
        if not (isinstance(answers, list) and answers and question.strip() and all(map(str.strip, answers))):
            raise ValueError
        return Question(str(row.get("id", "")), question, tuple(answers), passages)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise InputError(
            f"There is no question in {where}.",
            fix='A line is {"id": text, "question": text, "answers": [text], "docs": [{"title": text, "text": text}]}.',
        ) from None


def with_distractors(question: Question, pool: Sequence[Passage], count: int, random: Random) -> Question:
    """The question with `count` passages in random order: its own (the first ones if they are more) and others.

    Args:
        question: whose passages are kept.
        pool: where the others are drawn from, without replacement.
        count: of passages; fewer if the pool has no more.
        random: draws and shuffles.
    """
    passages = list(question.passages[:count])
    held = {passage.id for passage in question.passages}
    # Some of those drawn may be the question's own, or twice in the pool.
    for passage in random.sample(pool, min(len(pool), 2 * count + len(held))):
        if len(passages) < count and passage.id not in held:
            held.add(passage.id)
            passages.append(passage)
    random.shuffle(passages)
    return replace(question, passages=tuple(passages))


def prompt(question: Question, system: str, *, has_template: bool) -> list[Message] | list[TextPiece]:
    """What is sent for a question: numbered passages with their titles, then the question.

    Args:
        question: with its passages in order; without any, the model has to know the answer.
        system: the system message.
        has_template: whether the model has a chat template.
    """
    numbered = (f"[{i}] {passage.title}\n{passage.text}\n\n" for i, passage in enumerate(question.passages, 1))
    content = f"{''.join(numbered)}Question: {question.question}"
    if has_template:
        return [Message("system", system), Message("user", content)]
    return [TextPiece(f"{system}\n\n", MIXED), TextPiece(f"{content}\nAnswer:", CONTENT)]


def canonical_answer(question: Question, *, has_template: bool) -> str:
    """The text that is to follow the prompt: the first of the right answers."""
    return question.answers[0].strip() if has_template else f" {question.answers[0].strip()}"


def cloze(passages: Iterable[Passage], count: int, seed: int = 0) -> list[Question]:
    """Questions made from texts: a sentence with its rarest name or number left out, which is the answer.

    Args:
        passages: what is asked about. A sentence whose only rare word repeats in it, or has none, is passed over.
        count: of questions, at most; no two are about the same sentence.
        seed: chooses the sentences.
    """
    unique = list({passage.id: passage for passage in passages}.values())
    frequency = Counter(word for passage in unique for word in {w.group() for w in _WORD.finditer(passage.text)})
    places = [
        (passage, sentence)
        for passage in unique
        for sentence in dict.fromkeys(_SENTENCE.split(passage.text))
        if len(sentence.split()) in SENTENCE_WORDS
    ]
    Random(seed).shuffle(places)
    made: list[Question] = []
    for passage, sentence in places:
        if len(made) == count:
            break
        if (found := _rarest(sentence, frequency)) is not None:
            start, end = found
            masked = " ".join(f"{sentence[:start]}{BLANK}{sentence[end:]}".split())
            question = f"What is left out here? {masked}"
            made.append(Question(f"cloze-{len(made)}", question, (sentence[start:end],), (passage,)))
    return made


def _rarest(sentence: str, frequency: Counter[str]) -> tuple[int, int] | None:
    """Where the sentence's rarest name or number stands, with the names around it; None if it has none of use."""
    words = list(_WORD.finditer(sentence))
    # The first word is in upper case whatever it is.
    names = [n for n, word in enumerate(words) if n and (word.group()[0].isupper() or word.group()[0].isdigit())]
    if not names:
        return None
    first = last = min(names, key=lambda n: frequency[words[n].group()])
    if words[first].group()[0].isupper():
        while first - 1 in names and sentence[words[first - 1].end() : words[first].start()] == " ":
            first -= 1
        while last + 1 in names and sentence[words[last].end() : words[last + 1].start()] == " ":
            last += 1
    start, end = words[first].start(), words[last].end()
    return (start, end) if sentence.count(sentence[start:end]) == 1 else None


def exact_match(answer: str, golds: Iterable[str]) -> bool:
    """Whether an answer is one of the right ones, as SQuAD 1.1 compares (Rajpurkar et al. 2016)."""
    return any(normalised(answer) == normalised(gold) for gold in golds)


def f1(answer: str, golds: Iterable[str]) -> float:
    """The largest token F1 of an answer and a right one, in [0, 1], as SQuAD 1.1 computes it."""
    return max(_f1(normalised(answer).split(), normalised(gold).split()) for gold in golds)


def _f1(answer: list[str], gold: list[str]) -> float:
    common = (Counter(answer) & Counter(gold)).total()
    return 2 * common / (len(answer) + len(gold)) if common else 0.0


def normalised(answer: str) -> str:
    """Lower case, without punctuation, articles and extra white space."""
    return " ".join(_ARTICLES.sub(" ", answer.lower().translate(_PUNCTUATION)).split())
