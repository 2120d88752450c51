"""What is said of a mode is what its engine did, question by question; measured once, and without anybody's texts."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from lazyrag import client
from lazyrag.backend.engine import Cancel, Deliver, Delta, Event, Request
from lazyrag.backend.fake import FakeEngine
from lazyrag.calibration import Calibration
from lazyrag.cli import app
from lazyrag.client import LazyRAG
from lazyrag.config import Config
from lazyrag.errors import ConfigError, InputError
from lazyrag.quality import report
from lazyrag.quality.ask import Reply
from lazyrag.quality.calibrate import ENOUGH, Bound, Measure, calibrate
from lazyrag.quality.data import Passage, Question, draw, load
from lazyrag.quality.evaluate import Arm, Result, evaluate
from lazyrag.tune import record
from lazyrag.types import chunk_id

CHAT = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
PASSAGE = "Passage {n} says, at some length and in the same words as all of the others, that item {n} is blue."
ASKED = 40
LOST = {"exact": 0.0, "lazy": 0.4, "sink": 0.2, "prefix": 0.1}
"""Of the passages' benefit, which is 2 nats a token."""


def mode_of(request: Request) -> str:
    return "prefix" if request.prefix_len else "sink" if request.sink else "lazy" if request.segments else "exact"


class Judged(FakeEngine):
    """Finds answers as likely as a request's mode makes them, and says the mode unless it is full attention."""

    def __init__(self, config: Config, folder: Path, lost: Mapping[str, float] = LOST) -> None:
        super().__init__(folder, mode=config.mode, reply=self.answer)
        self._lost = lost

    def answer(self, request: Request) -> str:
        return f"blue {mode_of(request)}".removesuffix(" exact") if self.has_passages(request) else "red"

    def has_passages(self, request: Request) -> bool:
        return "Passage" in self._tokenizer.decode(request.token_ids)

    def submit(self, request: Request, deliver: Deliver) -> Cancel:
        logprob = -5.0 + (2.0 * (1 - self._lost[mode_of(request)]) if self.has_passages(request) else 0.0)

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


def rows(path: Path, count: int) -> Path:
    asked = [
        {
            "question": f"What is item {n}?",
            "answers": ["blue"],
            "docs": [{"title": f"T{n}", "text": PASSAGE.format(n=n)}],
        }
        for n in range(count)
    ]
    path.write_text("\n".join(map(json.dumps, asked)))
    return path


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return rows(tmp_path / "data.jsonl", 6)


@pytest.fixture
def enough(tmp_path: Path) -> Path:
    return rows(tmp_path / "enough.jsonl", ASKED)


def run(folder: Path, questions: list[Question], modes: list[str], **settings: Any) -> Result:
    started: list[str] = settings.pop("started", [])

    def start(config: Config, model: Path) -> FakeEngine:
        started.append(config.mode)
        return Judged(config, model)

    return evaluate(Config(str(folder)), folder, questions, modes, start=start, **settings)


def test_a_mode_is_measured_between_full_attention_and_no_passages(folder: Path, data: Path) -> None:
    result = run(folder, draw(load(data), passages=3), ["lazy", "prefix"])
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
    questions, out, started = draw(load(data), passages=3), tmp_path / "out.json", list[str]()
    run(folder, questions, ["lazy"], out=out, started=started)
    result = run(folder, questions, ["lazy", "prefix"], out=out, started=started)
    assert started == ["exact", "lazy", "lazy"], "an engine for full attention, one for the other modes, one to go on"
    assert Result.load(out).values() == result.values()
    assert [score.mode for score in result.scores] == ["none", "exact", "lazy", "prefix"]


def test_findings_of_other_questions_or_models_are_not_mixed(folder: Path, data: Path, tmp_path: Path) -> None:
    questions, out = draw(load(data), passages=3), tmp_path / "out.json"
    run(folder, questions, ["lazy"], out=out)
    with pytest.raises(InputError, match="another asked, another ids"):
        run(folder, questions[:3], ["lazy"], out=out)
    others = [replace(question, passages=question.passages[::-1]) for question in questions]
    with pytest.raises(InputError, match=r"another asked\."):
        run(folder, others, ["lazy"], out=out)
    (folder / "model.safetensors").write_bytes(b"tuned")
    with pytest.raises(InputError, match=r"another model\."):
        run(folder, questions, ["lazy"], out=out)
    out.write_text("{}")
    with pytest.raises(InputError, match="not the JSON of an evaluation"):
        run(folder, questions, ["lazy"], out=out)


