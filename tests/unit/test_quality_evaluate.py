"""What is said of a mode is what its engine did, question by question; measured once, and without anybody's texts."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lazyrag import client
from lazyrag.backend.engine import Cancel, Deliver, Delta, Event, Request
from lazyrag.backend.fake import FakeEngine
from lazyrag.cli import app
from lazyrag.config import Config
from lazyrag.errors import InputError
from lazyrag.quality import report
from lazyrag.quality.data import Passage, Question, draw, load
from lazyrag.quality.evaluate import Result, evaluate
from lazyrag.tune import record
from lazyrag.types import chunk_id

CHAT = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
PASSAGE = "Passage {n} says, at some length and in the same words as all of the others, that item {n} is blue."
LOST = {"exact": 0.0, "lazy": 0.4, "prefix": 0.1}
"""Of the passages' benefit, which is 2 nats a token."""


class Judged(FakeEngine):
    """Finds answers as likely as its mode makes them, and answers with the mode's name unless it is full attention."""

    def __init__(self, config: Config, folder: Path, lost: Mapping[str, float] = LOST) -> None:
        said = "blue" if config.mode == "exact" else f"blue {config.mode}"
        super().__init__(folder, mode=config.mode, reply=lambda request: said)
        self._benefit = 2.0 * (1 - lost[config.mode])

    def submit(self, request: Request, deliver: Deliver) -> Cancel:
        has_passages = "Passage" in self._tokenizer.decode(request.token_ids)
        logprob = -5.0 + (self._benefit if has_passages else 0.0)

        def judged(event: Event) -> None:
            if isinstance(event, Delta) and event.logprobs:
                event = replace(event, logprobs=tuple(dict.fromkeys(step, logprob) for step in event.logprobs))
            deliver(event)

        return super().submit(request, judged)


@pytest.fixture
def folder(model_folder: Callable[..., Path]) -> Path:
    folder = model_folder("byte-level", chat_template=CHAT)
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 4096}))
    (folder / "model.safetensors").touch()
    return folder


@pytest.fixture
def data(tmp_path: Path) -> Path:
    rows = [
        {
            "question": f"What is item {n}?",
            "answers": ["blue"],
            "docs": [{"title": f"T{n}", "text": PASSAGE.format(n=n)}],
        }
        for n in range(6)
    ]
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def run(folder: Path, questions: list[Question], modes: list[str], **settings: Any) -> Result:
    started: list[str] = settings.pop("started", [])

    def start(config: Config, model: Path) -> FakeEngine:
        started.append(config.mode)
        return Judged(config, model)

    return evaluate(Config(str(folder)), folder, questions, modes, start=start, **settings)


def test_a_mode_is_measured_between_full_attention_and_no_passages(folder: Path, data: Path) -> None:
    result = run(folder, draw(load(data).questions, passages=3), ["lazy", "prefix"])
    none, full, lazy, prefix = result.scores
    assert [score.mode for score in result.scores] == ["none", "exact", "lazy", "prefix"]
    assert result.benefit.value == pytest.approx(2)
    lost = [score.benefit_lost.value for score in result.scores if score.benefit_lost]
    assert lost == pytest.approx([1, 0, 0.4, 0.1])
    assert (none.logprob.value, full.logprob.value) == pytest.approx((-5, -3))
    assert (full.exact_match.value, lazy.exact_match.value) == (1, 0)
    assert (full.f1.value, lazy.f1.value) == pytest.approx((1, 2 / 3))
    assert lazy.f1_lost.value == pytest.approx(1 / 3)
    assert (full.same, lazy.same) == (1, 0)
    assert (none.recomputed, full.recomputed, lazy.recomputed, prefix.recomputed) == (0, 1, 0, 0)
    assert none.computed_tokens < lazy.computed_tokens < full.computed_tokens


def test_tokens_of_passages_that_are_computed_anew_are_counted(folder: Path) -> None:
    short = Question("q", "?", ("blue",), (Passage("", "Passage: blue."), Passage("", PASSAGE.format(n=1))))
    (reply,) = run(folder, [short], ["lazy"]).arms["lazy"].replies
    assert 0 < reply.recomputed_tokens < 16 < reply.passage_tokens, "a passage of fewer than 16 tokens is not reused"


def test_passages_that_are_no_use_have_no_loss(folder: Path) -> None:
    useless = [
        Question(f"q{n}", "?", ("blue",), (Passage("", f"Nothing is said here, in {n} words."),)) for n in range(4)
    ]
    result = run(folder, useless, ["lazy"])
    assert result.benefit.value == 0
    assert all(score.benefit_lost is None for score in result.scores)
    assert "| -" in "\n".join(report.lines(result))


