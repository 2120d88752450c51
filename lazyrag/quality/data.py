"""Questions with what they are answered from, read from JSON lines.

    {"id", "question", "answers": [str, ...], "docs": [{"title", "text"}, ...]}      documents
    {"id", "question", "answers": [str, ...], "examples": [str, ...]}                few-shot exemplars

`id` and `title` may be missing, further keys are ignored. A row with too few passages gets some of other rows, at
random places between its own, and one with too many keeps its first, as a retriever's user would.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any, Literal, TypeAlias

from lazyrag.errors import InputError
from lazyrag.types import canonical

Order: TypeAlias = Literal["given", "shuffled"]


@dataclass(frozen=True, slots=True)
class Passage:
    """A text that may be reused, and what a prompt writes in front of it."""

    title: str
    text: str


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked, and what is known.

    Attributes:
        answers: every one of them is right; the first is the one whose likelihood counts.
        passages: in the prompt's order.
        few_shot: the passages are solved examples of the question, not documents.
    """

    id: str
    question: str
    answers: tuple[str, ...]
    passages: tuple[Passage, ...]
    few_shot: bool = False


@dataclass(frozen=True, slots=True)
class DataSet:
    """Questions of one origin.

    Attributes:
        name: of the file.
        digest: SHA-256 of what they are from.
        others: passages that nothing is asked about, to be mixed in.
    """

    name: str
    digest: str
    questions: tuple[Question, ...]
    others: tuple[Passage, ...] = ()


def load(path: Path) -> DataSet:
    """Read a file.

    Raises:
        InputError: it cannot be read, or a line is not a question; the message names the line.
    """
    try:
        raw = path.read_bytes()
        lines = raw.decode().split("\n")  # not at U+2028, which JSON may hold as it is
    except OSError as error:
        raise InputError(f"{path} cannot be read:", why=f"{error.strerror}.") from None
    except UnicodeDecodeError:
        raise InputError(f"{path} cannot be read:", why="it is not UTF-8 text.") from None
    questions = tuple(_question(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip())
    if not questions:
        raise InputError(f"{path} holds no questions.")
    return DataSet(path.name, hashlib.sha256(raw).hexdigest(), questions)


def _question(line: str, place: str) -> Question:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        raise _wrong(place, "it is not JSON") from None
    if not isinstance(row, dict):
        raise _wrong(place, "it is not a JSON object")
    question, answers = row.get("question"), row.get("answers")
    if not isinstance(question, str) or not question.strip():
        raise _wrong(place, "question is not a text")
    if not isinstance(answers, list) or not answers or not all(isinstance(a, str) and a.strip() for a in answers):
        raise _wrong(place, "answers is not a list of texts")
    if ("docs" in row) == ("examples" in row):
        raise _wrong(place, "it has neither docs nor examples, or both")
    passages = tuple(_passages(row, place))
    return Question(str(row.get("id", place)), question, tuple(answers), passages, "examples" in row)


def _passages(row: dict[str, Any], place: str) -> Iterator[Passage]:
    name = "examples" if "examples" in row else "docs"
    if not isinstance(row[name], list):
        raise _wrong(place, f"{name} is not a list")
    for item in row[name]:
        title, text = ("", item) if name == "examples" or not isinstance(item, dict) else _parts(item)
        if not isinstance(title, str) or not isinstance(text, str) or not text.strip():
            raise _wrong(place, f"{name} holds something without a text")
        yield Passage(title, canonical(text))


def _parts(item: dict[str, Any]) -> tuple[Any, Any]:
    return item.get("title") or "", item.get("text")


def _wrong(place: str, why: str) -> InputError:
    return InputError(f"{place} is not a question with its passages:", why=f"{why}.")


def draw(
    data: DataSet, *, passages: int, order: Order = "given", limit: int | None = None, seed: int = 0
) -> list[Question]:
    """The first questions, each with so many passages.

    What a question gets depends on its id and the seed alone, not on the limit.

    Raises:
        InputError: all rows together hold too few passages.
    """
    examples = _distinct(passage for q in data.questions if q.few_shot for passage in q.passages)
    documents = _distinct(passage for q in data.questions if not q.few_shot for passage in q.passages)
    documents = _distinct([*documents, *data.others])
    asked = data.questions[:limit]
    return [_drawn(q, examples if q.few_shot else documents, passages, order, seed) for q in asked]


def _distinct(passages: Iterable[Passage]) -> list[Passage]:
    return list({passage.text: passage for passage in passages}.values())


def _drawn(question: Question, pool: Sequence[Passage], count: int, order: Order, seed: int) -> Question:
    random = Random(f"{seed} {question.id}")
    own = _distinct(question.passages)[:count]
    texts = {passage.text for passage in own}
    missing = count - len(own)
    others = [passage for passage in random.sample(pool, min(count + missing, len(pool))) if passage.text not in texts]
    if len(others) < missing:
        raise InputError(
            f"The data holds {len(pool)} passages, which is too few for {count} a question.",
            fix=f"Ask for fewer: --docs {len(pool)}, at most; what is found holds for so many only.",
        )
    for passage in others[:missing]:
        own.insert(random.randint(0, len(own)), passage)
    if order == "shuffled":
        random.shuffle(own)
    return replace(question, passages=tuple(own))