@pytest.mark.parametrize("changed", [{"preamble": "Be brief."}, {"sink": "."}, {"min_tokens": 17}, {"block_size": 64}])
def test_findings_of_other_settings_are_not_mixed(
    folder: Path, data: Path, tmp_path: Path, changed: dict[str, Any]
) -> None:
    questions, out = draw(load(data), passages=2, limit=1), tmp_path / "out.json"
    run(folder, questions, ["lazy"], out=out)
    with pytest.raises(InputError, match=rf"another {next(iter(changed))}\."):
        evaluate(Config(str(folder), **changed), folder, questions, ["lazy"], out=out, start=Judged)
    with pytest.raises(InputError, match=r"another chat\."):
        run(folder, questions, ["lazy"], out=out, chat=False)


def test_findings_of_another_chat_template_are_not_mixed(folder: Path, data: Path, tmp_path: Path) -> None:
    questions, out = draw(load(data), passages=2, limit=1), tmp_path / "out.json"
    run(folder, questions, ["lazy"], out=out)
    (folder / "chat_template.jinja").write_text(CHAT.replace("assistant", "helper"))
    with pytest.raises(InputError, match=r"another chat_template\."):
        run(folder, questions, ["lazy"], out=out)


# ---------------------------------------------------------------- the gate


def gate(folder: Path, enough: Path, lost: Mapping[str, float], **settings: Any) -> tuple[Calibration, Result]:
    def start(config: Config, model: Path) -> FakeEngine:
        return Judged(config, model, {"exact": 0.0, **lost})

    questions = draw(load(enough), passages=3)
    preamble = settings.pop("preamble", "")
    return calibrate(Config(str(folder), preamble=preamble), folder, questions, start=start, **settings)


def test_the_cheapest_mode_that_is_good_enough_is_taken(folder: Path, enough: Path) -> None:
    lost = {"lazy": 0.4, "sink": 0.015, "prefix": 0.0}
    found, result = gate(folder, enough, lost, preamble="Be brief.", bound=Bound(most=0.2))
    assert found.mode == "sink"
    assert re.fullmatch(
        r"sink loses 1.5% of what the passages add, surely no more than (9|10)\.\d%; 20.0% are allowed "
        r"\(40 questions, each of 3 passages of 7[23] tokens, 95% intervals\)",
        found.why,
    ), found.why
    assert [score.mode for score in result.scores] == ["none", "exact", "lazy", "sink"], "a dearer one is not measured"


def test_where_no_mode_is_good_enough_exact_is_taken_with_every_reason(folder: Path, enough: Path) -> None:
    lost = {"lazy": 0.4, "sink": 0.21, "prefix": 0.0}
    found, _ = gate(folder, enough, lost, modes=["lazy", "sink", "prefix"], bound=Bound(most=0.2))
    assert found.mode == "exact"
    assert "lazy loses 40.0% of what the passages add, surely no more than " in found.why
    assert found.why.count("; only 20.0% are allowed") == 2
    assert "sink loses 21.0%" in found.why
    assert "prefix" not in found.why, "there is no preamble"


def test_the_user_says_what_may_be_lost_and_of_what(folder: Path, enough: Path) -> None:
    lost = {"lazy": 0.4, "sink": 0.4}
    assert gate(folder, enough, lost, modes=["lazy"], bound=Bound(most=0.5))[0].mode == "lazy"
    found, _ = gate(folder, enough, lost, modes=["lazy"], bound=Bound("f1", 0.1))
    assert found.mode == "exact"
    assert "lazy loses 33.3% of " in found.why
    assert "; only 10.0% are allowed" in found.why


def test_what_cannot_be_measured_passes_no_mode(folder: Path) -> None:
    """No answer is any likelier with its passages: nothing can be lost, and nothing is known."""
    useless = asking("Nothing is said here, and at a length that would be worth it.")
    for bound in (Bound(most=0.2), Bound("f1", 0.99)):
        found, _ = calibrate(Config(str(folder)), folder, useless, modes=["lazy"], bound=bound, start=Judged)
        assert found.mode == "exact"
        assert "no loss can be measured" in found.why


