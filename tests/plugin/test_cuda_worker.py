"""What the worker for CUDA devices decides without a device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lazyrag.backend.plugin import worker_cuda


class Layer(nn.Module):
    """An attention layer as vLLM 0.26 builds it."""

    def __init__(self, kv_cache_dtype: str = "auto", heads: int = 8, scales: int = 1) -> None:
        super().__init__()
        self.impl = SimpleNamespace(kv_cache_dtype=kv_cache_dtype, num_heads=heads, num_kv_heads=2, head_size=128)
        self._q_scale, self._k_scale, self._v_scale = torch.ones(1), torch.ones(scales), torch.ones(scales)
        self.query_quant = nn.Identity()


@pytest.fixture
def worker() -> Any:
    worker = object.__new__(worker_cuda.LazyCUDAWorker)
    worker.vllm_config = SimpleNamespace(
        parallel_config=SimpleNamespace(data_parallel_size=1),
        cache_config=SimpleNamespace(cache_dtype="auto", calculate_kv_scales=False, block_size=16),
    )
    worker.model_config = SimpleNamespace(dtype=torch.bfloat16)
    worker._refusals = lambda shape: []
    return worker


def refusals(worker: Any, *layers: Layer) -> list[str]:
    worker.layers = lambda: dict(enumerate(layers))
    rope = SimpleNamespace(rotary_dim=128, neox=True)
    return [reason for reason in worker.model_refusals(rope) if reason is not None]


@pytest.mark.parametrize("name", ["auto", "bfloat16", "fp8", "fp8_e4m3"])
def test_kv_caches_that_a_kernel_reads_are_accepted(worker: Any, name: str) -> None:
    worker.vllm_config.cache_config.cache_dtype = name
    assert not any(worker.settings_refusals())
    assert refusals(worker, Layer(name), Layer(name)) == []


@pytest.mark.parametrize("name", ["fp8_e5m2", "nvfp4", "int8_per_token_head"])
def test_other_kv_caches_are_refused_by_settings_and_by_layer(worker: Any, name: str) -> None:
    worker.vllm_config.cache_config.cache_dtype = name
    (reason,) = filter(None, worker.settings_refusals())
    assert name in reason
    assert "kv_cache_dtype" in reason
    worker.vllm_config.cache_config.cache_dtype = "auto"  # the checkpoint says so
    assert refusals(worker, Layer(name)) == [reason]


def test_scales_that_no_kernel_takes_are_refused(worker: Any) -> None:
    worker.vllm_config.cache_config.calculate_kv_scales = True
    (reason,) = filter(None, worker.settings_refusals())
    assert "calculate_kv_scales" in reason
    (reason,) = refusals(worker, Layer("fp8", scales=2))
    assert "for each head" in reason


def test_an_fp8_cache_wants_bfloat16(worker: Any) -> None:
    worker.model_config.dtype = torch.float16
    (reason,) = refusals(worker, Layer("fp8"))
    assert "dtype='bfloat16'" in reason


def test_layers_that_differ_are_refused(worker: Any) -> None:
    for other in (Layer(heads=4), Layer("fp8")):
        (reason,) = refusals(worker, Layer(), other)
        assert "differ" in reason


def test_the_model_is_tried_out_with_queries_as_it_makes_them(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [Layer("fp8"), Layer("fp8")]
    before = [layer.query_quant for layer in layers]
    worker.layers = lambda: dict(enumerate(layers))
    seen: list[Any] = []

    def dry_run(self: Any, positions: Any) -> dict[str, Any]:
        seen.extend(layer.query_quant for layer in layers)
        raise RuntimeError("the model failed")

    monkeypatch.setattr(worker_cuda.LazyWorkerMixin, "_dry_run", dry_run)
    with pytest.raises(RuntimeError, match="the model failed"):
        worker._dry_run(torch.arange(3))
    assert seen == [None, None]
    assert [layer.query_quant for layer in layers] == before


def test_no_stock_graph_runs_a_lazy_step_on_the_v1_runner(worker: Any) -> None:
    asked: list[Any] = []
    dispatcher = SimpleNamespace(dispatch=lambda *args, invalid_modes=None, **kwargs: asked.append(invalid_modes))
    worker._join_v1(SimpleNamespace(cudagraph_dispatcher=dispatcher))
    full = worker_cuda.CUDAGraphMode.FULL
    for scheduled, given, expected in (([], None, None), ([object()], None, {full}), ([], {full}, {full})):
        worker._rows = SimpleNamespace(scheduled=scheduled)
        dispatcher.dispatch(8, uniform_decode=True, invalid_modes=given)
        assert asked.pop() == expected
