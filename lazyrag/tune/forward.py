"""Rows -> log-probabilities: one forward pass of a Hugging Face causal model over a batch.

Rows are padded on the left, so that their last tokens stand below each other: what is wanted of a prompt is how its
last tokens follow from each other, and the model computes logits for these only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.nn import functional

from lazyrag.tune.layout import LITERAL, Row

PAD = -2
"""Owner of the tokens that fill a batch up."""

ALIGNMENT = 8
"""Of a row's length: the attention kernels that take a mask copy it, in every layer, if it is not so aligned."""


def tensors(rows: Sequence[Row], device: torch.device) -> dict[str, torch.Tensor]:
    """Arguments of the model for a batch: input_ids and position_ids [B, L], attention_mask [B, 1, L, L] of bool."""
    width = -(-max(map(len, rows)) // ALIGNMENT) * ALIGNMENT
    pads = [width - len(row) for row in rows]

    def padded(lists: Iterable[Sequence[int]], fill: int) -> torch.Tensor:
        return torch.tensor([[fill] * pad + list(x) for pad, x in zip(pads, lists, strict=True)]).to(device)

    owners = padded((row.owners for row in rows), PAD)
    return {
        "input_ids": padded((row.token_ids for row in rows), 0),
        "position_ids": padded((row.positions for row in rows), 0),
        "attention_mask": mask(owners, padded((row.hidden for row in rows), 1).bool())[:, None],
    }


def mask(owners: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """Which keys each query sees (`layout`): [B, L, L] of bool, from owners and hidden, each [B, L].

    Padding sees padding, for a softmax over nothing would be NaN.
    """
    index = torch.arange(owners.shape[1], device=owners.device)
    query, key = owners[:, :, None], owners[:, None, :]
    shown = (query == LITERAL) & ~hidden[:, None, :]
    return ((query == key) | shown) & (index <= index[:, None])


def logits(model: Any, rows: Sequence[Row], last: int, *, fast: bool = False) -> torch.Tensor:
    """Logits of what follows each of the last tokens of each row: [B, last, vocabulary], fp32.

    Args:
        model: with attention that takes a mask of its own (`sdpa`, `eager`).
        rows: the batch.
        last: tokens at the end of each row.
        fast: on a GPU, multiply in bf16; weights and sums stay in fp32.
    """
    device = next(model.parameters()).device
    with half_precision(model, device.type) if fast and device.type == "cuda" else nullcontext():
        out = model(**tensors(rows, device), use_cache=False, logits_to_keep=last)
    return torch.as_tensor(out.logits).float()


@contextmanager
def half_precision(model: Any, device_type: str) -> Iterator[None]:
    """Multiply in bf16, but for the product that makes logits: of these, bf16 has steps of a tenth."""

    def in_fp32(head: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device_type, enabled=False):
            return functional.linear(inputs[0].float(), head.weight, head.bias)

    hook = model.get_output_embeddings().register_forward_hook(in_fp32)
    try:
        with torch.autocast(device_type, torch.bfloat16):
            yield
    finally:
        hook.remove()


def batches(lengths: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Indices of rows that fit into one pass each, padding counted; rows of like lengths come together.

    Args:
        lengths: tokens of each row.
        max_tokens: of a pass; a longer row is a pass of its own.
    """
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        if batch and lengths[batch[0]] * (len(batch) + 1) > max_tokens:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch
