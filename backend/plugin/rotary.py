"""The model's rotary embedding: found in the loaded model, taken only if its kind is known, then tried out.

Reuse of KV at other positions rests on one property: at position p, queries and keys are R(p) times something that does
not depend on p, and values do not depend on p at all (kernels/rope.py). Knowing the class of the rotary embedding is
not enough: a model may leave some layers unrotated, normalise behind the rotation, or add absolute positions. So every
layer's queries, keys and values for the same few tokens at two places are compared, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.rotary_embedding import (
    LinearScalingRotaryEmbedding,
    Llama3RotaryEmbedding,
    NTKScalingRotaryEmbedding,
    RotaryEmbedding,
    YaRNScalingRotaryEmbedding,
)

from lazyrag.kernels.rope import Rope

MAX_DEVIATION = 0.05
"""Of a turned vector, relative to its length. Rounding stays far below (bfloat16: 0.01), a wrong rotation far above."""

_FIX = "Use a model with one plain rotary embedding in all layers (Llama, Qwen2, Qwen3, Mistral, SmolLM2, ...)."


def find_rope(model: nn.Module) -> tuple[Rope | None, str | None]:
    """The rotation that the model uses, or the reason why there is no single known one."""
    found: list[Any] = [module for module in model.modules() if type(module).__name__.endswith("RotaryEmbedding")]
    if not found:
        return None, f"The model has no rotary embedding, so its KV is tied to the place where it was computed. {_FIX}"
    ropes = []
    for module in found:
        inv_freq = _inv_freq(module)
        if inv_freq is None:
            return (
                None,
                f"The model's rotary embedding is a {type(module).__name__}, which is no plain rotation. {_FIX}",
            )
        ropes.append(Rope(inv_freq.double(), module.head_size, module.is_neox_style))
    if not all(_same(ropes[0], rope) for rope in ropes[1:]):
        return None, f"The model's layers have {len(ropes)} rotary embeddings that differ. {_FIX}"
    return ropes[0], None


def _inv_freq(module: Any) -> Tensor | None:
    """Radians a position, float32 [R/2] as vLLM computes them; None for a kind that is not known to be a rotation."""
    kind, inv_freq = type(module), None
    if kind in (RotaryEmbedding, Llama3RotaryEmbedding, NTKScalingRotaryEmbedding):
        inv_freq = module._compute_inv_freq(module.base)
    elif kind is LinearScalingRotaryEmbedding and len(module.scaling_factors) == 1:
        inv_freq = module._compute_inv_freq(module.base) / module.scaling_factors[0]
    elif kind is YaRNScalingRotaryEmbedding:
        # Its factor on the length (mscale) is in queries and keys already, and a rotation keeps it.
        inv_freq = module._compute_inv_freq(module.scaling_factor)
    return inv_freq


def _same(a: Rope, b: Rope) -> bool:
    return a.head_size == b.head_size and a.neox == b.neox and torch.equal(a.inv_freq, b.inv_freq)


@dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """What reached one attention layer: [T, heads, D] each."""

    query: Tensor
    key: Tensor
    value: Tensor


DryRun = Callable[[Tensor], Mapping[str, Seen]]
"""Runs the model on a few fixed tokens at the given positions, attention giving zeros -> what each layer was given."""


def check_rotation(dry_run: DryRun, rope: Rope, max_position: int) -> str | None:
    """Whether the model behaves, in every layer, as `rope` says; else the reason why its chunks cannot move.

    Args:
        dry_run: see `DryRun`.
        rope: as found.
        max_position: the last position that the model can be given.
    """
    here = torch.arange(min(8, max_position))
    shift = max_position - here.numel()
    cos, sin = rope.tables([shift])
    before, after = dry_run(here), dry_run(here + shift)
    wrong = [
        name
        for name, at in before.items()
        if not all(_close(moved, stayed) for moved, stayed in _pairs(rope, cos, sin, at, after[name]))
    ]
    if not wrong:
        return None
    return (
        f"In {len(wrong)} of the model's {len(before)} layers ({wrong[0]}, ...) queries, keys and values do not depend "
        f"on the position as the rotary embedding says. {_FIX}"
    )


def _pairs(rope: Rope, cos: Tensor, sin: Tensor, here: Seen, there: Seen) -> Iterator[tuple[Tensor, Tensor]]:
    yield rope.rotate(here.query, cos, sin), there.query
    yield rope.rotate(here.key, cos, sin), there.key
    yield here.value, there.value


def _close(expected: Tensor, actual: Tensor) -> bool:
    deviation = (expected.float() - actual.float()).norm()
    return bool(deviation <= MAX_DEVIATION * actual.float().norm())
