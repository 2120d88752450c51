"""The attention backend for CUDA: vLLM's FlashAttention, and our kernels for steps that hold a lazy request.

A step without lazy rows is stock vLLM in every launch: the stock metadata, the stock kernels, the stock graphs. A step
with one runs our kernels for all of its rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionType, CommonAttentionMetadata
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
)

from lazyrag.backend.plugin.plans import Bucket, Planner, Reused, Step
from lazyrag.backend.plugin.rows import Rows
from lazyrag.backend.plugin.worker import DryRuns
from lazyrag.kernels.dispatch import FP8


class Steps:
    """Joins a worker and its attention layers: which rows are lazy, and which graph will run.

    Attributes:
        bucket: of our graph that the step which is being prepared will run, or that is being captured.
    """

    def __init__(self, rows: Rows[Reused], planner: Planner) -> None:
        self._rows, self._planner = rows, planner
        self.bucket: Bucket | None = None

    @contextmanager
    def in_graph(self, bucket: Bucket | None) -> Iterator[None]:
        """Metadata that is built inside is for a graph of ours (None: for no graph, or a stock one)."""
        self.bucket = bucket
        try:
            yield
        finally:
            self.bucket = None

    def plan(self, common: CommonAttentionMetadata) -> Step | None:
        """The plan of the step; None if stock vLLM runs it."""
        reused = self._rows.of_batch(common.num_reqs)
        if self.bucket is None and not any(reused):
            return None
        assert common.seq_lens_cpu_upper_bound is not None
        return self._planner.make(
            common.query_start_loc_cpu.tolist(),
            common.seq_lens_cpu_upper_bound.tolist(),  # exact, as there are no speculated tokens
            reused,
            common.block_table_tensor,
            common.positions,
            self.bucket,
        )


@dataclass(frozen=True, slots=True)
class Scales:
    """What a layer's quantised queries, keys and values are multiplied with."""

    query: float = 1.0
    key: float = 1.0
    value: float = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class LazyMetadata:
    """The metadata of a step with lazy rows."""

    step: Step


class LazyMetadataBuilder(FlashAttentionMetadataBuilder):
    """Plans a step, and gives the model its true positions on the way (positions.py)."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        layer = vllm_config.compilation_config.static_forward_context[layer_names[0]]
        self._steps: Steps = layer.impl.steps

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> LazyMetadata | FlashAttentionMetadata:
        """Plan a step; stock metadata where no row is lazy."""
        step = self._steps.plan(common_attn_metadata)
        if step is None:
            return super().build(common_prefix_len, common_attn_metadata, fast_build)
        return LazyMetadata(step)


class LazyImpl(DryRuns, FlashAttentionImpl):
    """One layer's attention.

    Attributes:
        steps: of the worker; set when the model is loaded.
        scales: of an fp8 cache; likewise. vLLM quantises the queries, too: its own kernel takes no others.
    """

    steps: Steps
    scales: Scales = Scales()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        unsupported = {
            "ALiBi": self.alibi_slopes is not None,
            "a sliding window": self.sliding_window != (-1, -1),
            "a cap on attention scores": bool(self.logits_soft_cap),
            "attention sinks": self.sinks is not None,
            "KV shared between layers": self.kv_sharing_target_layer_name is not None,
            f"attention of kind {self.attn_type!r}": self.attn_type != AttentionType.DECODER,
        }
        self.reasons = tuple(what for what, present in unsupported.items() if present)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attend; vLLM has stored the step's keys and values already. Arguments as of the stock method."""
        if isinstance(attn_metadata, LazyMetadata):
            self.attend(attn_metadata.step, query, kv_cache, output)
            return output
        if attn_metadata is None:
            self.show(query, key, value)
        result: Tensor = super().forward(
            layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale
        )
        return result

    def attend(self, step: Step, query: Tensor, kv_cache: Tensor, output: Tensor) -> None:
        """Attend in a step with lazy rows; arguments as of `forward`."""
        # vLLM keeps fp8 numbers as bytes.
        cache = kv_cache.view(FP8) if kv_cache.dtype == torch.uint8 else kv_cache
        scale = self.scale * self.scales.query if query.dtype == FP8 else self.scale
        step.attend(query, cache, output, scale, k_scale=self.scales.key, v_scale=self.scales.value)


class LazyCUDABackend(FlashAttentionBackend):
    """What vLLM is told of this backend: the stock one's answers."""

    @staticmethod
    def get_impl_cls() -> type[LazyImpl]:
        """One layer's attention."""
        return LazyImpl

    @staticmethod
    def get_builder_cls() -> type[LazyMetadataBuilder]:
        """The planner of a step."""
        return LazyMetadataBuilder
