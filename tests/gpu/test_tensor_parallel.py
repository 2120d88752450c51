"""Two ranks on two GPUs: each has its heads of every chunk, in its pool, in host memory and in files of its own.

About two minutes: two engines, with graphs. The answers are those of the fp32 oracle, as they are on one GPU
(test_engine.py). Where the ranks' GPUs share a switch with others, keep NVLink multicast off.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import Text
from gpu_engines import Corpus, GPUConfig, GPUEngine, make_model
from oracle import Oracle, Prompt, Use

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.engine,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
    pytest.mark.filterwarnings("ignore"),  # vLLM's own
]
RANKS = 2


class ParallelEngine(GPUEngine):
    """The scheduler in this process, a worker process for each rank."""

    def __init__(self, model: Path, oracle: Oracle, root: Path) -> None:
        self.root = root
        super().__init__(GPUConfig("ranks", is_async=True, num_blocks=400, sizes=(1, 2, 4, 8, 16, 64)), model, oracle)

    def device_arguments(self) -> dict[str, Any]:
        from lazyrag.backend.local import connector_arguments

        transfer = connector_arguments(self.root, host_bytes=256 << 20)
        transfer["kv_connector_extra_config"]["fingerprint"] = "ab" * 32
        return {
            **super().device_arguments(),
            "tensor_parallel_size": RANKS,
            "distributed_executor_backend": "mp",
            "kv_transfer_config": transfer,
        }

    def sources(self, prompt: Prompt) -> list[str]:
        (result,) = self.check(prompt)
        return list(result.report["sources"])


@pytest.fixture(scope="module", params=[2, 1], ids=["a key head for each rank", "one key head for both"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ParallelEngine]:
    torch.backends.cuda.matmul.allow_tf32 = False
    model = make_model(tmp_path_factory.mktemp("models") / "llama", num_key_value_heads=request.param)
    engine = ParallelEngine(model, Oracle(model, "cuda"), tmp_path_factory.mktemp("kv"))
    yield engine
    engine.scheduler.connector.reset_cache()
    engine.close()


def test_cold_hot_and_reordered(engine: ParallelEngine) -> None:
    for prefix_len, sink_len in ((0, 0), (19, 0), (0, 4)):
        corpus = Corpus(prefix_len + sink_len, prefix_len, sink_len)
        engine.check(corpus(11, "A", 5, "B", 5, "H", 21), children=3 + bool(corpus.prefix or corpus.sink))
        engine.check(corpus(11, "H", 5, "A", 200, "B", 21), children=0)


def test_lazy_and_ordinary_rows_in_one_batch(engine: ParallelEngine) -> None:
    corpus = Corpus(3)
    engine.check(
        corpus(11, "B", 5, "D", 7), Prompt([corpus.text(400)]), corpus("E", 5, "A", 1, "D", 21), corpus("J", "H", 7),
        max_tokens=40,
    )  # fmt: skip


def test_more_requests_than_the_pool_holds(engine: ParallelEngine) -> None:
    text = Text(7)
    chunks = [Use(text(n)) for n in range(200, 600, 25)]
    order = torch.Generator().manual_seed(1)
    picked = [torch.randperm(len(chunks), generator=order)[:6].tolist() for _ in range(16)]
    engine.check(*(Prompt([text(9), *(chunks[i] for i in some), text(30)]) for some in picked), max_tokens=20)


def test_every_tier_gives_the_oracles_answers(engine: ParallelEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.scheduler.connector.speeds, "is_loading_faster", lambda *args, **kwargs: True)
    text = Text(11)
    chunks = [Use(text(n)) for n in (370, 64, 5, 900)]

    def prompt(*numbers: int) -> Prompt:
        return Prompt([part for n in numbers for part in (text(3), chunks[n])] + [text(21)])

    files = set(engine.root.rglob("*.safetensors"))
    assert engine.sources(prompt(0, 1, 2, 3)) == ["computed"] * 4
    new = {path.name.partition(".")[2] for path in set(engine.root.rglob("*.safetensors")) - files}
    assert new == {f"{rank}of{RANKS}.safetensors" for rank in range(RANKS)}
    assert engine.llm.reset_prefix_cache()
    assert engine.sources(prompt(3, 1, 0)) == ["host"] * 3
    engine.scheduler.connector.reset_cache()
    assert engine.llm.reset_prefix_cache()
    assert engine.sources(prompt(2, 3, 1)) == ["disk"] * 3
