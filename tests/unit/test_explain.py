from __future__ import annotations

import html
import json
import random
import textwrap
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lazyrag.backend.fake import FakeEngine
from lazyrag.client import LazyRAG
from lazyrag.explain import (
    CHUNK,
    CUT,
    EDITED,
    ESCAPED,
    FIRST_USE,
    FIXES,
    HTML,
    LITERAL,
    NOT_REGISTERED,
    OTHER_NAMESPACE,
    PREAMBLE,
    UNICODE,
    WHITESPACE,
    Alterations,
    Altered,
    explain,
)
from lazyrag.plan import AT_END, TOO_SHORT
from lazyrag.segmenter import Segmenter
from lazyrag.types import COMPUTED, DISK, HBM, Piece, PromptPlan, Reuse, canonical, chunk_id

A, B, C, D = (letter * 32 for letter in "abcd")

PLAN = PromptPlan(
    (
        Piece("You are careful.", (1, 2, 3)),
        Piece("Context:", (4,)),
        Piece("chunk a", (5, 6), A, reuse=True),
        Piece("chunk b", (7, 8, 9), B, reuse=True),
        Piece("chunk c", (10,), C, reason=TOO_SHORT),
        Piece("chunk d", (11, 12), D, reuse=True),
        Piece(", its end", (13,), reason=AT_END),
    ),
    prefix_len=3,
)


def test_each_piece_has_a_row_that_says_what_became_of_it() -> None:
    rows = explain(PLAN, Reuse(13, 5, (HBM, COMPUTED, DISK)))
    assert [row.piece for row in rows] == list(PLAN.pieces)
    assert [(row.kind, row.num_tokens, row.reused, row.source, row.reason) for row in rows] == [
        (PREAMBLE, 3, False, "", ""),
        (LITERAL, 1, False, "", ""),
        (CHUNK, 2, True, HBM, ""),
        (CHUNK, 3, False, COMPUTED, FIRST_USE),
        (CHUNK, 1, False, "", TOO_SHORT),
        (CHUNK, 2, True, DISK, ""),
        (LITERAL, 1, False, "", AT_END),
    ]


def test_before_the_request_has_run_sources_are_unknown() -> None:
    rows = explain(PLAN)
    assert {row.source for row in rows} == {""}
    assert not any(row.reused for row in rows)
    assert [row.reason for row in rows if row.reason] == [TOO_SHORT, AT_END]


def test_pieces_that_hold_altered_chunks_say_so() -> None:
    found = [Altered(HTML, A, "Do this."), Altered(HTML, B, "Do this.")]
    rows = explain(PLAN, Reuse(13, 5, (HBM, COMPUTED, DISK)), altered_in=lambda pieces: {0: found, 1: found, 3: found})
    assert [(row.reason, row.nearest) for row in rows[:4]] == [
        ("", None),  # of a preamble nothing is found
        ("Do this.", A),
        ("", None),
        (f"{FIRST_USE}. Do this.", A),
    ]


def test_a_literal_long_enough_to_be_a_document_is_told_apart_from_the_applications_words() -> None:
    long = PromptPlan((Piece("Answer:", (1,)), Piece("a text of nobody", tuple(range(16)))))
    assert [row.reason for row in explain(long)] == ["", NOT_REGISTERED]
    rows = explain(long, is_anothers=lambda text: "nobody" in text)
    assert [row.reason for row in rows] == ["", OTHER_NAMESPACE]


def test_a_computed_chunk_says_why() -> None:
    rows = explain(PLAN, Reuse(13, 0, (COMPUTED, COMPUTED, HBM)), why_computed=lambda id: f"because {id[0]}")
    assert [row.reason for row in rows if row.source] == ["because a", "because b", ""]


# ---------------------------------------------------------------- altered chunks

PASSAGE = (
    'Tom & "Jerry" met at the café in Paris, where it had been raining for days.\nThey said:\tnothing at all!\n\n'
    "It's <b>well known</b> that the 漢字 of 😀 are hard to read, naïve as one may be about such things as these.\n"
    "A third line follows the second one, as it is the custom among lines that come in three and never in two."
)


@pytest.mark.parametrize(
    ("alter", "kind"),
    [
        (lambda text: repr([text, "other"]), ESCAPED),
        (lambda text: f"[Document(id='1', metadata={{}}, page_content={text!r})]", ESCAPED),
        (lambda text: json.dumps({"text": text}), ESCAPED),
        (lambda text: json.dumps([text], ensure_ascii=False), ESCAPED),
        (lambda text: json.dumps({"result": json.dumps({"text": text})}), ESCAPED),
        (html.escape, HTML),
        (lambda text: " ".join(text.split()), WHITESPACE),
        (lambda text: text.replace("\n", "\r\n"), WHITESPACE),
        (lambda text: textwrap.indent(text, "    "), WHITESPACE),
        (lambda text: textwrap.indent(text, "> "), WHITESPACE),
        (lambda text: unicodedata.normalize("NFD", text), UNICODE),
    ],
    ids=[
        "list",
        "documents",
        "json",
        "json unescaped",
        "json in json",
        "html",
        "collapsed",
        "crlf",
        "indented",
        "quoted",
        "nfd",
    ],
)
def test_altered_chunks_are_recognised(
    alter: Callable[[str], str], kind: str, make_segmenter: Callable[..., Segmenter]
) -> None:
    other = "Something else that nobody altered, which stands in the prompt as it was registered, word for word."
    alterations = Alterations(make_segmenter([PASSAGE, other]))
    found = alterations.find(f"Context: {alter(PASSAGE)}\n\n{other}\n\nQuestion?")
    assert found == [Altered(kind, chunk_id(PASSAGE), FIXES[kind])]


