"""Engines under test: the plugin in this process, on a small model, with every invariant checked after every step."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from oracle import Oracle, Prompt

from lazyrag.backend import wire

PLUGIN = "lazyrag.backend.plugin"
MAX_DEVIATION = 2e-4
"""Of a log-probability from the oracle's, in fp32."""


@dataclass(frozen=True)
class Config:
    """How an engine is started."""

    name: str
    is_async: bool = False
    budget: int = 1024
    num_blocks: int = 200
    block_size: int = 16
    worker: str = f"{PLUGIN}.worker_cpu.LazyCPUWorker"

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Result:
    """An answer: its tokens, the returned log-probabilities of each, and the scheduler's report or error."""

    token_ids: list[int]
    logprobs: list[dict[int, float]]
    num_cached_tokens: int
    report: wire.WireReport | None
    error: Exception | None


class Engine:
    """A running engine with its oracle."""

    def __init__(self, config: Config, model: Path, oracle: Oracle) -> None:
        from vllm import LLM

        self.config, self.oracle = config, oracle
        scheduler = "LazyAsyncScheduler" if config.is_async else "LazyScheduler"
        with async_scheduling_on_cpus() if config.is_async else contextlib.nullcontext():
            self.llm = LLM(
                model=str(model),
                skip_tokenizer_init=True,
                block_size=config.block_size,
                max_num_seqs=8,
                max_num_batched_tokens=config.budget,
                num_gpu_blocks_override=config.num_blocks,
                enable_prefix_caching=True,
                async_scheduling=config.is_async,
                scheduler_cls=f"{PLUGIN}.scheduler.{scheduler}",
                worker_cls=config.worker,
                additional_config={"lazyrag": {"debug": True}},
                seed=0,
                **self.device_arguments(),
            )

    def device_arguments(self) -> dict[str, Any]:
        """What depends on where the engine runs."""
        return {
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": 1024,
            "kv_cache_memory_bytes": 1 << 28,
        }

    @property
    def core(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core

    @property
    def scheduler(self) -> Any:
        return self.core.scheduler

    @property
    def worker(self) -> Any:
        return self.core.model_executor.driver_worker.worker

    def params(self, prompt: Prompt, max_tokens: int = 12) -> Any:
        from vllm import SamplingParams

        return SamplingParams(
            temperature=0,
            max_tokens=max_tokens,
            logprobs=3,
            ignore_eos=True,
            detokenize=False,
            extra_args=wire.spans_to_args(prompt.spans, len(prompt.prefix), prompt.sink),
        )

    def generate(self, *prompts: Prompt, max_tokens: int = 12) -> list[Result]:
        """Run prompts together."""
        inputs = [{"prompt_token_ids": p.token_ids} | ({"cache_salt": p.salt} if p.salt else {}) for p in prompts]
        outputs = self.llm.generate(inputs, [self.params(p, max_tokens) for p in prompts], use_tqdm=False)
        return [
            Result(
                list(o.outputs[0].token_ids),
                [{t: lp.logprob for t, lp in step.items()} for step in o.outputs[0].logprobs or ()],
                o.num_cached_tokens,
                wire.report_from_params(o.kv_transfer_params),
                wire.error_from_params(o.kv_transfer_params),
            )
            for o in outputs
        ]

    def check(self, *prompts: Prompt, children: int | None = None, cached: Sequence[int] | None = None, max_tokens=12):
        """Run prompts together and compare each with the oracle.

        Args:
            prompts: what to run.
            children: how many hidden requests this must take.
            cached: physical prompt tokens found in the cache, for each prompt.
            max_tokens: of each answer.
        """
        before = self.made_children
        results = self.generate(*prompts, max_tokens=max_tokens)
        if children is not None:
            assert self.made_children - before == children
        if cached is not None:
            assert [r.num_cached_tokens for r in results] == list(cached)
        for prompt, result in zip(prompts, results, strict=True):
            self.assert_agrees(prompt, result)
        return results

    def assert_agrees(self, prompt: Prompt, result: Result) -> None:
        assert_agrees(self.oracle, prompt, result)

    @property
    def made_children(self) -> int:
        stats = self.scheduler.lazyrag_stats()
        return stats["children_computed"] + stats["children_loaded"] + stats["children_in_flight"]

    def close(self) -> None:
        from vllm.distributed import cleanup_dist_env_and_memory

        assert self.llm.reset_prefix_cache(), "blocks or pins leaked"
        self.core.shutdown()
        del self.llm
        cleanup_dist_env_and_memory()
        gc.collect()


def assert_agrees(oracle: Oracle, prompt: Prompt, result: Result) -> None:
    """Every greedy token is the oracle's, every returned log-probability near the oracle's."""
    assert result.token_ids
    expected = oracle.logprobs(prompt, result.token_ids)
    assert result.token_ids == expected.argmax(-1).tolist()
    deviation = max(
        abs(logprob - expected[step, token].item())
        for step, logprobs in enumerate(result.logprobs)
        for token, logprob in logprobs.items()
    )
    assert deviation <= MAX_DEVIATION


@contextlib.contextmanager
def async_scheduling_on_cpus() -> Iterator[None]:
    """The CPU platform switches asynchronous scheduling off without a word; this switches it on again behind it."""
    from vllm.platforms.cpu import CpuPlatform  # says nothing to engines of other platforms

    stock = CpuPlatform.check_and_update_config

    def check_and_update_config(cls, vllm_config):
        stock.__func__(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)
    try:
        yield
    finally:
        CpuPlatform.check_and_update_config = stock


class Text:
    """Random tokens that are new at every call, the same in every run."""

    def __init__(self, seed: int, vocabulary: int = 512) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._vocabulary = vocabulary

    def __call__(self, num_tokens: int) -> list[int]:
        return torch.randint(3, self._vocabulary, (num_tokens,), generator=self._generator).tolist()
