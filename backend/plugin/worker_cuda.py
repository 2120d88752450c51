"""The worker for CUDA devices, on either of vLLM's model runners; graphs of our own are on V2 only."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.worker.gpu_worker import Worker

from lazyrag.backend.plugin.attention_cuda import LazyCUDABackend, LazyImpl, Scales, Steps
from lazyrag.backend.plugin.backends import chosen
from lazyrag.backend.plugin.graphs import LazyGraphs
from lazyrag.backend.plugin.plans import Bucket, Planner, Reused
from lazyrag.backend.plugin.rotary import Seen
from lazyrag.backend.plugin.rows import Rows
from lazyrag.backend.plugin.worker import LazyWorkerMixin
from lazyrag.kernels import dispatch
from lazyrag.kernels.rope import Rope

log = logging.getLogger(__name__)


class LazyCUDAWorker(LazyWorkerMixin, Worker):
    """vLLM's GPU worker with attention over segments. Set by `worker_cls`."""

    impl_class = LazyImpl
    _rows: Rows[Reused]
    _planner: Planner
    _steps: Steps
    """Set by `bind`."""
    _request_ids: Sequence[str] = ()
    """Row by row, of the batch that is being prepared (V2)."""
    _graphs: LazyGraphs | None = None
    """None until they are captured, and if there are none."""
    _capturing = False

    def attention_chosen(self) -> AbstractContextManager[None]:
        """Ours is FlashAttention by name, shape of the cache, settings and checks."""
        return chosen(AttentionBackendEnum.FLASH_ATTN, LazyCUDABackend)

    def settings_refusals(self) -> list[str | None]:
        """What the model runners have, and this worker cannot do."""
        return [
            _data_parallel(self.vllm_config.parallel_config.data_parallel_size),
            _kv_dtype(self.vllm_config.cache_config.cache_dtype),
            _scales_on_the_fly(self.vllm_config.cache_config.calculate_kv_scales),
        ]

    def model_refusals(self, rope: Rope) -> list[str | None]:
        """What no kernel can serve."""
        layers = self.layers().values()
        # A checkpoint may have its layers' caches quantised, whatever the settings say.
        reasons = [_kv_dtype(kind) for kind in sorted({layer.impl.kv_cache_dtype for layer in layers})]
        if any(reasons):
            return reasons
        if any(layer.impl.kv_cache_dtype in _FP8 for layer in layers) and self.model_config.dtype != torch.bfloat16:
            return ["From an fp8 KV cache vLLM's FlashAttention computes bfloat16 only. Set dtype='bfloat16'."]
        shapes = {self._shape(layer, rope) for layer in layers}
        if len(shapes) > 1:
            return ["The model's layers differ in heads or KV types. Use a model in which all layers are alike."]
        reasons = [f"No kernel serves this model here: {reason}." for reason in self._refusals(shapes.pop())]
        return [*reasons, _scales_by_head(layers)]

    def bind(self, rope: Rope) -> None:
        """Join attention layers, model runner and this worker."""
        layers = list(self.layers().values())
        self._planner = Planner(
            rope,
            self._shape(layers[0], rope),
            self.device,
            dispatch.Gpu.of(self.device),
            max_num_rows=self.scheduler_config.max_num_seqs,
            max_num_tokens=self.scheduler_config.max_num_batched_tokens,
            max_model_len=self.model_config.max_model_len,
        )
        block_size = self.vllm_config.cache_config.block_size
        self._rows = Rows(self._rows_of_batch, block_size, self._planner.describe)
        self._steps = Steps(self._rows, self._planner)
        for layer in layers:
            layer.impl.steps = self._steps
            if layer.impl.kv_cache_dtype in _FP8:
                scales = (layer._q_scale, layer._k_scale, layer._v_scale)
                layer.impl.scales = Scales(*(scale.item() for scale in scales))
        if self.use_v2_model_runner:
            self._join_v2(self.model_runner)
        else:
            self._join_v1(self.model_runner)

    def _join_v2(self, runner: Any) -> None:
        self._stock_prepare = runner.model_state.prepare_attn
        self._stock_capture = runner.capture_model
        tokens = runner.req_states.all_token_ids
        self._stock_stage = tokens.stage_write
        tokens.stage_write = self._stage_tokens
        runner.model_state.prepare_attn = self._prepare_attn
        runner.capture_model = self._capture_model

    def _join_v1(self, runner: Any) -> None:
        log.warning("On vLLM's V1 model runner, steps with reused chunks have no FULL CUDA graphs; V2 is faster.")
        self._stock_dispatch = runner.cudagraph_dispatcher.dispatch
        runner.cudagraph_dispatcher.dispatch = self._dispatch

    def _rows_of_batch(self) -> Sequence[str]:
        return self._request_ids if self.use_v2_model_runner else self.model_runner.input_batch.req_ids

    def execute_model(self, scheduler_output: Any) -> Any:
        """Run a step, in one of our graphs if it has lazy rows and a graph serves it."""
        runner = self.model_runner
        with self._rows.step(scheduler_output):
            if not self.use_v2_model_runner:
                return super().execute_model(scheduler_output)
            self._leave_out_segments(scheduler_output.scheduled_new_reqs)
            reused = self._rows.scheduled
            if not reused or self._graphs is None:
                return super().execute_model(scheduler_output)
            stock, runner.cudagraph_manager = runner.cudagraph_manager, self._graphs
            num_rows, num_tokens = len(scheduler_output.num_scheduled_tokens), _num_tokens(scheduler_output)
            self._graphs.is_open = self._planner.fits_graphs(num_rows, num_tokens, reused)
            try:
                return super().execute_model(scheduler_output)
            finally:
                runner.cudagraph_manager = stock

    @torch.inference_mode()
    def compile_or_warm_up_model(self) -> Any:
        """Compile what a first request would wait for, capture graphs, and warm up."""
        layer = next(iter(self.layers().values()))
        shape = (1, layer.impl.num_heads, layer.impl.head_size)
        output = torch.zeros(shape, dtype=self.model_config.dtype, device=self.device)
        query = output if layer.query_quant is None else output.to(dispatch.FP8)
        self._planner.compile(lambda step: layer.impl.attend(step, query, layer.kv_cache, output))
        return super().compile_or_warm_up_model()

    def _dry_run(self, positions: Tensor) -> Mapping[str, Seen]:
        """With queries as the model makes them: rounded to fp8 they would be too far from each other."""
        layers = self.layers().values()
        rounding = [layer.query_quant for layer in layers]
        for layer in layers:
            layer.query_quant = None
        try:
            return super()._dry_run(positions)
        finally:
            for layer, stock in zip(layers, rounding, strict=True):
                layer.query_quant = stock

    def _prepare_attn(self, batch: Any, mode: Any, *args: Any, for_capture: bool = False, **kwargs: Any) -> Any:
        """In place of the model state's: makes known which rows the batch has, and which graph will run."""
        self._request_ids = batch.req_ids
        bucket = Bucket(batch.num_tokens_after_padding, batch.num_reqs_after_padding)
        ours = self._graphs is not None and self.model_runner.cudagraph_manager is self._graphs
        if self._capturing:
            self._planner.add_graph(bucket)
        in_graph = self._capturing if for_capture else ours and mode == CUDAGraphMode.FULL
        with self._steps.in_graph(bucket if in_graph else None):
            return self._stock_prepare(batch, mode, *args, for_capture=for_capture, **kwargs)

    def _dispatch(self, *args: Any, invalid_modes: Any = None, **kwargs: Any) -> Any:
        """In place of the V1 runner's dispatcher: its FULL graphs hold stock attention, which lazy rows cannot have."""
        if self._rows.scheduled:
            invalid_modes = {*(invalid_modes or ()), CUDAGraphMode.FULL}
        return self._stock_dispatch(*args, invalid_modes=invalid_modes, **kwargs)

    def _leave_out_segments(self, new_requests: Iterable[Any]) -> None:
        """Spare the runner the token ids of segments, which it would copy to the device and never read.

        Only a repetition penalty looks at the whole prompt.
        """
        for new in new_requests:
            reused = self._rows.of_request(new.req_id)
            if reused is not None and new.sampling_params.repetition_penalty == 1.0:
                new.prefill_token_ids = _Suffix(new.prefill_token_ids, reused.suffix_start)

    def _stage_tokens(self, index: int, start: int, tokens: Any) -> None:
        """In place of the request state's: the token ids of a new request, or of its suffix only."""
        if isinstance(tokens, _Suffix):
            start, tokens = start + tokens.start, tokens.token_ids[tokens.start :]
        self._stock_stage(index, start, tokens)

    def _capture_model(self) -> int:
        """In place of the runner's: captures its graphs, then ours."""
        runner = self.model_runner
        used = int(self._stock_capture())
        if not runner.cudagraph_manager.needs_capture():
            return used
        graphs = LazyGraphs(runner.cudagraph_manager)
        stock, runner.cudagraph_manager, self._capturing = runner.cudagraph_manager, graphs, True
        try:
            used += int(self._stock_capture())
        finally:
            runner.cudagraph_manager, self._capturing = stock, False
        self._graphs = graphs
        return used

    def _shape(self, layer: Any, rope: Rope) -> dispatch.Shape:
        impl, dtype = layer.impl, self.model_config.dtype
        kv_dtype = _KV_DTYPES[impl.kv_cache_dtype] or dtype
        return dispatch.Shape(
            impl.num_heads,
            impl.num_kv_heads,
            impl.head_size,
            self.vllm_config.cache_config.block_size,
            dtype,
            kv_dtype,
            rope.rotary_dim,
            rope.neox,
        )

    def _refusals(self, shape: dispatch.Shape) -> list[str]:
        return dispatch.refusals(shape, dispatch.Gpu.of(self.device))