def test_what_is_unaltered_or_unknown_gives_no_warning(make_segmenter: Callable[..., Segmenter]) -> None:
    alterations = Alterations(make_segmenter([PASSAGE]))
    assert alterations.find(f"Context: {PASSAGE}\n\nIs 1 &lt; 2? \\n") == []
    assert alterations.find(f"{html.escape(PASSAGE)} and {PASSAGE}") == []
    assert alterations.find("Other text with \\n escapes &amp; more. " * 10) == []
    assert (
        alterations.find("half a pair: \\ud800 and \ud800 too, in a text of some length, so that it is looked at") == []
    )


def test_real_passages_in_a_list_repr_are_recognised(
    data_folder: Path, make_segmenter: Callable[..., Segmenter]
) -> None:
    with (data_folder / "nq_open_gold_2655.jsonl").open(encoding="utf-8") as file:
        texts = list(dict.fromkeys(canonical(doc["text"]) for line in file for doc in json.loads(line)["docs"]))
    alterations = Alterations(make_segmenter(texts))
    for _ in range(20):
        shown = random.Random(0).sample([text for text in texts if "'" in text and len(text) > 100], 5)
        found = alterations.find(f"Context: {shown!r}\nQuestion?")
        escaped = {chunk_id(text) for text in shown if repr(text)[1:-1] != text}
        assert escaped <= {altered.chunk_id for altered in found if altered.kind == ESCAPED}


def test_an_edited_chunk_is_found_as_the_nearest_one(make_segmenter: Callable[..., Segmenter]) -> None:
    words = [f"word{n}" for n in range(60)]
    chunk, other = " ".join(words), " ".join(f"other{n}" for n in range(60))
    find = Alterations(make_segmenter([chunk, other])).nearest
    edits = [" ".join([*words[:n], "edited", *words[n + 1 :]]) for n in range(0, 60, 5)]
    found = [find(f"Context:\n{text}\nAnswer:") for text in edits]
    assert {altered.kind for alterations in found for altered in alterations} == {EDITED}
    assert {altered.chunk_id for alterations in found for altered in alterations} == {chunk_id(chunk)}
    assert sum(map(bool, found)) >= 10, "all but those whose anchor was edited"
    assert find(f"{chunk} and {other}") == []
    assert find(" ".join(words[:25])) == [], "a part is no edited whole"


# ---------------------------------------------------------------- through the client

SHORT = "A text of a few words, no more than that."
OTHER = "Something else that nobody altered, which stands in the prompt as it was registered, word for word, and whole."


@pytest.fixture(scope="module")
def rag(model_folder: Callable[..., Path]) -> Iterator[LazyRAG]:
    folder = model_folder("byte-level")
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 4096}))
    engine = FakeEngine(folder)
    rag = LazyRAG(model=str(folder), engine=engine, min_tokens=32)
    rag.register([PASSAGE, OTHER, SHORT])
    yield rag
    engine.close()


def told(rag: LazyRAG, prompt: str) -> set[tuple[str, str | None]]:
    """Reasons and nearest chunks of a prompt's parts."""
    rows = rag.explain(f"Context: {prompt}\n\nWhy?")
    assert "".join(row.piece.text for row in rows) == f"Context: {prompt}\n\nWhy?"
    return {(row.reason, row.nearest) for row in rows if row.reason or row.nearest}


WORD_BY_WORD = PASSAGE.split(" ")
EDIT = " ".join([*WORD_BY_WORD[:40], "edited", *WORD_BY_WORD[41:]])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (PASSAGE, ""),
        (repr([PASSAGE]), FIXES[ESCAPED]),
        (repr([OTHER, PASSAGE, OTHER]), FIXES[ESCAPED]),
        (f"{OTHER}\n\n{[PASSAGE]!r}", FIXES[ESCAPED]),
        (f"[Document({PASSAGE!r}), Document({OTHER!r})]", FIXES[ESCAPED]),
        (json.dumps({"docs": [PASSAGE, OTHER]}), FIXES[ESCAPED]),
        (json.dumps(json.dumps([PASSAGE])), FIXES[ESCAPED]),
        (html.escape(PASSAGE), FIXES[HTML]),
        (PASSAGE.replace("\n", "\r\n"), FIXES[WHITESPACE]),
        (textwrap.indent(PASSAGE, "> "), FIXES[WHITESPACE]),
        (unicodedata.normalize("NFD", PASSAGE), FIXES[UNICODE]),
        (EDIT, FIXES[EDITED]),
        (PASSAGE[:200], FIXES[CUT]),
        (f"{PASSAGE[:200]}\n\n{OTHER}", FIXES[CUT]),
        (SHORT, TOO_SHORT),
        ("A text that nobody has registered anywhere, and that no document holds. " * 3, NOT_REGISTERED),
    ],
    ids=ascii,
)
def test_the_one_reason_why_a_text_is_not_reused_is_told(rag: LazyRAG, text: str, reason: str) -> None:
    about = None if reason in ("", NOT_REGISTERED, TOO_SHORT) else chunk_id(PASSAGE)
    assert told(rag, text) == ({(reason, about)} if reason else set())
