"""Engines that the portable kernel serves on any GPU: heads of 256, and an fp8 cache. About two minutes.

fp8 rounds queries, keys and values to three bits, in ordinary requests, too. So what an engine may deviate from the
fp32 oracle is twice what plain vLLM's ordinary prompts do, which is measured first.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import Text
from gpu_engines import Corpus, GPUConfig, GPUEngine, make_model
from oracle import Oracle, Prompt

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.engine,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),  # vLLM's own
]
SIZES = (1, 2, 4, 8, 16, 64)


class Fp8Engine(GPUEngine):
    def device_arguments(self) -> dict[str, Any]:
        return {**super().device_arguments(), "dtype": "bfloat16", "kv_cache_dtype": "fp8"}


@pytest.fixture(scope="module", params=["heads of 256", "fp8"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GPUEngine]:
    torch.backends.cuda.matmul.allow_tf32 = False
    is_fp8 = request.param == "fp8"
    if is_fp8 and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("vLLM's FlashAttention reads fp8 caches on sm_90 only")
    folder: Path = tmp_path_factory.mktemp("models") / "llama"
    model = make_model(folder, torch.bfloat16) if is_fp8 else make_model(folder, head_dim=256, num_attention_heads=4)
    config = GPUConfig(request.param, is_async=True, num_blocks=1500, sizes=SIZES)
    engine = (Fp8Engine if is_fp8 else GPUEngine)(config, model, Oracle(model, "cuda"))
    text = Text(5)
    ordinary = [Prompt([text(n)]) for n in (300, 900, 64)]
    noise = [engine.deviation(p, r)[0] for p, r in zip(ordinary, engine.generate(*ordinary), strict=True)]
    print(f"{request.param}: ordinary prompts deviate by {noise}")
    if is_fp8:
        engine.max_rms = 2 * max(noise)
        assert engine.max_rms < 1.0
    yield engine
    engine.close()


def test_the_portable_kernel_runs_in_both_forms(engine: GPUEngine) -> None:
    planned = {variant.kernel for variant, _ in engine.worker._planner._in_graphs.values()}
    assert planned == {"portable"}
    assert len(engine.worker._graphs.graphs) == sum(n <= 8 for n in SIZES) + sum(n > 1 for n in SIZES)


def test_cold_hot_and_reordered(engine: GPUEngine) -> None:
    for prefix_len, sink_len in ((0, 0), (19, 0), (0, 4)):
        corpus = Corpus(prefix_len + sink_len, prefix_len, sink_len)
        engine.check(corpus(11, "A", 5, "B", 5, "H", 21), children=3 + bool(corpus.prefix or corpus.sink))
        engine.check(corpus(11, "H", 5, "A", 200, "B", 21), children=0)


def test_long_chunks_and_rows_of_every_kind_in_one_batch(engine: GPUEngine) -> None:
    corpus = Corpus(3)
    engine.check(corpus(70, "J", 200, "H", 33, "I", 64))
    engine.check(corpus(11, "B", 5, "D", 7), Prompt([corpus.text(400)]), corpus("J", "H", 7), max_tokens=40)


def test_the_bound_is_sharp(engine: GPUEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """At physical positions, the answers are far from the oracle's."""
    from lazyrag.backend.plugin.positions import TruePositions
    from lazyrag.kernels import plan

    prompt = Corpus(4)(70, "J", 200, "H", 33, "I", 64)
    engine.check(prompt)
    monkeypatch.setattr(TruePositions, "of", lambda self, first, n: plan.np.arange(first, first + n))
    assert engine.llm.reset_prefix_cache()
    (result,) = engine.generate(prompt)
    assert engine.deviation(prompt, result)[0] > 2 * engine.max_rms
    assert engine.llm.reset_prefix_cache()