@dataclass(frozen=True, slots=True)
class _Suffix:
    """A request's token ids, of which those from `start` on count; as long as all of them."""

    token_ids: Sequence[int]
    start: int

    def __len__(self) -> int:
        return len(self.token_ids)


def _num_tokens(scheduler_output: Any) -> int:
    """Of all rows of a step, physically, with those that it computes."""
    cached = scheduler_output.scheduled_cached_reqs.num_computed_tokens
    new = (request.num_computed_tokens for request in scheduler_output.scheduled_new_reqs)
    return int(sum(cached) + sum(new) + scheduler_output.total_num_scheduled_tokens)


# ---------------------------------------------------------------- checks (see checks.py)


def _data_parallel(size: int) -> str | None:
    if size == 1:
        return None
    return "Data parallelism was never tested with LazyRAG. Set data_parallel_size=1 and start several engines."


_FP8 = ("fp8", "fp8_e4m3")
_KV_DTYPES = {"auto": None, "bfloat16": torch.bfloat16, "float16": torch.float16, **dict.fromkeys(_FP8, dispatch.FP8)}
"""By vLLM's names; None for the model's own."""


def _kv_dtype(name: str) -> str | None:
    if name in _KV_DTYPES:
        return None
    return f"No kernel reads a KV cache of type {name!r}. Set kv_cache_dtype to 'auto' or 'fp8'."


def _scales_on_the_fly(wanted: bool) -> str | None:
    if not wanted:
        return None
    return (
        "calculate_kv_scales takes the scales of the KV cache from the first request, and stored chunks have others. "
        "Leave it unset: those of the checkpoint are used."
    )


def _scales_by_head(layers: Iterable[Any]) -> str | None:
    if all(scale.numel() == 1 for layer in layers for scale in (layer._q_scale, layer._k_scale, layer._v_scale)):
        return None
    return "The checkpoint has KV cache scales for each head; the kernels take one for a layer. Use another checkpoint."
