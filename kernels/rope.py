"""Rotations by a number of positions, as tables: R(s) turns a query that stands at position t into one at t + s.

A rotary embedding with frequencies f_0 .. f_{R/2-1} turns the i-th pair (a, b) of a head by the angle p * f_i:

    R(p) (a, b) = (a cos(p f_i) - b sin(p f_i),  b cos(p f_i) + a sin(p f_i))

R(p) is a pure rotation, so R(a) R(b) = R(a + b): a key that was stored at local position p and now stands at p + s is
seen rightly by a query turned back by s, as (R(t) q) . (R(p + s) k) = (R(-s) R(t) q) . (R(p) k). Written without pairs,

    R(p) x = x * cos + half_turn(x) * sin,        half_turn(.., a, .., b, ..) = (.., -b, .., a, ..)

with cos and sin repeated for both members of a pair, 1 and 0 in the dimensions that are not rotated. Where the members
of a pair are kept is a matter of style: i and i + R/2 (NeoX), or 2i and 2i + 1 (GPT-J, interleaved).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Rope:
    """A rotary embedding.

    Attributes:
        inv_freq: radians a position of each pair, float64 [R/2], R <= head_size.
        head_size: D; dimensions [R, D) are not rotated.
        neox: pairs are (i, i + R/2); otherwise (2i, 2i + 1).
    """

    inv_freq: Tensor
    head_size: int
    neox: bool = True

    def __post_init__(self) -> None:
        if self.inv_freq.dtype != torch.float64 or self.inv_freq.dim() != 1:
            raise ValueError(f"inv_freq must be float64 [R/2], is {self.inv_freq.dtype} {list(self.inv_freq.shape)}")
        if not 0 < self.rotary_dim <= self.head_size:
            raise ValueError(f"{self.rotary_dim} dimensions are to be rotated, the head has {self.head_size}")

    @property
    def rotary_dim(self) -> int:
        """R, the number of dimensions that are rotated."""
        return 2 * self.inv_freq.numel()

    def tables(self, shifts: Sequence[int] | Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of shifts (in positions, of any sign): float32 [S, D] each, made in float64."""
        shift = torch.as_tensor(shifts, dtype=torch.float64, device=self.inv_freq.device)
        # [S, R/2]
        angle = shift[:, None] * self.inv_freq
        both = torch.cat([angle, angle], -1) if self.neox else angle.repeat_interleave(2, -1)
        rest = self.head_size - self.rotary_dim
        cos = torch.nn.functional.pad(both.cos(), (0, rest), value=1.0)
        sin = torch.nn.functional.pad(both.sin(), (0, rest), value=0.0)
        return cos.float(), sin.float()

    def half_turn(self, x: Tensor) -> Tensor:
        """Every pair (a, b) of x [..., D] as (-b, a); what stands in dimensions that are not rotated means nothing."""
        rotated, rest = x[..., : self.rotary_dim], x[..., self.rotary_dim :]
        if self.neox:
            a, b = rotated.chunk(2, -1)
            return torch.cat([-b, a, rest], -1)
        a, b = rotated[..., ::2], rotated[..., 1::2]
        return torch.cat([torch.stack([-b, a], -1).flatten(-2), rest], -1)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """R(s) x in float32 for x [..., D] and tables that broadcast against it."""
        x = x.float()
        return torch.addcmul(x * cos, self.half_turn(x), sin)
