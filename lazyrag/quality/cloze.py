"""Questions from documents alone: a sentence in which a rare word is blanked, to be found in its passage.

Copying a word is easier than answering a question, so what these questions say of a mode is the least that it loses.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from random import Random

from lazyrag.quality.data import Passage, Question

BLANK = "____"
MIN_WORDS, MAX_WORDS = 8, 40
"""Of a sentence."""

_SENTENCE = re.compile(r"[^.!?\n]+[.!?]")
_WORD = re.compile(r"\w[\w'-]*\w")


def questions(passages: Iterable[Passage], *, limit: int, seed: int = 0) -> list[Question]:
    """At most one question a passage, of at most `limit` passages, which are drawn at random."""
    known = list(passages)
    in_passages = Counter(word for passage in known for word in set(_words(passage.text)))
    random = Random(seed)
    random.shuffle(known)
    found: list[Question] = []
    for passage in known:
        blanks = list(_blanks(passage.text, in_passages))
        if blanks and len(found) < limit:
            sentence, word = random.choice(blanks)
            question = f"Which word is missing here? {sentence}"
            found.append(Question(f"cloze-{len(found)}", question, (word,), (passage,)))
    return found


def _blanks(text: str, in_passages: Counter[str]) -> Iterator[tuple[str, str]]:
    """Sentences with a blank, and the word that belongs there: one that no other passage has, and this one once."""
    once = {word for word, count in Counter(_words(text)).items() if count == 1 and in_passages[word] == 1}
    for match in _SENTENCE.finditer(text):
        sentence = " ".join(match.group().split())
        places = list(_WORD.finditer(sentence))
        if MIN_WORDS <= len(places) <= MAX_WORDS:
            # The first word would stand alone: in its place a model writes any other.
            for place in places[1:]:
                if place.group().lower() in once:
                    yield f"{sentence[: place.start()]}{BLANK}{sentence[place.end() :]}", place.group()


def _words(text: str) -> list[str]:
    return [match.group().lower() for match in _WORD.finditer(text)]
