"""The oracle: fp32 torch, slow, written to be read. One naive function for each operation of the kernels.

It does the other thing than the kernels do, so that agreement means something: *keys* are rotated to the positions
where they truly stand (as complex numbers) and one softmax runs over all of them, where the kernels rotate *queries*
back, attend to each segment by itself and merge by log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class KeyRun:
    """A segment as a query sees it.

    Attributes:
        k, v: [n, H, D], k rotated at the positions where it was computed. Valid tokens only.
        shift: true position minus the position where it was computed, the same for all tokens.
        visible_from: index of the first suffix token that sees the segment.
    """

    k: Tensor
    v: Tensor
    shift: int
    visible_from: int = 0


def rotate(x: Tensor, positions: Tensor | int, inv_freq: Tensor, *, neox: bool = True) -> Tensor:
    """R(positions) x, in float32.

    Args:
        x: [n, heads, D].
        positions: [n], or one number for all.
        inv_freq: float64 [R/2]; dimensions from R on are not rotated.
        neox: pairs (i, i + R/2); otherwise (2i, 2i + 1).
    """
    rotary_dim = 2 * inv_freq.numel()
    turned, rest = x[..., :rotary_dim].double(), x[..., rotary_dim:].double()
    half = rotary_dim // 2
    pairs = turned.reshape(*turned.shape[:-1], *((2, half) if neox else (half, 2)))
    pairs = pairs.transpose(-1, -2) if neox else pairs
    angle = torch.as_tensor(positions, dtype=torch.float64, device=x.device).reshape(-1, 1, 1) * inv_freq
    spun = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angle), angle))
    turned = (spun.transpose(-1, -2) if neox else spun).flatten(-2)
    return torch.cat([turned, rest], -1).float()


def gather(kv_cache: Tensor, blocks: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    """The first tokens of a list of blocks.

    Args:
        kv_cache: [num_blocks, H, block_size, 2 * D], a token's key and value side by side.
        blocks: indices into it.
        num_tokens: how many; what lies behind them in the last block is not read.

    Returns:
        k, v: float32 [num_tokens, H, D].
    """
    # [blocks, block_size, H, 2 * D] -> [tokens, H, 2 * D]
    tokens = kv_cache[blocks.long()].transpose(1, 2).flatten(0, 1)[:num_tokens].float()
    k, v = tokens.chunk(2, -1)
    return k, v


def suffix_attention(
    q: Tensor,
    segments: Sequence[KeyRun],
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    inv_freq: Tensor,
    neox: bool = True,
) -> Tensor:
    """Attention of a request's newest suffix tokens to its segments and to its suffix.

    Args:
        q: [T, Hq, D], the last T of the M suffix tokens, rotated at true positions.
        segments: the reusable runs of the prompt.
        k: [M, H, D], the suffix, rotated at true positions.
        v: [M, H, D].
        scale: of the scores.
        inv_freq: float64 [R/2].
        neox: how the rotated pairs are kept (`rotate`).

    Returns:
        float32 [T, Hq, D].
    """
    num_queries, num_suffix, group = q.shape[0], k.shape[0], q.shape[1] // k.shape[1]
    # index of each query within the suffix, [T, 1]
    j = torch.arange(num_suffix - num_queries, num_suffix, device=q.device)[:, None]
    keys = [rotate(s.k, s.shift, inv_freq, neox=neox) for s in segments] + [k.float()]
    values = [s.v.float() for s in segments] + [v.float()]
    seen = [(j >= s.visible_from).expand(-1, s.k.shape[0]) for s in segments]
    seen.append(torch.arange(num_suffix, device=q.device)[None, :] <= j)
    # [keys, Hq, D]
    all_keys = torch.cat(keys).repeat_interleave(group, 1)
    all_values = torch.cat(values).repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q.float(), all_keys) * scale
    weights = scores.masked_fill(~torch.cat(seen, 1), float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, all_values)


def merge(parts: Sequence[Tensor], lses: Sequence[Tensor]) -> Tensor:
    """One attention from its parts over disjoint sets of keys.

    Args:
        parts: outputs, [T, Hq, D] each.
        lses: natural log of the sum of exponentials of the scores, [T, Hq] each; -inf where a part has no key.

    Returns:
        float32 [T, Hq, D].
    """
    weights = torch.stack([lse.float() for lse in lses]).softmax(0)
    return sum((w[..., None] * o.float() for w, o in zip(weights, parts, strict=True)), torch.zeros(()))
