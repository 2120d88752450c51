"""What is measured of a mode is what the oracle says; the gate refuses a mode whose attention is broken."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest
from engines import MAX_DEVIATION, Config
from oracle import Oracle, Prompt, Use

from lazyrag.backend import local, wire
from lazyrag.backend.engine import Cancel, Deliver, EngineInfo, Request
from lazyrag.backend.layout import Span
from lazyrag.client import LazyRAG
from lazyrag.config import Config as Settings
from lazyrag.kernels import sdpa
from lazyrag.quality import calibrate as gate
from lazyrag.quality.ask import prompt
from lazyrag.quality.calibrate import Bound, calibrate
from lazyrag.quality.data import Passage, Question, draw, load
from lazyrag.quality.evaluate import evaluate
from lazyrag.tokens import Tokenizer

MODEL = Path(os.environ.get("LAZYRAG_TEST_MODEL", Path(__file__).parents[2] / ".models" / "smollm2-135m-fp32"))
MAY_BE_LOST = Bound(most=0.75)
"""Of what the passages add: this model was not tuned for chunks, and loses much when all is well."""

CODES = {"red": "4711", "green": "9064", "blue": "3582", "yellow": "7239"}


@pytest.fixture(scope="session")
def tiny_model() -> Path:
    if not (MODEL / "config.json").is_file():
        pytest.skip(f"no real model: set LAZYRAG_TEST_MODEL, or make one with `make .models/{MODEL.name}/config.json`")
    return MODEL


@pytest.fixture(scope="session")
def tiny_oracle() -> None:
    """What answers must be is not asked here, only how good they are."""


class Seam:
    """The engine under test as lazyrag's callers know one; it answers within `submit`."""

    def __init__(self, engine, mode: str) -> None:
        self._llm = engine.llm
        self._tokenizer = Tokenizer.from_folder(MODEL)
        self.info = EngineInfo(str(MODEL), str(MODEL), mode, 1024, engine.config.block_size, 0, "")

    def submit(self, request: Request, deliver: Deliver) -> Cancel:
        spans = [Span(s.start, s.num_tokens, s.offset, s.chunk_tokens) for s in request.segments]
        extra = wire.spans_to_args(spans, request.prefix_len, request.sink)
        # Without a tokenizer of its own the engine cannot look for texts; and what it goes on to say is not asked.
        sampling = replace(request.sampling, stop=(), max_tokens=min(request.sampling.max_tokens, 2))
        params = local.sampling_params(replace(request, sampling=sampling), extra)
        prompt = {"prompt_token_ids": list(request.token_ids)}
        (output,) = self._llm.generate([prompt], params, use_tqdm=False)
        found = local.delta(output.outputs[0], ttft_s=0.0)
        deliver(replace(found, text=self._tokenizer.decode(found.token_ids, skip_special=True)))
        return lambda: None

    def stats(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        assert self._llm.reset_prefix_cache()


def questions() -> list[Question]:
    passages = [
        Passage(
            colour, f"The {colour} door is opened by a code of four digits, and nobody but the porter knows it: {code}."
        )
        for colour, code in CODES.items()
    ]
    asked = list(CODES.items())
    return [
        Question(colour, f"What is the code of the {colour} door?", (code,), tuple(passages[n:] + passages[:n]))
        for n, (colour, code) in enumerate(asked)
    ]


NEWS = {
    "The central bank left its rates where they were, and shares of lenders rose a little before noon. Traders had "
    "expected a cut in the spring, and speak of one in the autumn, if prices in the shops go on falling.": "Business",
    "The visitors scored twice in the last minutes, and the home side's keeper left the field in tears. It was the "
    "fourth defeat in a row, and the coach said that he would name another team for the cup on Sunday.": "Sports",
    "Ministers of both countries met at the border and agreed to open the two crossings in the north. They had been "
    "closed for eleven years, and the first lorries are to pass them in the week after the elections.": "World",
}


@pytest.fixture
def few_shot(tmp_path) -> Path:
    """Questions with the same solved examples in front of them, each in another order."""
    examples = [f"Text: {text}\nTopic: {topic}" for text, topic in NEWS.items()]
    asked = {"The striker will miss the cup final.": "Sports", "The treaty was signed in the old palace.": "World"}
    rows = [
        {"question": f"Text: {text}\nTopic:", "answers": [topic], "examples": examples[:: 1 - 2 * n]}
        for n, (text, topic) in enumerate(asked.items())
    ]
    path = tmp_path / "news.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def parts_of(plan) -> Prompt:
    """What the oracle is asked for a plan."""
    parts = []
    for piece in plan.pieces:
        tokens, at = list(piece.token_ids), 0
        for start, end in piece.reused:
            parts += [tokens[at:start], Use(tokens, start, end - start, whole=True)]
            at = end
        parts.append(tokens[at:])
    return Prompt([part for part in parts if not isinstance(part, list) or part], sink=list(plan.sink))


@pytest.mark.parametrize("engine", [Config("real")], ids=str, indirect=True)
def test_examples_in_any_order_are_measured_as_the_oracle_says(engine, few_shot):
    modes = ["exact", "sink+first_k=16+recompute=0.3"]
    asked = draw(load(few_shot), passages=len(NEWS))
    result = evaluate(
        Settings(str(MODEL)), MODEL, asked, modes, start=lambda settings, folder: Seam(engine, settings.mode)
    )
    oracle = Oracle(MODEL)
    rag = LazyRAG(Settings(str(MODEL), mode="lazy"), engine=Seam(engine, "lazy"))
    rag.register([passage.text for passage in asked[0].passages])
    for mode in modes:
        for question, reply in zip(asked, result.arms[mode].replies, strict=True):
            plan = rag.plan(prompt(rag, question, chat=True), mode=mode)
            assert len(plan.segments) >= (0 if mode == "exact" else len(NEWS))
            answer = rag.tokenizer.encode_plain(f" {question.answers[0]}")
            expected = oracle.logprobs(parts_of(plan), answer)
            assert reply.logprob == pytest.approx(
                fmean(expected[step, token].item() for step, token in enumerate(answer)), abs=MAX_DEVIATION
            )
    anew = [reply.recomputed_tokens for reply in result.arms[modes[-1]].replies]
    assert 16 * len(NEWS) < anew[0] == anew[1] <= 32 * len(NEWS), "of each example its first block and another one"
    means = [fmean(reply.logprob for reply in result.arms[mode].replies) for mode in modes]
    assert len({round(value, 2) for value in means}) == len(modes), "what could not be told apart proves nothing"


def run(engine, out):
    return calibrate(
        Settings(str(MODEL)),
        MODEL,
        questions(),
        modes=["lazy"],
        bound=MAY_BE_LOST,
        out=out,
        start=lambda settings, folder: Seam(engine, settings.mode),
    )


@pytest.mark.parametrize("engine", [Config("real")], ids=str, indirect=True)
def test_a_fault_planted_in_attention_ends_in_exact_with_the_reason(engine, monkeypatch, tmp_path):
    monkeypatch.setattr(gate, "ENOUGH", len(CODES))  # an engine takes long, and this fault needs no statistics
    healthy, result = run(engine, tmp_path / "healthy.json")
    assert healthy.mode == "lazy", healthy.why

    whole = sdpa._attend_tiles

    def without_values(q, half_turned, lines, tiles, scale):
        """Reads zeros for the values of every chunk that was moved."""
        out, lse = whole(q, half_turned, lines, tiles, scale)
        return out if tiles.turn is None else out * 0, lse

    monkeypatch.setattr(sdpa, "_attend_tiles", without_values)
    del result.arms["lazy"]  # what full attention answers is known, and needs no chunks
    result.save(tmp_path / "broken.json")
    broken, _ = run(engine, tmp_path / "broken.json")
    assert broken.mode == "exact"
    assert "lazy loses" in broken.why
    assert "only 75.0% are allowed" in broken.why
