from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest

from lazyrag.chat import Message
from lazyrag.errors import InputError
from lazyrag.questions import BLANK, Passage, Question, cloze, exact_match, f1, prompt, read, with_distractors

POOL = [Passage(f"T{n}", f"Text number {n}.") for n in range(30)]
ROW = {"id": "1", "question": "Who?", "answers": ["Ada"], "docs": [{"title": "T", "text": "Ada did\u2028it."}]}


def test_questions_are_read_with_line_separators_in_their_texts(tmp_path: Path) -> None:
    file = tmp_path / "q.jsonl"
    file.write_text(json.dumps({**ROW, "meta": 1}, ensure_ascii=False) + "\n\n", encoding="utf-8")
    assert read(file) == [Question("1", "Who?", ("Ada",), (Passage("T", "Ada did\u2028it."),))]


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        json.dumps({**ROW, "answers": []}),
        json.dumps({**ROW, "answers": "Ada"}),
        json.dumps({**ROW, "question": " "}),
        json.dumps({**ROW, "docs": [{"title": "T"}]}),
        json.dumps({**ROW, "docs": [{"text": "\ud800"}]}),
    ],
)
def test_a_line_that_is_no_question_is_named_without_its_text(line: str, tmp_path: Path) -> None:
    file = tmp_path / "q.jsonl"
    file.write_text(f"{json.dumps(ROW)}\n{line}\n")
    with pytest.raises(InputError, match="line 2") as error:
        read(file)
    assert "Ada" not in str(error.value)


def test_distractors_fill_up_to_the_count_without_repeating_a_passage() -> None:
    own = Question("1", "Who?", ("Ada",), (POOL[3], POOL[4]))
    full = with_distractors(own, [*POOL, *POOL], 10, Random(0))
    assert len({passage.id for passage in full.passages}) == 10
    assert set(own.passages) < set(full.passages) <= set(POOL)
    assert full == with_distractors(own, [*POOL, *POOL], 10, Random(0))
    assert {with_distractors(own, POOL, 10, Random(n)).passages.index(POOL[3]) for n in range(100)} == set(range(10))
    assert with_distractors(own, POOL, 1, Random(0)).passages == (POOL[3],)


def test_the_prompt_holds_passages_word_for_word() -> None:
    question = Question("1", "Who?", ("Ada",), tuple(POOL[:2]))
    system, user = prompt(question, "Be brief.", has_template=True)
    assert isinstance(system, Message)
    assert isinstance(user, Message)
    assert user.content == "[1] T0\nText number 0.\n\n[2] T1\nText number 1.\n\nQuestion: Who?"
    assert prompt(question, "Be brief.", has_template=False)[1].text == f"{user.content}\nAnswer:"  # type: ignore[union-attr]


def test_a_cloze_question_leaves_out_the_rarest_name_with_the_names_around_it() -> None:
    common = [Passage("", f"In the year {n} people in London were said to be happy.") for n in (1, 1)]
    text = "A short one. The prize was given to Maria Skłodowska of Poland and to London in a hall. It ended."
    made = next(q for q in cloze([*common, Passage("P", text)], 10) if q.passages[0].title == "P")
    assert made.answers == ("Maria Skłodowska",)
    assert made.question.endswith(f"given to {BLANK} of Poland and to London in a hall.")


def test_no_cloze_question_holds_its_own_answer(data_folder: Path) -> None:
    passages = [p for q in read(data_folder / "nq_open_gold_2655.jsonl")[:300] for p in q.passages]
    made = cloze(passages, 200, seed=1)
    assert len(made) == 200
    assert made == cloze(passages, 200, seed=1) != cloze(passages, 200, seed=2)
    for question in made:
        (answer,), (passage,) = question.answers, question.passages
        assert answer in passage.text
        assert answer not in question.question
        assert question.question.count(BLANK) == 1


@pytest.mark.parametrize(
    ("answer", "golds", "exact", "score"),
    [
        ("The Eiffel Tower.", ["eiffel tower"], True, 1.0),
        ("in Paris", ["Paris, France", "Paris"], False, 2 / 3),
        ("", ["Paris"], False, 0.0),
        ("Paris Paris", ["Paris"], False, 2 / 3),
        ("Rome", ["Paris"], False, 0.0),
    ],
)
def test_answers_are_compared_as_squad_does(answer: str, golds: list[str], exact: bool, score: float) -> None:
    assert exact_match(answer, golds) is exact
    assert f1(answer, golds) == pytest.approx(score)
