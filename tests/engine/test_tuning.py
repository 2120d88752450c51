"""What a model is tuned on is what an engine computes: the rows of `lazyrag.tune` against the engine's oracle."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from engines import MAX_DEVIATION, Text
from oracle import Oracle, Prompt, Use

from lazyrag.modes import ReuseMode
from lazyrag.quality.data import Passage, Question
from lazyrag.tune.forward import logits
from lazyrag.tune.layout import lay_out
from lazyrag.tune.samples import Sampler, passages_of
from lazyrag.tune.train import load_model

REPO = Path(__file__).parents[2]


def logprobs(model, parts, mode: ReuseMode, forced: list[int], *, beside=(), **behind) -> torch.Tensor:
    """[len(forced), vocabulary], as the oracle has it; `beside` are other rows of the batch."""
    *before, (last, _) = parts
    row = lay_out([*before, ([*last, *forced[:-1]], False)], mode, **behind)
    with torch.no_grad():
        return logits(model, [row, *beside], len(forced))[0].log_softmax(-1)


@pytest.fixture(scope="module")
def tiny(tiny_model: Path):
    return load_model(tiny_model, "cpu").eval()


@pytest.mark.parametrize("first_k", [0, 16, 48])
@pytest.mark.parametrize("num_beside", [0, 2])
def test_rows_are_the_oracles(tiny, tiny_oracle, first_k: int, num_beside: int) -> None:
    text = Text(first_k)
    chunks = [text(37), text(64), text(48), text(37)]
    between = [text(21), text(7), [], text(1), text(12)]
    forced = text(6)
    parts = [(between[0], False)]
    oracle_parts: list = [between[0]]
    for chunk, literal in zip(chunks, between[1:], strict=True):
        parts += [(chunk, True), (literal, False)]
        head = chunk[:first_k]
        # What is recomputed stands before the segment as literal text; of a shorter chunk, all of it is.
        oracle_parts += [[*head], *([Use(chunk, first_k)] if len(head) < len(chunk) else []), literal]
    expected = tiny_oracle.logprobs(Prompt([part for part in oracle_parts if part]), forced)
    mode = ReuseMode("lazy", first_k)
    beside = [lay_out([(text(9), False), (text(20 + n), True), (text(300), False)], mode) for n in range(num_beside)]
    found = logprobs(tiny, parts, mode, forced, beside=beside)
    assert (found - expected).abs().max() < MAX_DEVIATION


def test_rows_behind_a_preamble_are_the_oracles(tiny, tiny_oracle) -> None:
    text = Text(7)
    preamble, a, b, forced = text(19), text(37), text(64), text(6)
    between, question = text(11), text(9)
    expected = tiny_oracle.logprobs(Prompt([between, Use(a), Use(b), question], preamble), forced)
    parts = [([*preamble, *between], False), (a, True), (b, True), (question, False)]
    found = logprobs(tiny, parts, ReuseMode("prefix"), forced, prefix_len=19)
    assert (found - expected).abs().max() < MAX_DEVIATION
    assert (logprobs(tiny, parts, ReuseMode("lazy"), forced) - expected).abs().max() > 0.1


@pytest.mark.parametrize("first_k", [0, 16])
def test_rows_behind_a_sink_are_the_oracles(tiny, tiny_oracle, first_k: int) -> None:
    text = Text(9)
    sink, begin, a, b, question, forced = text(4), text(2), text(37), text(64), text(9), text(6)
    heads = [[*chunk[:first_k]] for chunk in (a, b)]
    oracle_parts = [begin, heads[0], Use(a, first_k), heads[1], Use(b, first_k), question]
    expected = tiny_oracle.logprobs(Prompt([part for part in oracle_parts if part], sink=sink), forced)
    parts = [(begin, False), (a, True), (b, True), (question, False)]
    found = logprobs(tiny, parts, ReuseMode("sink", first_k), forced, sink=sink)
    assert (found - expected).abs().max() < MAX_DEVIATION


def test_full_attention_is_what_hugging_face_computes(tiny) -> None:
    text = Text(8)
    parts, forced = [(text(9), False), (text(40), True), (text(5), False)], text(4)
    ids = torch.tensor([[*(token for tokens, _ in parts for token in tokens), *forced[:-1]]])
    with torch.no_grad():
        expected = tiny(ids).logits[0, -4:].log_softmax(-1)
    assert (logprobs(tiny, parts, ReuseMode("exact"), forced) - expected).abs().max() < MAX_DEVIATION


def test_a_real_prompt_is_the_oracles() -> None:
    folder = Path(os.environ.get("LAZYRAG_TEST_MODEL") or REPO / ".models" / "smollm2-135m")
    data = Path(os.environ.get("LAZYRAG_TEST_DATA") or REPO.parent / "shared" / "data") / "2wiki_lazyattn_demo_20.jsonl"
    for needed in (folder, data):
        if not needed.exists():
            pytest.skip(f"{needed} is not here")
    row = json.loads(data.read_text(encoding="utf-8").splitlines()[0])
    passages = tuple(Passage(doc["title"], doc["text"]) for doc in row["docs"][:4])
    asked = Question("0", row["question"], tuple(row["answers"]), passages)
    sample = Sampler(folder, passages_of([asked])).sample(asked)
    assert sum(is_chunk for _, is_chunk in sample.parts) == 4
    forced = [*sample.answer, *sample.end]
    prompt = Prompt([Use(list(tokens)) if is_chunk else list(tokens) for tokens, is_chunk in sample.parts])
    expected = Oracle(folder).one_pass(prompt, forced)
    found = logprobs(load_model(folder, "cpu").eval(), sample.parts, ReuseMode("lazy"), forced)
    assert (found - expected).abs().max() < MAX_DEVIATION
