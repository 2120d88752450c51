"""`lazyrag tune` on a tiny random model with a real tokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from lazyrag.cli import app
from lazyrag.errors import ConfigError, InputError
from lazyrag.modes import ReuseMode
from lazyrag.quality.data import Passage, Question
from lazyrag.tune import record, run
from lazyrag.tune.evaluate import answers, kept, logprobs
from lazyrag.tune.forward import half_precision, logits, tensors
from lazyrag.tune.layout import lay_out, tunable
from lazyrag.tune.samples import Draws, Sampler, ids_of, passages_of, split, with_distractors
from lazyrag.tune.train import Recipe, Step, Trainer, load_model

NAMES = ("Ada", "Boole", "Curie", "Darwin", "Euler", "Fermat", "Gauss", "Hopper", "Ising", "Joule", "Kepler", "Mach")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ASKED = [
    Question(
        str(n),
        f"What did {name} bring on day {n}?",
        (f"{n + 20} pears",),
        (
            Passage(
                name, f"On day {n} a person of the name {name} went up the hill and brought {n + 20} pears for all."
            ),
        ),
    )
    for n, name in enumerate(NAMES)
]


@pytest.fixture(scope="module")
def folder(model_folder: Callable[..., Path]) -> Path:
    """A model folder: two layers of random weights in bf16, and a small tokenizer with a chat template."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=608,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        eos_token_id=1,
    )
    out = model_folder("byte-level", chat_template=TEMPLATE)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(out)
    return out


@pytest.fixture
def options(folder: Path, tmp_path: Path) -> run.Options:
    recipe = Recipe(docs=3, steps=5, batch=4, lr=1e-2, lora=4)
    return run.Options(
        model=folder, out=tmp_path / "out", recipe=recipe, asked=ASKED, held_out=0.3, evaluated=2, save_every=2
    )


