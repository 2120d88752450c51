"""Which kernel runs, in which form. Every threshold is here, with the measurement it comes from.

A *variant* is a compiled form of a kernel: the sizes of its tiles and how it is launched. `choose` picks one from what
a step looks like; `variants` lists all that `choose` may pick, so that they can be compiled before the first request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType
from typing import Literal

import torch
import triton
from torch import Tensor

from lazyrag.kernels import hopper, portable
from lazyrag.kernels.plan import DevicePlan, Tiling
from lazyrag.kernels.reduce import Workspace

Kernel = Literal["hopper", "portable"]

PAGES = (16, 32, 64)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FP8 = torch.float8_e4m3fn
LARGEST_HEAD = 256


@dataclass(frozen=True, slots=True)
class Shape:
    """What attention looks like in a model; the same for all layers and steps.

    Attributes:
        num_heads, kv_heads: of query and of keys, on this rank.
        head_size: D.
        page: tokens of a page of the cache.
        dtype, kv_dtype: of query and cache.
        rotary_dim: R, dimensions that are rotated; 0: none (ALiBi).
        neox: rotated pairs are (i, i + R/2), otherwise (2i, 2i + 1).
        heads_side_by_side: in the cache, all heads of a token are neighbours (vLLM's NHD).
    """

    num_heads: int
    kv_heads: int
    head_size: int
    page: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    rotary_dim: int
    neox: bool = True
    heads_side_by_side: bool = True

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        return self.num_heads // self.kv_heads


@dataclass(frozen=True, slots=True)
class Gpu:
    """What the choice depends on: compute capability, SMs, shared memory that one block may have."""

    capability: tuple[int, int]
    num_sms: int
    shared_bytes: int

    @classmethod
    def of(cls, device: torch.device) -> Gpu:
        """Read off a CUDA device."""
        facts = triton.runtime.driver.active.utils.get_device_properties(device.index or 0)
        capability = torch.cuda.get_device_capability(device)
        return cls(capability, facts["multiprocessor_count"], facts["max_shared_mem"])


@dataclass(frozen=True, slots=True)
class Variant:
    """A compiled form of a kernel.

    Attributes:
        blocks_per_sm: thread blocks that run on an SM at once.
    """

    name: str
    tiling: Tiling
    blocks_per_sm: int
    launch: hopper.Launch | portable.Launch

    @property
    def kernel(self) -> Kernel:
        """The kernel that this is a form of."""
        return "hopper" if isinstance(self.launch, hopper.Launch) else "portable"

    def slots(self, gpu: Gpu, kv_heads: int) -> int:
        """Thread blocks that run at once for one key head: what `plan.make_plan` fills."""
        return max(1, self.blocks_per_sm * gpu.num_sms // kv_heads)


def refusals(shape: Shape, gpu: Gpu) -> list[str]:
    """Why no kernel can serve a model on a GPU, each with its reason; empty if one can."""
    checks = (
        (gpu.capability >= (8, 0), f"the GPU has compute capability {gpu.capability}; the kernels need 8.0 or later"),
        (shape.page in PAGES, f"pages of {shape.page} tokens; the kernels serve {PAGES}: set block_size"),
        (shape.dtype in DTYPES, f"dtype {shape.dtype}; the kernels serve {DTYPES}"),
        (shape.head_size <= LARGEST_HEAD, f"heads of {shape.head_size}; the kernels serve up to {LARGEST_HEAD}"),
        (shape.head_size % 8 == 0, f"heads of {shape.head_size}; the kernels need a multiple of 8"),
        (
            shape.kv_dtype in (shape.dtype, FP8),
            f"a KV cache of {shape.kv_dtype}; the kernels serve {shape.dtype} and {FP8}: set kv_cache_dtype",
        ),
        (
            shape.kv_dtype != FP8 or gpu.capability >= (8, 9),
            "an fp8 KV cache needs compute capability 8.9 or later: set kv_cache_dtype",
        ),
    )
    reasons = [reason for passed, reason in checks if not passed]
    if not reasons and not variants(shape, gpu):
        reasons = [
            f"{shape.dtype}, heads of {shape.head_size} and pages of {shape.page} tokens need more shared memory than "
            f"the GPU's {gpu.shared_bytes} bytes: set block_size to 16"
        ]
    return reasons


def kernel_for(shape: Shape, gpu: Gpu) -> Kernel:
    """The fastest kernel that serves a model."""
    served = (
        gpu.capability == (9, 0)
        and shape.head_size in hopper.HEAD_SIZES
        and shape.group <= 128
        and shape.dtype in (torch.bfloat16, torch.float16)
        and shape.kv_dtype == shape.dtype
        and shape.rotary_dim > 0
        and shape.heads_side_by_side
    )
    return "hopper" if served else "portable"


@cache
def variants(shape: Shape, gpu: Gpu) -> Mapping[str, Variant]:
    """All variants that `choose` may pick, by name."""
    found = _hopper_variants(shape) if kernel_for(shape, gpu) == "hopper" else _portable_variants(shape, gpu)
    return MappingProxyType({variant.name: variant for variant in found})


def choose(shape: Shape, gpu: Gpu, *, num_rows: int, most_queries: int) -> Variant:
    """The variant for a step.

    Args:
        shape: of the model.
        gpu: it runs on.
        num_rows: requests of the step.
        most_queries: query tokens of the largest of them.
    """
    found = variants(shape, gpu)
    few = most_queries * shape.group <= FEW_ROWS
    if kernel_for(shape, gpu) == "portable":
        return found["few" if few else "many"]
    if not few:
        return found["whole"]
    return found["decode" if most_queries == 1 and num_rows >= MANY_REQUESTS else "few"]


# Measured on an H200 with 32 query heads, 8 key heads of 128, bf16, 16-token pages: benchmarks/kernels-h200.json.

FEW_ROWS = 64
"""Rows of queries (tokens x group) up to which tiles of 64 are taken; above, `whole` has 128.

16 requests with 64 rows each: `few` takes 0.96 of `whole`'s time. 1 to 8 requests with 256 rows: 1.05 to 1.33 of it.
"""

MANY_REQUESTS = 4
"""From so many requests on, decode fills an SM with two small blocks and not with one large one: while one turns its
query, the other computes.

Time of `decode` over that of `few`, contexts of 10 x 2048 tokens: 1.05 for one request, 0.96 to 0.98 for 4 to 32;
where they share their documents, and memory is not the limit, 0.83 for 4, 0.76 for 64.
"""


FEW_SLICES = 4
"""Slices of a row that `whole` merges at once: its query tiles are cut into few, and have many rows."""


def _hopper_variants(shape: Shape) -> list[Variant]:
    group, page = shape.group, shape.page
    # Turns from shared memory know whole heads of NeoX pairs only.
    raw = shape.neox and shape.rotary_dim == shape.head_size
    launch = hopper.Launch(3, raw, chunk=FEW_SLICES)
    whole = Variant("whole", Tiling(group, 128, 128, page), 1, launch)
    if group > FEW_ROWS:
        return [whole]
    return [
        # Two blocks share an SM's memory: a third stage leaves no room for its line of cosines and sines.
        Variant("decode", Tiling(group, 64, 64, page), 2, hopper.Launch(2 if raw else 3, raw, max_registers=128)),
        Variant("few", Tiling(group, 64, 128, page), 1, hopper.Launch(3, raw, max_registers=255)),
        whole,
    ]


def _portable_variants(shape: Shape, gpu: Gpu) -> list[Variant]:
    smallest = max(16, triton.next_power_of_2(shape.group))
    few = _portable_variant("few", shape, gpu, smallest)
    many = _portable_variant("many", shape, gpu, max(smallest, 128 if shape.head_size <= 128 else 64))
    return [few, replace(few, name="many") if many is None else many] if few else []


def _portable_variant(name: str, shape: Shape, gpu: Gpu, block_m: int) -> Variant | None:
    """The largest tiles, loaded far enough ahead, that fit the shared memory of a block; None if none do."""
    width = triton.next_power_of_2(shape.head_size)
    query_bytes = block_m * width * shape.dtype.itemsize
    token_bytes = 2 * width * shape.kv_dtype.itemsize
    for tile, stages in ((64, 3), (64, 2), (32, 3), (32, 2), (64, 1), (32, 1), (16, 1)):
        needed = query_bytes + stages * tile * token_bytes
        if tile % shape.page == 0 and needed <= gpu.shared_bytes:
            launch = portable.Launch(num_warps=8 if block_m >= 128 else 4, num_stages=stages)
            blocks_per_sm = 2 if block_m < 64 and 2 * needed <= gpu.shared_bytes else 1
            return Variant(name, Tiling(shape.group, block_m, tile, shape.page), blocks_per_sm, launch)
    return None


def attend(
    variant: Variant,
    query: Tensor,
    kv_cache: Tensor,
    output: Tensor,
    plan: DevicePlan,
    workspace: Workspace,
    *,
    scale: float,
    turns: Tensor,
    neox: bool = True,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Tensor:
    """Run a variant over a step that was planned for it; arguments as of `portable.attend`."""
    if isinstance(variant.launch, portable.Launch):
        return portable.attend(
            query,
            kv_cache,
            output,
            plan,
            workspace,
            scale=scale,
            turns=turns,
            neox=neox,
            k_scale=k_scale,
            v_scale=v_scale,
            launch=variant.launch,
        )
    assert k_scale == v_scale == 1.0, "the Hopper kernel is not chosen for quantised caches"
    return hopper.attend(
        query, kv_cache, output, plan, workspace, scale=scale, turns=turns, neox=neox, launch=variant.launch
    )