def test_examples_are_reused_in_any_order_as_documents_are(folder: Path) -> None:
    examples = [Passage("", f"{PASSAGE.format(n=n)}\nLabel: {n % 2}") for n in range(3)]
    asked = [
        Question("a", "Text: x\nLabel:", ("1",), tuple(examples), few_shot=True),
        Question("b", "Text: y\nLabel:", ("0",), tuple(reversed(examples)), few_shot=True),
    ]
    lazy = run(folder, asked, ["lazy"]).arms["lazy"].replies
    assert [reply.recomputed_tokens for reply in lazy] == [0, 0]
    assert all(reply.passage_tokens > 100 for reply in lazy)


def test_a_run_goes_on_where_another_has_stopped(folder: Path, data: Path, tmp_path: Path) -> None:
    questions, out, started = draw(load(data).questions, passages=3), tmp_path / "out.json", list[str]()
    run(folder, questions, ["lazy"], out=out, started=started)
    result = run(folder, questions, ["lazy", "prefix"], out=out, started=started)
    assert started == ["exact", "lazy", "prefix"]
    assert Result.load(out).values() == result.values()
    assert [score.mode for score in result.scores] == ["none", "exact", "lazy", "prefix"]


def test_findings_of_other_questions_or_models_are_not_mixed(folder: Path, data: Path, tmp_path: Path) -> None:
    questions, out = draw(load(data).questions, passages=3), tmp_path / "out.json"
    run(folder, questions, ["lazy"], out=out)
    with pytest.raises(InputError, match="another model, or of other questions"):
        run(folder, questions[:3], ["lazy"], out=out)
    (folder / "model.safetensors").write_bytes(b"tuned")
    with pytest.raises(InputError, match="another model, or of other questions"):
        run(folder, questions, ["lazy"], out=out)
    out.write_text("{}")
    with pytest.raises(InputError, match="not the JSON of an evaluation"):
        run(folder, questions, ["lazy"], out=out)


# ---------------------------------------------------------------- the command


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    monkeypatch.setattr(client, "start_engine", Judged)
    monkeypatch.chdir(tmp_path)

    def invoke(*arguments: object) -> Any:
        return CliRunner().invoke(app, ["eval", *map(str, arguments)])

    return invoke


def test_the_command_answers_with_a_table_a_plot_and_json(
    command: Callable[..., Any], folder: Path, data: Path, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    options = ("--model", folder, "--modes", "lazy, prefix", "--docs", 3, "--order", "shuffled", "--limit", 4)
    done = command(data, *options, "--out", "out.json", "--plot", "plot.svg")
    assert done.exit_code == 0, done.output
    assert "| prefix | -3.200       | 90.0% [90.0%, 90.0%]" in done.stdout
    assert "data: 4 questions; name data.jsonl, passages 3, order shuffled, seed 0, chat True" in done.stdout
    assert "<svg" in (tmp_path / "plot.svg").read_text()
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["data"]["digest"] == load(data).digest
    assert found["arms"]["lazy"]["machine"]["versions"]["lazyrag"]
    assert json.loads(command(data, *options, "--out", "out.json", "--json").stdout) == found


def test_questions_that_a_model_was_tuned_on_are_left_out(
    command: Callable[..., Any], folder: Path, data: Path, tmp_path: Path
) -> None:
    asked = load(data).questions
    tuned = tmp_path / "tuned"
    tuned.mkdir()
    record.write(tuned, {}, trained_on=[chunk_id(asked[1].passages[0].text)], held_out=[])
    options = ("--model", folder, "--modes", "lazy", "--docs", 2, "--unseen-by", tuned, "--out", "out.json")
    done = command(data, *options)
    assert done.exit_code == 0, done.output
    assert "1 questions are left out: tuned was tuned on their passages." in done.stderr
    assert f"data: {len(asked) - 1} questions" in done.stdout
    record.write(tuned, {}, trained_on=[chunk_id(p.text) for q in asked for p in q.passages], held_out=[])
    assert command(data, *options).exit_code == 2


def test_no_text_of_the_data_is_written(command: Callable[..., Any], folder: Path, data: Path, tmp_path: Path) -> None:
    command(data, "--model", folder, "--modes", "lazy", "--docs", 2, "--out", "out.json")
    written = (tmp_path / "out.json").read_text()
    assert "lazy" in written
    assert not any(text in written for text in ("blue", "says", "What is"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--docs", 7), "too few for 7"),
        (("--out", "nowhere/out.json"), "its folder does not exist"),
        (("--plot", "."), "it is a folder"),
        (("--plot", "plot.nothing"), "cannot be written"),
    ],
)
def test_what_cannot_be_done_is_said(
    command: Callable[..., Any], folder: Path, data: Path, arguments: tuple[object, ...], message: str
) -> None:
    pytest.importorskip("matplotlib")
    done = command(data, "--model", folder, "--modes", "lazy", "--docs", 2, *arguments)
    assert done.exit_code == 2
    assert message in done.output