def weights(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return dict(load_file(folder / "model.safetensors"))


def finish(steps: Iterator[Step | run.Result]) -> run.Result:
    *_, last = steps
    assert isinstance(last, run.Result)
    return last


# ---------------------------------------------------------------- rows and samples


def test_the_layouts_of_the_module_docstring() -> None:
    parts = [(list(range(100, 107)), False), ([0, 1, 2, 3], True), ([9], False)]
    lazy = lay_out(parts, ReuseMode("lazy"))
    assert lazy.positions == list(range(12))
    assert lazy.owners == [-1] * 7 + [1] * 4 + [-1]
    assert not any(lazy.hidden)
    sink = lay_out(parts, ReuseMode("sink"), sink=[50, 51])
    assert sink.token_ids[7:-1] == [50, 51, 0, 1, 2, 3]
    assert sink.positions[7:] == [5, 6, 7, 8, 9, 10, 11]
    assert sink.hidden[7:] == [True] * 2 + [False] * 5
    first = lay_out(parts, ReuseMode("lazy", 2))
    assert first.token_ids[7:-1] == [0, 1, 0, 1, 2, 3]
    assert first.positions[7:] == [7, 8, 7, 8, 9, 10, 11]
    assert first.owners[7:] == [-1, -1, 1, 1, 1, 1, -1]
    assert first.hidden[7:] == [False, False, True, True, False, False, False]
    assert lay_out(parts, ReuseMode("exact")).owners == [-1] * 12


@pytest.mark.parametrize(
    ("text", "message"),
    [("lazzy", "no mode"), ("exact+first_k=16", "add nothing"), ("lazy+recompute=0.1", "be tuned for")],
)
def test_other_modes_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tunable(text)


def test_no_document_is_on_both_sides_and_the_order_does_not_matter() -> None:
    shared = [replace(q, passages=(*q.passages, ASKED[(n + 5) % 12].passages[0])) for n, q in enumerate(ASKED[:6])]
    asked = [*ASKED, *shared]
    sides = split(asked, 0.4)
    assert len(sides.training) + len(sides.held_out) == len(asked)
    assert sides.training
    assert sides.held_out
    assert not set(ids_of(sides.training)) & set(ids_of(sides.held_out))
    again = split(asked[::-1], 0.4)
    assert {q.id for q in again.training} == {q.id for q in sides.training}


def test_distractors_fill_up_to_the_count_without_repeating_a_passage() -> None:
    pool = passages_of(ASKED)
    own = replace(ASKED[0], passages=(pool[3], pool[4]))
    full = with_distractors(own, pool, 8, Random(0))
    assert len(set(full.passages)) == 8
    assert set(own.passages) < set(full.passages)
    assert {with_distractors(own, pool, 8, Random(n)).passages.index(pool[3]) for n in range(200)} == set(range(8))
    assert with_distractors(own, pool, 1, Random(0)).passages == (pool[3],)
    assert len(with_distractors(own, pool, 99, Random(0)).passages) == len(pool)


def test_each_epoch_brings_each_question_once_and_steps_do_not_depend_on_each_other() -> None:
    draws = Draws(ASKED, docs=4, batch=4, seed=1)
    steps = [[question for question, _ in draws.step(n)] for n in range(6)]
    for epoch in (steps[:3], steps[3:]):
        assert sorted(q.id for step in epoch for q in step) == sorted(q.id for q in ASKED)
    assert steps[0] != steps[3]
    assert [q for q, _ in Draws(ASKED, docs=4, batch=4, seed=1).step(5)] == steps[5]
    assert all(len(q.passages) == 4 for step in steps for q in step)


def test_what_is_trained_is_the_answer_and_the_token_that_ends_it(folder: Path) -> None:
    sampler = Sampler(folder, passages_of(ASKED))
    sample = sampler.sample(ASKED[0])
    assert sampler.tokenizer.decode(sample.answer) == "20 pears"
    assert sample.end == (sampler.tokenizer.eos_id,)
    assert [is_chunk for _, is_chunk in sample.parts] == [False, True, False]
    assert len(sample.row(ReuseMode("lazy"))) == len(sample.prompt(ReuseMode("lazy"))) + len(sample.answer) + 1


# ---------------------------------------------------------------- training


def test_a_run_that_is_killed_goes_on_to_the_same_weights(options: run.Options, tmp_path: Path) -> None:
    for recipe in (options.recipe, replace(options.recipe, lora=None, lr=1e-3)):
        kind = str(recipe.lora)
        whole = replace(options, recipe=recipe, out=tmp_path / kind / "whole", evaluated=0)
        finish(run.tune(whole))
        broken = replace(whole, out=tmp_path / kind / "broken")
        broken.out.mkdir()
        (broken.out / "checkpoint.new").write_bytes(b"the beginning of a")
        for step in run.tune(broken):  # killed in step 4, the checkpoint is of step 2
            if isinstance(step, Step) and step.done == 3:
                break
        assert not (broken.out / "config.json").exists()
        going_on = run.tune(replace(broken, resume=True))
        assert next(going_on).done == 3  # type: ignore[union-attr]
        finish(going_on)
        expected, found, before = weights(whole.out), weights(broken.out), weights(options.model)
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        assert any(not torch.equal(found[name], before[name]) for name in before)


def test_a_checkpoint_of_another_run_is_refused(options: run.Options) -> None:
    for step in run.tune(options):
        if isinstance(step, Step) and step.done == 2:
            break
    with pytest.raises(ConfigError, match="different are lr"):
        next(run.tune(replace(options, resume=True, recipe=replace(options.recipe, lr=1e-3))))
    with pytest.raises(ConfigError, match="different are data"):
        next(run.tune(replace(options, resume=True, asked=ASKED[:-4])))
    with pytest.raises(ConfigError, match="not empty"):
        next(run.tune(options))
    with pytest.raises(ConfigError, match="not empty"):  # finished, for example
        next(run.tune(replace(options, resume=True, out=options.model)))
    (options.out / run.CHECKPOINT).write_bytes(b"rubbish")
    with pytest.raises(ConfigError, match="cannot be read"):
        next(run.tune(replace(options, resume=True)))


def test_the_answers_become_likelier_where_documents_do_not_see_each_other(options: run.Options) -> None:
    recipe = replace(options.recipe, steps=20, distill=0.0, exact_share=0.0, lora=None)
    sampler = Sampler(options.model, passages_of(ASKED))
    trainer = Trainer(load_model(options.model, "cpu"), recipe, ASKED, sampler, pass_tokens=4096)
    losses = [step.answer_loss for step in trainer.run()]
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])


