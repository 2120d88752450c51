"""Questions are read whole or refused with the line, and get the same passages in every run."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from lazyrag.errors import InputError
from lazyrag.quality.data import DataSet, Passage, Question, draw, load


def write(folder: Path, *rows: object) -> Path:
    path = folder / "data.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows), encoding="utf-8")
    return path


def row(number: int, **changed: Any) -> dict[str, Any]:
    docs = [{"title": f"T{number}", "text": f" Text {number}. "}]
    return {"id": f"q{number}", "question": f"What is {number}?", "answers": [str(number)], "docs": docs} | changed


def of(questions: Iterable[Question], others: Iterable[Passage] = ()) -> DataSet:
    return DataSet("data", "digest", tuple(questions), tuple(others))


def ten() -> DataSet:
    return of(Question(f"q{n}", f"What is {n}?", (str(n),), (Passage("", f"Text {n}."),)) for n in range(10))


def test_questions_come_with_their_passages(tmp_path: Path) -> None:
    few_shot = {"question": "Text: x\nLabel:", "answers": ["A"], "examples": ["Text: y\nLabel: B"], "meta": 1}
    path = write(tmp_path, row(1), "", few_shot)
    found = load(path)
    assert found.questions == (
        Question("q1", "What is 1?", ("1",), (Passage("T1", "Text 1."),)),
        Question(f"{path}:3", "Text: x\nLabel:", ("A",), (Passage("", "Text: y\nLabel: B"),), few_shot=True),
    )
    assert found.name == "data.jsonl"


def test_a_line_separator_in_a_text_ends_no_line(tmp_path: Path) -> None:
    path = write(tmp_path, json.dumps(row(1, answers=["a\u2028b"]), ensure_ascii=False))
    assert load(path).questions[0].answers == ("a\u2028b",)


def test_another_content_has_another_digest(tmp_path: Path) -> None:
    first = load(write(tmp_path, row(1))).digest
    assert load(write(tmp_path, row(1))).digest == first
    assert load(write(tmp_path, row(2))).digest != first


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ("{", "not JSON"),
        ("[1]", "not a JSON object"),
        (row(1, question=" "), "question"),
        (row(1, answers="one"), "answers"),
        (row(1, answers=[]), "answers"),
        (row(1, docs="text"), "docs is not a list"),
        (row(1, docs=[{"title": "no text"}]), "without a text"),
        (row(1, docs=[{"text": " "}]), "without a text"),
        (row(1, docs=[{"text": "t", "title": 3}]), "without a text"),
        (row(1, examples=["e"]), "neither docs nor examples, or both"),
        ({"question": "q", "answers": ["a"]}, "neither docs nor examples, or both"),
    ],
)
def test_a_line_that_is_no_question_is_named(tmp_path: Path, wrong: object, why: str) -> None:
    with pytest.raises(InputError, match=rf"data\.jsonl:2 is not a question.*{why}"):
        load(write(tmp_path, row(0), wrong))


def test_an_error_shows_none_of_the_data(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        load(write(tmp_path, row(1, docs=[{"text": ["SECRET"]}], question="SECRET")))
    assert "SECRET" not in str(caught.value)


def test_a_file_without_questions_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no questions"):
        load(write(tmp_path, ""))
    with pytest.raises(InputError, match="cannot be read"):
        load(tmp_path / "none")


def test_each_question_gets_its_own_passages_and_different_ones_of_others() -> None:
    drawn = draw(ten(), passages=5)
    for question in drawn:
        texts = [passage.text for passage in question.passages]
        assert len(set(texts)) == 5
        assert f"Text {question.id[1:]}." in texts
    places = {question.passages.index(Passage("", f"Text {question.id[1:]}.")) for question in drawn}
    assert len(places) > 1, "the right passage must not be known by its place"


def test_what_a_question_gets_depends_on_nothing_but_its_id_and_the_seed() -> None:
    drawn = draw(ten(), passages=5)
    assert draw(ten(), passages=5) == drawn
    assert draw(ten(), passages=5, limit=3) == drawn[:3]
    assert draw(ten(), passages=5, seed=1) != drawn


def test_own_passages_stand_in_the_given_order_or_in_another() -> None:
    passages = tuple(Passage("", f"Own {n}.") for n in range(8))
    questions = of([Question("q", "?", ("a",), passages), *ten().questions])
    (given,) = draw(questions, passages=12, limit=1)
    assert [passage for passage in given.passages if passage in passages] == list(passages)
    (shuffled,) = draw(questions, passages=12, order="shuffled", limit=1)
    assert sorted(p.text for p in shuffled.passages) == sorted(p.text for p in given.passages)
    assert shuffled.passages != given.passages


def test_of_too_many_passages_the_first_are_taken() -> None:
    passages = tuple(Passage("", f"Own {n}.") for n in range(8))
    (found,) = draw(of([Question("q", "?", ("a",), passages)]), passages=3)
    assert found.passages == passages[:3]


def test_examples_are_never_mixed_with_documents() -> None:
    few_shot = [Question(f"e{n}", "?", ("a",), (Passage("", f"Example {n}"),), few_shot=True) for n in range(4)]
    for question in draw(of([*ten().questions, *few_shot]), passages=4):
        assert all(passage.text.startswith("Example") == question.few_shot for passage in question.passages)


def test_too_few_passages_in_all_are_refused() -> None:
    with pytest.raises(InputError, match="10 passages, which is too few for 11"):
        draw(ten(), passages=11)


def test_passages_that_nothing_is_asked_about_are_mixed_in() -> None:
    others = [Passage("", f"Other {n}.") for n in range(3)]
    (question,) = draw(of([Question("q", "?", ("a",), (Passage("", "Own."),))], others), passages=4)
    assert {passage.text for passage in question.passages} == {"Own.", *(passage.text for passage in others)}
