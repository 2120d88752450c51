"""The gate lets a mode pass that is good enough, and refuses the same mode when its attention is broken."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from engines import Config

from lazyrag.backend import local, wire
from lazyrag.backend.engine import Cancel, Deliver, EngineInfo, Request
from lazyrag.backend.layout import Span
from lazyrag.config import Config as Settings
from lazyrag.kernels import sdpa
from lazyrag.quality import calibrate as gate
from lazyrag.quality.calibrate import Bound, calibrate
from lazyrag.quality.data import Passage, Question
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
    assert "more than 75.0%" in broken.why