def asking(*passages: str) -> list[Question]:
    return [Question(f"q{n}", f"{n}?", ("blue",), tuple(Passage("", text) for text in passages)) for n in range(ENOUGH)]


def test_passages_too_short_to_be_reused_pass_no_mode(folder: Path) -> None:
    """All of them are computed as with full attention: nothing is lost, and nothing is known."""
    found, _ = calibrate(
        Config(str(folder)), folder, asking("Passage!"), modes=["lazy"], bound=Bound(most=0.2), start=Judged
    )
    assert found.mode == "exact"
    assert "no passage is long enough to be reused" in found.why


class Wordy(Judged):
    """Loses nothing in any mode. From passages it answers `answered`, without them something wrong."""

    answered = "red"

    def __init__(self, config: Config, folder: Path) -> None:
        super().__init__(config, folder, {"exact": 0.0, "lazy": 0.0})

    def answer(self, request: Request) -> str:
        return self.answered if self.has_passages(request) else "red"


def test_by_f1_a_model_that_answers_nothing_right_passes_no_mode(
    folder: Path, enough: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It loses nothing, and nothing is known. So it is if all that there is to be lost is less than the bound."""
    questions = draw(load(enough), passages=1)
    found, result = calibrate(
        Config(str(folder)), folder, questions, modes=["lazy"], bound=Bound("f1", 0.15), start=Wordy
    )
    assert found.mode == "exact"
    assert "the passages add 0.0% [0.0%, 0.0%] of F1, not surely more than 15.0%" in found.why
    assert Bound(most=0.15).holds(result, result.score("lazy")), "the likelihood of the right answers is another matter"
    monkeypatch.setattr(Wordy, "answered", "blue" + " or" * 8)  # whose F1 is 0.2
    result = evaluate(Config(str(folder)), folder, questions, ["lazy"], start=Wordy)
    assert not Bound("f1", 0.25).holds(result, result.score("lazy"))
    assert Bound("f1", 0.15).holds(result, result.score("lazy"))


def test_few_questions_are_no_finding(folder: Path, enough: Path) -> None:
    """How many are needed is the bound's matter; equal ones are one, and none of this takes an engine."""
    questions = draw(load(enough), passages=3)

    def calibrated(questions: list[Question], bound: Bound) -> None:
        never = lambda *_: pytest.fail("an engine is started for it")  # noqa: E731
        calibrate(Config(str(folder)), folder, questions, bound=bound, start=never)

    with pytest.raises(InputError, match=r"29 questions are too few.*--bound 0.5 needs at least 30.*--limit"):
        calibrated(questions[:29], Bound(most=0.5))
    with pytest.raises(InputError, match=r"40 questions are too few.*--bound 0.02 needs at least 183 "):
        calibrated(questions, Bound())
    with pytest.raises(InputError, match=r"--bound 0.01 needs at least 368 "):
        calibrated(questions, Bound("f1", 0.01))
    again = [replace(question, id=f"again {n}") for n, question in enumerate(questions[:29] * 10)]
    with pytest.raises(InputError, match=r"29 questions are too few"):
        calibrated(again, Bound(most=0.5))


@pytest.mark.parametrize("most", [0.0, -1.0, 1.0, 5.0, math.inf, math.nan])
def test_a_bound_that_judges_nothing_is_refused(most: float) -> None:
    with pytest.raises(InputError, match="judges nothing"):
        Bound(most=most)


def replies(losses: Sequence[float], recomputed: int = 0) -> tuple[Reply, ...]:
    """Of full attention, which is right, less losses, 0 to 1."""
    return tuple(Reply(-4 + 3 * (1 - loss), 1 - loss, 0.0, "", 110, 100, recomputed, 0.1) for loss in losses)


def measured(losses: Sequence[float], recomputed: int = 0) -> Result:
    n = len(losses)
    arms = {"none": replies([1.0] * n), "exact": replies([0.0] * n, 100), "lazy": replies(losses, recomputed)}
    return Result({}, {"ids": list(map(str, range(n)))}, {mode: Arm("", {}, of) for mode, of in arms.items()})


@pytest.mark.parametrize("measure", ["likelihood", "f1"])
def test_a_mode_that_loses_all_in_few_questions_rarely_passes(measure: Measure) -> None:
    """One that loses just the bound passes by chance in 2.5% of samples, whether or not these show a loss."""
    random = np.random.default_rng(0)
    for n, most in ((50, 0.1), (200, 0.02)):
        bound = Bound(measure, most)
        results = (measured(1.0 * (random.random(n) < most)) for _ in range(60))
        assert sum(bound.holds(result, result.score("lazy")) for result in results) <= 0.05 * 60
        harmless = measured([0.0] * n)
        assert bound.holds(harmless, harmless.score("lazy"))


def test_a_mode_that_reuses_next_to_nothing_does_not_pass() -> None:
    for recomputed, passes in ((50, True), (51, False), (99, False)):
        result = measured([0.0] * 200, recomputed)
        score = result.score("lazy")
        assert Bound().holds(result, score) is passes
        assert passes or f"{recomputed}% of the passages are computed anew" in Bound().finding(result, score)


def test_of_modes_that_were_measured_before_the_cheapest_is_taken(folder: Path, enough: Path, tmp_path: Path) -> None:
    questions, out = draw(load(enough), passages=3), tmp_path / "out.json"
    config, bound = Config(str(folder)), Bound(most=0.6)
    evaluate(config, folder, questions, ["sink", "lazy"], out=out, start=Judged)
    found, _ = calibrate(config, folder, questions, modes=["lazy", "sink"], bound=bound, out=out, start=Judged)
    assert found.mode == "lazy"


def damaged(values: dict[str, Any]) -> Iterator[dict[str, Any]]:
    arms = values["arms"]
    first, *others = arms["lazy"]["replies"]
    for broken in (others, [{**first, "f1": "1"}, *others], [{**first, "logprob": math.nan}, *others], [5, *others]):
        yield {**values, "arms": {**arms, "lazy": {**arms["lazy"], "replies": broken}}}
    yield {**values, "arms": {mode: arm for mode, arm in arms.items() if mode != "none"}}
    yield {**values, "arms": {mode: arm for mode, arm in arms.items() if mode != "exact"}}
    yield {**values, "arms": []}
    yield {**values, "model": 5}
    yield {**values, "data": {**values["data"], "settings": 5}}
    yield {**values, "data": {name: of for name, of in values["data"].items() if name != "ids"}}
    yield {**values, "data": {**values["data"], "ids": 5}}


def test_a_damaged_file_of_results_is_refused(folder: Path, data: Path, tmp_path: Path) -> None:
    questions, out = draw(load(data), passages=3), tmp_path / "out.json"
    run(folder, questions, ["lazy"], out=out)
    for values in damaged(json.loads(out.read_text())):
        out.write_text(json.dumps(values))
        with pytest.raises(InputError, match="not the JSON of an evaluation"):
            run(folder, questions, ["lazy"], out=out)


def test_a_loss_that_may_lie_below_the_bound_is_not_below_it(folder: Path, enough: Path) -> None:
    """One question in six loses much: the mean is 5%, and its interval goes beyond 12%."""

    class Unsteady(Judged):
        def submit(self, request: Request, deliver: Deliver) -> Cancel:
            text = self._tokenizer.decode(request.token_ids)
            is_sixth = any(f"What is item {n}?" in text for n in range(0, ENOUGH, 6))
            self._lost = {"exact": 0.0, "lazy": 0.3 if is_sixth else 0.0}
            return super().submit(request, deliver)

    questions = draw(load(enough), passages=3)
    found, result = calibrate(
        Config(str(folder)), folder, questions, modes=["lazy"], bound=Bound(most=0.12), start=Unsteady
    )
    lost = Bound(most=0.12).lost(result, result.score("lazy"))
    assert lost is not None
    assert lost.low < lost.value < 0.12 < lost.high
    assert found.mode == "exact"
    assert "more questions might show that it is less" in found.why


# ---------------------------------------------------------------- the commands


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    monkeypatch.setattr(client, "start_engine", Judged)
    monkeypatch.setenv("LAZYRAG_CALIBRATIONS", str(tmp_path / "calibrations"))
    monkeypatch.setenv("LAZYRAG_EMBEDDER", "hash")
    monkeypatch.delenv("LAZYRAG_MODE")
    monkeypatch.chdir(tmp_path)

    def invoke(*arguments: object) -> Any:
        name = () if arguments[0] in ("calibrate", "ingest") else ("eval",)
        return CliRunner().invoke(app, [*name, *map(str, arguments)])

    return invoke


def test_the_command_answers_with_a_table_a_plot_and_json(
    command: Callable[..., Any], folder: Path, data: Path, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    options = ("--model", folder, "--modes", "lazy, prefix", "--docs", 3, "--order", "shuffled", "--limit", 4)
    done = command(data, *options, "--out", "out.json", "--plot", "plot.svg")
    assert done.exit_code == 0, done.output
    assert "| prefix | -3.200       | 90.0% [90.0%, 90.0%]" in done.stdout, done.stdout
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


def test_what_calibrate_finds_is_what_auto_runs(command: Callable[..., Any], folder: Path, enough: Path) -> None:
    options = ("--model", folder, "--docs", 3, "--modes", "lazy,sink")
    done = command("calibrate", enough, *options, "--bound", 0.35)
    assert done.exit_code == 0, done.output
    assert "mode sink: sink loses 20.0%" in done.stdout
    assert LazyRAG(model=str(folder)).choice.mode == "sink"
    done = command("calibrate", enough, *options, "--bound", 0.1, "--json")
    assert json.loads(done.stdout)["mode"] == "exact"
    choice = LazyRAG(model=str(folder)).choice
    assert (choice.mode, choice.why[:29]) == ("exact", "no mode is good enough (40 qu")


def test_calibrate_makes_questions_of_the_stores_own_documents(
    command: Callable[..., Any], folder: Path, tmp_path: Path
) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    names = [f"An{x}{y}a" for x in "abcde" for y in "fghijk"]
    for name in names:
        text = f"Passage of {name}. It was in the year of the long winter that {name}berg was built by the river."
        (docs / f"{name}.txt").write_text(text)
    assert command("ingest", docs, "--store", "kb", "--model", folder).exit_code == 0
    done = command("calibrate", "--store", "kb", "--modes", "lazy", "--bound", 0.6)
    assert done.exit_code == 0, done.output
    assert f"data: {ENOUGH} questions; name made from the store's documents, passages 10" in done.stdout
    choice = LazyRAG(store="kb").choice
    assert (choice.mode, "each of 10 passages" in choice.why) == ("lazy", True)
    (found,) = (tmp_path / "calibrations").iterdir()
    assert not any(name in found.read_text() for name in (*names, "winter"))


def test_a_store_names_the_model_and_what_chunks_are_computed_behind(
    command: Callable[..., Any], folder: Path, data: Path, tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_text(PASSAGE)
    ingest = ("ingest", "a.txt", "--store", "kb", "--model", folder, "--preamble", "Be brief.", "--mode", "prefix")
    assert command(*ingest).exit_code == 0
    done = command(data, "--store", "kb", "--modes", "prefix", "--docs", 2, "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert (found["model"]["name"], found["data"]["settings"]["preamble"]) == (folder.name, "Be brief.")
    assert command(data, "--store", "nowhere", "--model", folder).exit_code == 2


def test_a_mode_that_no_engine_can_have_is_refused_before_one_starts(folder: Path, data: Path) -> None:
    started: list[str] = []
    with pytest.raises(ConfigError, match="whole KV blocks"):
        run(folder, list(load(data).questions), ["lazy", "sink+first_k=7"], started=started)
    assert started == []


def test_calibrate_refuses_what_it_cannot_judge(
    command: Callable[..., Any], folder: Path, enough: Path, tmp_path: Path
) -> None:
    for options, message in [
        (("--limit", 3), "3 questions are too few"),
        (("--docs", ASKED + 1), f"Ask for fewer: --docs {ASKED}, at most; what is found holds for so many only"),
    ]:
        done = command("calibrate", enough, "--model", folder, *options)
        assert (done.exit_code, message in done.output) == (2, True), done.output
    assert not (tmp_path / "calibrations").exists()


def test_calibrate_needs_something_to_ask_about(command: Callable[..., Any], folder: Path) -> None:
    done = command("calibrate", "--model", folder)
    assert (done.exit_code, "no documents to make questions from" in done.output) == (2, True)
