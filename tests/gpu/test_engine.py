"""The plugin in vLLM on a GPU against fp32 oracles: eager, in graphs, synchronous and asynchronous, on a tight pool.

The model's weights are fp16 numbers, and the oracle computes with the same ones in fp32. What is left is the rounding
of fp16, which ordinary prompts of the same engine have, too; an error in position, order or visibility is far larger.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from engines import Text
from gpu_engines import MAX_RMS, Corpus, GPUConfig, GPUEngine
from oracle import Oracle, Prompt, Use

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.engine,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),  # vLLM's own
]

CONFIGS = [
    GPUConfig("eager", eager=True),
    GPUConfig("graphs", is_async=True),
    GPUConfig("graphs-48", is_async=True, budget=48, num_blocks=400),
    GPUConfig("page-64", is_async=True, block_size=64, num_blocks=400, sizes=(1, 8, 32)),
]


@pytest.fixture(scope="module", params=CONFIGS, ids=str)
def engine(request: pytest.FixtureRequest, model: Path, oracle: Oracle):
    engine = GPUEngine(request.param, model, oracle)
    yield engine
    engine.close()


@pytest.fixture(params=[(0, 0), (19, 0), (0, 4)], ids=["alone", "behind-19", "sink-4"])
def corpus(request: pytest.FixtureRequest) -> Corpus:
    return Corpus(sum(request.param), *request.param)


def test_ordinary_prompts(engine):
    """What rounding alone does."""
    text = Text(5)
    for _ in range(2):  # the second time from the cache
        engine.check(*(Prompt([text(n)]) for n in (300, 900, 64, 3)), children=0)


def test_cold_hot_and_reordered(engine, corpus):
    preambles = 1 if corpus.prefix or corpus.sink else 0
    engine.check(corpus(11, "A", 5, "B", 5, "C", 21), children=3 + preambles)
    engine.check(corpus(11, "A", 5, "B", 5, "C", 21), children=0)
    engine.check(corpus(11, "C", 5, "A", 5, "B", 21), children=0)


def test_long_chunks_and_long_literals(engine, corpus):
    engine.check(corpus("H", "I", "J", "K", 64))
    engine.check(corpus("J", "K", "H", "I", 64), children=0)
    engine.check(corpus(70, "J", 200, "H", 33, "I", 64), children=0)


def test_chunks_twice_beside_each_other_and_single_tokens(engine, corpus):
    engine.check(corpus("H", 5, "H", "H", 21))
    engine.check(corpus(1, "A", 1, "B", 1, "G", "F", "G", 1))


def test_lazy_and_ordinary_rows_in_one_batch(engine, corpus):
    ordinary = [Prompt([corpus.text(n)]) for n in (400, 3)]
    engine.check(
        corpus(11, "B", 5, "D", 7),
        ordinary[0],
        corpus("E", 5, "A", 1, "D", 21),
        ordinary[1],
        corpus("J", "H", 7),
        corpus(1, "C", "E", 1, "A", 5, "B", 21),
        max_tokens=40,
    )


def test_a_segment_that_begins_inside_its_chunk(engine, corpus):
    size = engine.config.block_size
    chunk = corpus.chunks["K"].chunk
    engine.check(corpus(11, chunk[:size], 21))
    prompt = corpus(chunk[:size], 21)
    parts = [prompt.parts[0], Use(chunk, offset=size), prompt.parts[1]]
    engine.check(corpus.prompt(parts))


def test_blocks_of_many_chunks_that_are_computed_in_place(engine, corpus):
    """The head of each, and blocks from anywhere: a suffix of hundreds of tokens among twenty segments."""
    size, parts = engine.config.block_size, []
    for name in "HIJKABDE":
        chunk = corpus.chunks[name].chunk
        middle = len(chunk) // 2 // size * size
        parts += [chunk[:size]] if len(chunk) > size else []
        if middle > size:
            parts += [Use(chunk, size, middle - size, whole=True), chunk[middle : middle + size]]
            middle += size
        parts += [Use(chunk, max(middle, size), whole=True)] if len(chunk) > max(middle, size) else []
    for _ in range(2):  # cold and hot
        engine.check(corpus.prompt([*parts, corpus.text(64)]))


def test_more_requests_than_the_pool_holds(engine):
    """Preemption and eviction: what comes back is computed anew, or found."""
    corpus = Corpus(7)
    chunks = [Use(corpus.text(n)) for n in range(200, 600, 25)]
    order = torch.Generator().manual_seed(1)
    prompts = []
    for _ in range(24):
        picked = [chunks[i] for i in torch.randperm(len(chunks), generator=order)[:6].tolist()]
        prompts.append(Prompt([corpus.text(9), *picked, corpus.text(30)]))
    engine.check(*prompts, max_tokens=20)


def test_ordinary_requests_are_stock_vllm_to_the_last_bit(engine, corpus):
    """Nothing that lazy requests do changes what ordinary ones compute, cold or hot."""
    text = Text(99)
    ordinary = [Prompt([text(n)]) for n in (300, 40)]

    def run():
        assert engine.llm.reset_prefix_cache()
        return [engine.generate(prompt) for prompt in ordinary]

    before = run()
    engine.check(corpus(11, "H", 5, "K", 7), *ordinary)
    assert run() == before


def test_the_rotation_the_positions_and_the_visibility_matter(engine, monkeypatch):
    """The bound is sharp: without any of the three, answers are far from the oracle's."""
    from lazyrag.backend.plugin.plans import Planner
    from lazyrag.backend.plugin.positions import TruePositions
    from lazyrag.kernels import plan

    corpus = Corpus(3, 0)
    prompt = corpus(70, "J", 200, "H", 33, "I", 64)
    engine.check(prompt)
    describe = Planner.describe

    def unturned(self, layout, blocks):
        reused = describe(self, layout, blocks)
        reused.context.line[:] = reused.by_place.line[:] = 0
        return reused

    def all_seen(self, layout, blocks):
        reused = describe(self, layout, blocks)
        reused.context.visible_from[:] = 0
        return reused

    def physical(self, first, num_tokens):
        return plan.np.arange(first, first + num_tokens)

    broken = [
        (engine.worker._rows, "_prepare", change.__get__(engine.worker._planner)) for change in (unturned, all_seen)
    ]
    broken.append((TruePositions, "of", physical))
    for owner, name, change in broken:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, change)
            assert engine.llm.reset_prefix_cache()
            (result,) = engine.generate(prompt)
            assert engine.deviation(prompt, result)[0] > 3 * MAX_RMS
    assert engine.llm.reset_prefix_cache()


def test_the_configuration_is_what_it_says(engine):
    graphs = engine.worker._graphs
    assert engine.worker.use_v2_model_runner == (os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "1")
    assert (graphs is None) == (engine.config.eager or not engine.worker.use_v2_model_runner)
    if graphs is not None:
        sizes = [n for n in engine.config.sizes if n <= engine.config.budget]  # vLLM captures no others
        assert len(graphs.graphs) == sum(n <= 8 for n in sizes) + sum(n > 1 for n in sizes)
