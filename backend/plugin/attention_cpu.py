"""The attention backend for vLLM's CPU platform: metadata -> kernels/sdpa.

The cache tensor [num_blocks, H, block_size, 2 * D] has vLLM's shape but our content: a token's key and value side by
side, unpacked. Stock CPU attention packs keys in an order that depends on the processor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backend import (
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

from lazyrag.backend.layout import Layout
from lazyrag.backend.plugin.metadata import as_indices, make_rows
from lazyrag.backend.plugin.positions import write_true_positions
from lazyrag.backend.plugin.rows import Rows
from lazyrag.backend.plugin.worker import DryRuns
from lazyrag.kernels import sdpa
from lazyrag.kernels.rope import Rope


@dataclass(frozen=True, slots=True, eq=False)
class LazyCPUMetadata(AttentionMetadata):
    """What all layers need of one step. Filled by `LazyCPUMetadataBuilder.build`, valid for that step."""

    plan: sdpa.Plan


class LazyCPUMetadataBuilder(AttentionMetadataBuilder[LazyCPUMetadata]):
    """Plans a step, and gives the model its true positions on the way (positions.py)."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        layer = vllm_config.compilation_config.static_forward_context[layer_names[0]]
        self._impl: LazyCPUImpl = layer.impl

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> LazyCPUMetadata:
        """Plan a step. May be called more than once in it."""
        common, spec = common_attn_metadata, self.kv_cache_spec
        rows, rope = self._impl.bound
        layouts = rows.of_batch(common.num_reqs)
        query_start, seq_lens = common.query_start_loc_cpu.tolist(), common.seq_lens.tolist()
        if any(layouts):
            write_true_positions(common.positions, query_start, seq_lens, layouts)
        plan = sdpa.make_plan(
            make_rows(query_start, seq_lens, as_indices(common.block_table_tensor), layouts, spec.block_size),
            as_indices(common.slot_mapping[: query_start[-1]]),
            num_kv_heads=spec.num_kv_heads,
            block_size=spec.block_size,
            rope=rope,
            dtype=self.vllm_config.model_config.dtype,
        )
        return LazyCPUMetadata(plan)


class LazyCPUImpl(DryRuns, AttentionImpl[LazyCPUMetadata]):
    """One layer's attention."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype = kv_cache_dtype
        unsupported = {
            "ALiBi": alibi_slopes is not None,
            "a sliding window": sliding_window is not None,
            "a cap on attention scores": bool(logits_soft_cap),
            "attention sinks": sinks is not None,
            "KV shared between layers": kv_sharing_target_layer_name is not None,
            f"attention of kind {attn_type!r}": attn_type != AttentionType.DECODER,
            f"KV cache of type {kv_cache_dtype!r} (set kv_cache_dtype='auto')": kv_cache_dtype.startswith("fp8"),
        }
        self.reasons = tuple(what for what, present in unsupported.items() if present)
        self._bound: tuple[Rows[Layout], Rope] | None = None

    def bind(self, rows: Rows[Layout], rope: Rope) -> None:
        """Join the layer to its worker; called once, when the model is loaded."""
        self._bound = rows, rope

    @property
    def bound(self) -> tuple[Rows[Layout], Rope]:
        """The worker's rows and the model's rotation."""
        assert self._bound is not None, "the layer was built outside LazyCPUWorker.load_model"
        return self._bound

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: LazyCPUMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Store the step's keys and values, then attend.

        Args:
            layer: not used.
            query: [T, Hq, D], rotated.
            key: [T, H, D], rotated.
            value: [T, H, D].
            kv_cache: [num_blocks, H, block_size, 2 * D].
            attn_metadata: of this step; None while vLLM warms up.
            output: [T, Hq, D], written.
            output_scale: not used, as this backend announces no fused quantisation.
            output_block_scale: likewise.
        """
        if attn_metadata is None:
            self.show(query, key, value)
            return output.zero_()
        plan = attn_metadata.plan
        sdpa.store(key, value, kv_cache, plan)
        sdpa.attend(query, key, value, kv_cache, output, plan=plan, rope=self.bound[1], scale=self.scale)
        return output


class LazyCPUBackend(CPUAttentionBackend):
    """What vLLM is told of this backend; cache shape and memory order are the stock backend's."""

    forward_includes_kv_cache_update = True
    supported_kv_cache_dtypes = ("auto", "float16", "bfloat16")

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        """Any block size that vLLM offers."""
        return [MultipleOf(16)]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Every head size."""
        return []

    @staticmethod
    def get_impl_cls() -> type[LazyCPUImpl]:
        """One layer's attention."""
        return LazyCPUImpl

    @staticmethod
    def get_builder_cls() -> type[LazyCPUMetadataBuilder]:
        """The planner of a step."""
        return LazyCPUMetadataBuilder
