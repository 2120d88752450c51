"""Tiers on a GPU: pinned host memory, copies on streams of their own, under graphs; against the fp32 oracle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engines import PLUGIN, Config, Engine, Text
from oracle import Oracle, Prompt, Use

from lazyrag.backend.control import FORGET, PREFETCH, control_to_args
from lazyrag.backend.tiers.policy import Speeds

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.engine,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),  # vLLM's own
]
LENGTHS = (370, 64, 5, 900, 1100)
MAX_RMS = 0.01


class TieredEngine(Engine):
    """In this process, with graphs, host memory and a folder. vLLM keeps one KV connector a process."""

    def __init__(self, model: Path, oracle: Oracle, root: Path) -> None:
        self.root = root
        worker = f"{PLUGIN}.worker_cuda.LazyCUDAWorker"
        config = Config("tiers", is_async=True, budget=4096, num_blocks=1500, worker=worker)
        super().__init__(config, model, oracle)

    def device_arguments(self) -> dict[str, Any]:
        from lazyrag.backend.local import connector_arguments

        transfer = connector_arguments(self.root, host_bytes=256 << 20)
        transfer["kv_connector_extra_config"]["fingerprint"] = "ab" * 32
        return {
            "dtype": "float16",
            "max_model_len": 4096,
            "gpu_memory_utilization": 0.1,
            "attention_backend": "FLASH_ATTN",
            "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64, 128]},
            "kv_transfer_config": transfer,
        }

    @property
    def connector(self) -> Any:
        return self.scheduler.connector

    def assert_agrees(self, prompt: Prompt, result: Any) -> None:
        assert result.error is None
        expected = self.oracle.logprobs(prompt, result.token_ids)
        errors = [
            logprob - expected[step, token].item()
            for step, logprobs in enumerate(result.logprobs)
            for token, logprob in logprobs.items()
        ]
        assert (sum(error**2 for error in errors) / len(errors)) ** 0.5 <= MAX_RMS

    def sources(self, prompt: Prompt) -> list[str]:
        (result,) = self.check(prompt)
        return list(result.report["sources"])

    def empty_pool(self) -> None:
        """Nothing is resident, and what was is NaN."""
        assert self.llm.reset_prefix_cache(), "blocks leaked"
        for cache in self.worker.model_runner.kv_caches:
            cache.fill_(torch.nan)

    def operate(self, operation: str, prompt: Prompt, chunks: list[list[int]] = []) -> None:  # noqa: B006
        """Have an operation done, and all that it began."""
        params = self.params(prompt, max_tokens=1)
        params.extra_args = {**(params.extra_args or {}), **control_to_args(operation, chunks)}
        self.llm.generate([{"prompt_token_ids": prompt.token_ids}], [params], use_tqdm=False)
        while self.scheduler.has_requests():
            self.core.step_fn()


@pytest.fixture(scope="module")
def engine(model: Path, oracle: Oracle, tmp_path_factory: pytest.TempPathFactory):
    engine = TieredEngine(model, oracle, tmp_path_factory.mktemp("kv"))
    yield engine
    engine.connector.reset_cache()
    assert engine.connector.report()["host"]["bytes"] == 0, "host memory leaked"
    engine.close()


@pytest.fixture(autouse=True)
def loads(engine: TieredEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is on disk is loaded, however slow that is here; one test has speeds of its own."""
    monkeypatch.setattr(engine.connector.speeds, "is_loading_faster", lambda *args, **kwargs: True)


@pytest.fixture
def parts(request: pytest.FixtureRequest) -> Any:
    """New chunks for each test: a factory of prompts, by the numbers of the chunks."""
    text = Text(len(request.node.name) * 31)
    chunks = [Use(text(n)) for n in LENGTHS]

    def prompt(*numbers: int) -> Prompt:
        return Prompt([part for n in numbers for part in (text(3), chunks[n])] + [text(21)])

    prompt.chunks = [list(chunk.chunk) for chunk in chunks]  # type: ignore[attr-defined]
    return prompt


def test_host_memory_gives_the_oracles_answers(engine: TieredEngine, parts: Any) -> None:
    assert engine.sources(parts(0, 1, 2, 3, 4)) == ["computed"] * 5
    for numbers in ((4, 3, 2, 1, 0), (2, 0)):
        engine.empty_pool()
        assert engine.sources(parts(*numbers)) == ["host"] * len(numbers)
    assert engine.sources(parts(0, 3)) == ["hbm", "host"], "a prompt of several tiers"


def test_the_disk_gives_them_and_fills_host_memory(engine: TieredEngine, parts: Any) -> None:
    engine.sources(parts(0, 1, 2, 3))
    engine.connector.reset_cache()
    engine.empty_pool()
    assert engine.sources(parts(3, 2, 1, 0)) == ["disk"] * 4
    engine.empty_pool()
    assert engine.sources(parts(1, 0, 3)) == ["host"] * 3


def test_loads_beside_requests_that_run_disturb_neither(engine: TieredEngine, parts: Any) -> None:
    engine.sources(parts(0, 1, 2, 3, 4))
    engine.empty_pool()
    text = Text(8)
    ordinary = [Prompt([text(n)]) for n in (400, 30, 3)]
    engine.check(ordinary[0], parts(4, 0), ordinary[1], parts(3, 1, 0), ordinary[2], parts(2, 4), max_tokens=40)


def test_saves_beside_requests_that_run_keep_what_was_computed(engine: TieredEngine, parts: Any) -> None:
    """Blocks are not given to others before they are copied out, on a pool that is nearly full."""
    text = Text(9)
    cold = [Use(text(n)) for n in range(500, 1100, 50)]
    prompts = [Prompt([chunk, text(9)]) for chunk in cold]
    engine.check(*prompts, *(Prompt([text(n)]) for n in range(300, 1500, 100)), max_tokens=20)
    engine.empty_pool()
    for chunk in cold:
        assert set(engine.sources(Prompt([chunk, text(30)]))) <= {"host", "disk"}


def test_prefetched_chunks_are_in_the_pool(engine: TieredEngine, parts: Any) -> None:
    engine.sources(parts(0, 1, 3, 4))
    engine.empty_pool()
    engine.operate(PREFETCH, parts(4, 1, 0))
    assert engine.sources(parts(0, 4, 1)) == ["hbm"] * 3


def test_a_forgotten_chunk_is_in_no_tier(engine: TieredEngine, parts: Any) -> None:
    engine.sources(parts(0, 1, 2))
    engine.operate(FORGET, Prompt([[7]]), parts.chunks[:2])
    assert engine.sources(parts(0, 1, 2)) == ["computed", "computed", "hbm"]


@pytest.mark.parametrize(("rate", "source"), [(1e15, "disk"), (1.0, "computed")], ids=["fast", "slow"])
def test_the_rule_takes_the_faster_way(
    engine: TieredEngine, parts: Any, rate: float, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.sources(parts(0, 3))
    engine.connector.reset_cache()
    engine.empty_pool()
    monkeypatch.setattr(engine.connector, "speeds", Speeds({"host": 1e12, "disk": rate, "compute": 1e4}))
    assert engine.sources(parts(3, 0)) == [source] * 2
