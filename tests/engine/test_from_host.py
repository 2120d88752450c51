"""Chunks that the pool has evicted come back from host memory, and give the oracle's answers; forgotten ones do not."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
from engines import Result, Text, assert_agrees
from oracle import Oracle, Prompt, Use

from lazyrag.backend.engine import Delta, Request, Sampling, generate
from lazyrag.backend.local import LocalEngine
from lazyrag.types import Segment

pytestmark = [
    pytest.mark.engine,
    pytest.mark.filterwarnings("ignore:`torch"),
    pytest.mark.filterwarnings("ignore:Unclosed context:ResourceWarning"),  # vLLM leaves one behind
]
NUM_TOKENS = 8
BEHIND = {"alone": {}, "behind a preamble": {"prefix": 19}, "behind a sink": {"sink": 4}}
"""Tokens that the chunks are computed behind."""


@pytest.fixture(scope="module")
def engine(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalEngine]:
    """Of two ranks, with a pool that holds one request of full length, and NaN wherever nothing may be read."""
    engine = LocalEngine(
        str(tiny_model),
        mode="lazy-prefix",
        dtype="float32",
        max_model_len=1024,
        block_size=16,
        kv_root=tmp_path_factory.mktemp("kv"),
        kv_host_bytes=8 << 20,
        debug=True,
        engine_args={
            "tensor_parallel_size": 2,
            "skip_tokenizer_init": True,
            "num_gpu_blocks_override": 70,
            "max_num_batched_tokens": 64,
            "max_num_seqs": 8,
            "worker_cls": "poison.PoisonedWorker",
        },
    )
    yield engine
    engine.close()
    del engine
    gc.collect()


class Asking:
    """Prompts of chunks, compared with the oracle."""

    def __init__(self, engine: LocalEngine, oracle: Oracle, behind: dict[str, list[int]], seed: int) -> None:
        self.engine, self.oracle, self.behind, self.text = engine, oracle, behind, Text(seed)
        self.chunks = [Use(self.text(n)) for n in (37, 64, 5, 90)]

    def __call__(self, *numbers: int, in_part: int | None = None) -> tuple[str, ...]:
        """The sources of these chunks; of one of them, the first block and another one are computed in their place."""
        parts: list[list[int] | Use] = []
        for number in numbers:
            chunk = self.chunks[number].chunk
            split = [chunk[:16], Use(chunk, 16, 32, whole=True), chunk[48:64], Use(chunk, 64, whole=True)]
            parts += [self.text(3), *(split if number == in_part else [self.chunks[number]])]
        prompt = Prompt([*parts, self.text(9)], **self.behind)
        request = Request(
            token_ids=prompt.token_ids,
            segments=[Segment("", s.start, s.num_tokens, s.offset, s.chunk_tokens) for s in prompt.spans],
            prefix_len=len(prompt.prefix),
            sampling=Sampling(max_tokens=NUM_TOKENS, logprobs=3, ignore_eos=True),
            sink=prompt.sink,
        )
        (answer,) = generate(self.engine, [request])
        assert isinstance(answer, Delta), answer
        assert_agrees(self.oracle, prompt, Result(list(answer.token_ids), list(answer.logprobs), 0, None, None))
        return answer.reuse.sources

    def flood(self) -> None:
        """Evict everything from the pool: the first prompt leaves a few blocks, which are then the oldest."""
        for _ in range(2):
            (answer,) = generate(self.engine, [Request(self.text(1000), sampling=Sampling(max_tokens=1))])
            assert isinstance(answer, Delta), answer

    def pairs(self, *numbers: int) -> list[tuple[str, list[int]]]:
        return [(f"{number}", list(self.chunks[number].chunk)) for number in numbers]


@pytest.mark.parametrize("behind", BEHIND.values(), ids=BEHIND)
def test_every_tier_gives_the_oracles_answers(engine: LocalEngine, tiny_oracle: Oracle, behind: dict[str, int]) -> None:
    text = Text(1)
    ask = Asking(engine, tiny_oracle, {name: text(n) for name, n in behind.items()}, 50 + sum(behind.values()))
    assert ask(0, 1, 2, 3) == ("computed",) * 4
    ask.flood()
    assert ask(3, 1, 0, in_part=3) == ("host",) * 4
    assert ask(2, 3) == ("host", "hbm"), "of several tiers in one prompt"

    ask.flood()
    before = engine.stats()["prefetch"]
    engine.prefetch(ask.pairs(0, 1, 3), **ask.behind)
    generate(engine, [Request(ask.text(20), sampling=Sampling(max_tokens=20, ignore_eos=True))])
    sources = ask(1, 3, 0)
    after = engine.stats()["prefetch"]
    assert sources == ("hbm",) * 3, "loaded before the request came, or on its way for the prefetch"
    assert after["used"] + after["late"] - before["used"] - before["late"] == 3
    assert after["asked"] - before["asked"] == 3

    engine.forget(ask.pairs(1))
    assert ask(0, 1, 3) == ("hbm", "computed", "hbm")
    ask.flood()
    assert ask(1, 0) == ("host", "host"), "what was computed since is kept again"
    tiers = engine.stats()["tiers"]
    assert tiers["host"]["chunks"] >= 4
    assert tiers["host"]["bytes"] <= tiers["host"]["budget"] == 8 << 20
    assert tiers["host"]["loads"] == tiers["host"]["hits"] > 0
    assert tiers["disk"]["saves"] >= 5
