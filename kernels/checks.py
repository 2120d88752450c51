"""What the wrappers of the kernels ask of their tensors, said in sentences."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def check_shape(name: str, x: Tensor, shape: Sequence[int | None]) -> None:
    """`None` stands for any size.

    Raises:
        ValueError: another shape.
    """
    if x.dim() != len(shape) or any(
        want is not None and have != want for have, want in zip(x.shape, shape, strict=True)
    ):
        wanted = ", ".join("any" if n is None else str(n) for n in shape)
        raise ValueError(f"{name} must have shape [{wanted}], has {list(x.shape)}")


def check_attention(query: Tensor, kv_cache: Tensor, output: Tensor) -> None:
    """Queries, paged cache and output of one attention layer fit together.

    Args:
        query: [T, Hq, D].
        kv_cache: [num_blocks, H, block_size, 2 * D], contiguous; H divides Hq.
        output: as `query`.

    Raises:
        ValueError: they do not.
    """
    check_shape("query", query, (None, None, None))
    num_tokens, num_heads, head_size = query.shape
    check_shape("output", output, (num_tokens, num_heads, head_size))
    check_shape("kv_cache", kv_cache, (None, None, None, 2 * head_size))
    if num_heads % kv_cache.shape[1]:
        raise ValueError(f"{num_heads} query heads cannot share {kv_cache.shape[1]} key heads evenly")
    if not kv_cache.is_contiguous():
        raise ValueError(f"kv_cache must be contiguous, has strides {kv_cache.stride()}")
    for name, x in (("kv_cache", kv_cache), ("output", output)):
        if x.device != query.device:
            raise ValueError(f"{name} is on {x.device}, query on {query.device}")
        if x.dtype != query.dtype:
            raise ValueError(f"{name} is {x.dtype}, query is {query.dtype}")
    if query.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"query must be float32, bfloat16 or float16, is {query.dtype}")


def check_paged_attention(
    query: Tensor, kv_cache: Tensor, output: Tensor, *, page: int, group: int, turns: Tensor | None
) -> None:
    """The tensors of a GPU kernel fit together and fit the plan.

    Args:
        query: [Q, Hq, D], heads contiguous, in the dtype of `output` or in float8_e4m3fn.
        kv_cache: [num_blocks, H, page, 2 * D], in the dtype of `output` or in float8_e4m3fn.
        output: as `query`, of 32 or 16 bits.
        page: tokens of a page in the plan.
        group: query heads that share a key head in the plan.
        turns: float32 [lines, R], R even and at most D.

    Raises:
        ValueError: they do not.
    """
    check_shape("query", query, (None, None, None))
    num_tokens, num_heads, head_size = query.shape
    check_shape("output", output, (num_tokens, num_heads, head_size))
    if num_heads % group:
        raise ValueError(f"{num_heads} query heads are no whole number of groups of {group}")
    check_shape("kv_cache", kv_cache, (None, num_heads // group, page, 2 * head_size))
    if kv_cache.stride(3) != 1:
        raise ValueError(f"a token's key must be contiguous in kv_cache, has strides {kv_cache.stride()}")
    if output.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"output must be float32, bfloat16 or float16, is {output.dtype}")
    for name, x in (("query", query), ("kv_cache", kv_cache)):
        if x.dtype not in (output.dtype, torch.float8_e4m3fn):
            raise ValueError(f"{name} must be {output.dtype} as output or float8_e4m3fn, is {x.dtype}")
    for name, x in (("query", query), ("output", output)):
        if x.stride()[1:] != (head_size, 1):
            raise ValueError(f"the heads of a token must be contiguous in {name}, has strides {x.stride()}")
    for name, other in (("kv_cache", kv_cache), ("output", output), ("turns", turns)):
        if other is not None and other.device != query.device:
            raise ValueError(f"{name} is on {other.device}, query on {query.device}")
    if turns is not None:
        check_shape("turns", turns, (None, None))
        if turns.dtype != torch.float32 or not turns.is_contiguous():
            raise ValueError(f"turns must be contiguous float32, is {turns.dtype} with strides {turns.stride()}")
        if turns.shape[1] % 2 or turns.shape[1] > head_size:
            raise ValueError(f"turns has lines of {turns.shape[1]}, must be even and at most {head_size}")