@pytest.mark.parametrize("lora", [4, None])
def test_the_untuned_model_with_full_attention_is_the_teacher(options: run.Options, lora: int | None) -> None:
    def first_steps(exact_share: float) -> list[float]:
        recipe = replace(options.recipe, exact_share=exact_share, lora=lora, steps=2)
        sampler = Sampler(options.model, passages_of(ASKED))
        trainer = Trainer(load_model(options.model, "cpu"), recipe, ASKED, sampler, pass_tokens=4096)
        return [step.distance for step in trainer.run()]

    exact, lazy = first_steps(1.0), first_steps(0.0)
    assert abs(exact[0]) < 1e-6 < lazy[0]
    assert exact[1] > 1e-6  # the model has moved, the teacher has not


def test_how_a_step_is_cut_into_passes_does_not_matter(options: run.Options) -> None:
    def first_loss(pass_tokens: int) -> Step:
        sampler = Sampler(options.model, passages_of(ASKED))
        return next(
            Trainer(load_model(options.model, "cpu"), options.recipe, ASKED, sampler, pass_tokens=pass_tokens).run()
        )

    one, many = first_loss(100_000), first_loss(1)
    assert many.answer_loss == pytest.approx(one.answer_loss, rel=1e-5)
    assert many.distance == pytest.approx(one.distance, rel=1e-3, abs=1e-7)


@pytest.mark.parametrize("lora", [4, None])
def test_in_half_precision_logits_are_made_in_fp32(options: run.Options, lora: int | None) -> None:
    sampler = Sampler(options.model, passages_of(ASKED))
    recipe = replace(options.recipe, lora=lora)
    model = Trainer(load_model(options.model, "cpu"), recipe, ASKED, sampler, pass_tokens=4096).model
    rows = [sampler.sample(question).row(ReuseMode("lazy")) for question in ASKED[:2]]
    expected = logits(model, rows, 5)
    with half_precision(model, "cpu"):
        found = model(**tensors(rows, torch.device("cpu")), use_cache=False, logits_to_keep=5).logits
    assert found.dtype == torch.float32
    assert not torch.equal(found, expected)
    assert (found - expected).abs().max() < 0.02 * expected.abs().max()
    assert (found.bfloat16() - found).abs().max() > 0
    assert torch.equal(logits(model, rows, 5), expected)  # it ends with the context
    found.sum().backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


def test_a_prompt_that_is_too_long_is_refused(options: run.Options) -> None:
    long = [replace(q, passages=(Passage("", q.passages[0].text * 60),)) for q in ASKED]
    with pytest.raises(InputError, match=r"more than the model's 2048"):
        next(run.tune(replace(options, asked=long)))


# ---------------------------------------------------------------- what comes of it


def test_the_folder_is_a_model_that_says_what_it_was_trained_on(options: run.Options) -> None:
    from transformers import AutoModelForCausalLM

    result = finish(run.tune(options))
    assert [score.mode for score in result.after] == ["none", "exact", "lazy", "sink"]
    assert not (options.out / run.CHECKPOINT).exists()
    assert (options.out / "config.json").read_bytes() == (options.model / "config.json").read_bytes()
    assert AutoModelForCausalLM.from_pretrained(options.out).dtype == torch.bfloat16
    known = record.trained_on(options.out)
    sides = split(ASKED, 0.3)
    assert known == set(ids_of(sides.training))
    assert not known & set(ids_of(sides.held_out))
    assert (
        "12 questions" in (options.out / run.CARD).read_text()
        or str(len(sides.training)) in (options.out / run.CARD).read_text()
    )
    assert ASKED[0].passages[0].text not in (options.out / record.FILE_NAME).read_text()


def test_the_adapter_merged_by_peft_is_the_tuned_model(options: run.Options) -> None:
    from peft import PeftModel

    finish(run.tune(options))
    merged = PeftModel.from_pretrained(load_model(options.model, "cpu"), options.out / run.ADAPTER).merge_and_unload()
    found = weights(options.out)
    for name, parameter in merged.named_parameters():
        assert torch.equal(parameter.to(torch.bfloat16), found[name]), name


def test_a_model_that_was_not_tuned_names_no_documents_and_a_damaged_record_is_an_error(tmp_path: Path) -> None:
    assert record.trained_on(tmp_path) == frozenset()
    (tmp_path / record.FILE_NAME).write_text("[]")
    with pytest.raises(ConfigError, match="no record"):
        record.trained_on(tmp_path)


def test_what_a_held_out_question_is_measured_with_is_held_out(options: run.Options) -> None:
    training, held = run.sides(replace(options, cloze=16, evaluated=100))
    assert any(question.id.startswith("cloze") for question in training)
    assert not any(question.id.startswith("cloze") for question in held)
    assert not set(ids_of(training)) & set(ids_of(held))


# ---------------------------------------------------------------- measuring


def test_likelihoods_and_answers_are_hugging_faces(folder: Path) -> None:
    sampler = Sampler(folder, passages_of(ASKED))
    model = load_model(folder, "cpu").eval()
    asked = [with_distractors(q, passages_of(ASKED), 2 + n, Random(n)) for n, q in enumerate(ASKED[:3])]
    samples = [sampler.sample(question) for question in asked]
    found = logprobs(model, samples, ReuseMode("exact"), 100_000)
    texts = answers(model, sampler, samples, ReuseMode("exact"), 100_000)
    for sample, mine, text in zip(samples, found, texts, strict=True):
        prompt = [token for tokens, _ in sample.parts for token in tokens]
        ids = torch.tensor([[*prompt, *sample.answer]])
        with torch.no_grad():
            of_each = model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            generated = model.generate(ids[:, : len(prompt)], max_new_tokens=32, do_sample=False, pad_token_id=1)
        expected = of_each.gather(-1, ids[0, len(prompt) :, None]).mean().item()
        assert mine == pytest.approx(expected, abs=1e-4)
        new = [token for token in generated[0, len(prompt) :].tolist() if token != 1]
        assert text == sampler.tokenizer.decode(new).partition("\n")[0].strip()


def test_the_kept_share_is_that_of_the_means() -> None:
    found = kept([-1.0, -2.0, -3.0], [-1.0, -1.0, -1.0], [-3.0, -4.0, -5.0])
    assert found.value == pytest.approx(2 / 3)
    assert found.low <= found.value <= found.high


# ---------------------------------------------------------------- command line


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: CliRunner().invoke(app, ["tune", *map(str, arguments)])


def write(path: Path) -> Path:
    rows = [
        {
            "id": q.id,
            "question": q.question,
            "answers": q.answers,
            "docs": [{"title": p.title, "text": p.text} for p in q.passages],
        }
        for q in ASKED
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_the_command_tunes_and_reports(cli: Callable[..., Any], folder: Path, tmp_path: Path) -> None:
    data = write(tmp_path / "data.jsonl")
    common = ("--model", folder, "--docs", 2, "--steps", 2, "--batch", 2, "--held-out", 0.3, "--measure", 2)
    done = cli(data, *common, "--out", "tuned", "--json", "--synthetic", data, "--cloze", 5)
    assert done.exit_code == 0, done.output
    assert [row["mode"] for row in json.loads(done.stdout)["after"]] == ["none", "exact", "lazy", "sink"]
    assert (tmp_path / "tuned" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "1", "--epochs", "1"], "Both steps and epochs"),
        (["--modes", "lazzy"], "is no mode"),
        (["--lr", "2"], "cannot have lr=2.0"),
    ],
)
def test_wrong_settings_are_named(
    cli: Callable[..., Any], folder: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    done = cli(write(tmp_path / "data.jsonl"), "--model", folder, *arguments)
    assert done.exit_code == 2
    assert message in done.stderr


def test_nothing_to_train_on_is_an_error(cli: Callable[..., Any], folder: Path) -> None:
    done = cli("--model", folder)
    assert done.exit_code == 2
    assert "nothing to train on" in done.stderr
