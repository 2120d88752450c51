"""Slices merge to what one softmax over all of their keys gives."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from lazyrag.kernels import reference

NOTHING_SEEN = -1e30


def check_merge(slices: int, head_size: int, group: int, blind: int) -> None:
    """Two query tiles, the second one cut; the first `blind` slices of it see no key of the first row."""
    from lazyrag.kernels.plan import DevicePlan, Row, Tiling, make_plan
    from lazyrag.kernels.reduce import Workspace, merge

    kv_heads, queries, block_m = 2, 2, 16
    device = torch.device("cpu")
    random = torch.Generator().manual_seed(slices * head_size)
    tiling = Tiling(group, block_m, 64, 16)
    plan = make_plan([Row(3, 3), Row(queries, queries)], tiling, slots=1)
    size = replace(plan.size, splits=1, slots=slices + 1)
    plan = replace(plan, splits=np.array([[3, queries, 1, slices]]), size=size)
    loaded = DevicePlan(tiling, replace(size, splits=3), device, fixed=True)
    loaded.load(plan, torch.zeros(2, 1, dtype=torch.int32))
    workspace = Workspace(slices + 1, kv_heads, block_m, head_size, device)
    workspace.part.fill_(float("nan"))
    workspace.stat.fill_(float("nan"))
    rows = queries * group
    # [slices, heads, rows, ..], scores in units of log2
    top = 40 * torch.randn(slices, kv_heads, rows, generator=random)
    total = 1 + 9 * torch.rand(slices, kv_heads, rows, generator=random)
    acc = torch.randn(slices, kv_heads, rows, head_size, generator=random)
    top[:blind, :, 0], total[:blind, :, 0], acc[:blind, :, 0] = NOTHING_SEEN, 0, 0
    workspace.part[1:, :, :rows, :head_size] = acc
    workspace.stat[1:, :, 0, :rows], workspace.stat[1:, :, 1, :rows] = top, total
    out = torch.full((5, kv_heads * group, head_size), -7.0)
    merge(out, loaded, workspace, kv_heads)
    assert (out[:3] == -7).all(), "a query tile that was not cut is somebody else's"
    parts = acc / total.clamp(min=1e-30)[..., None]
    lse = (top + total.log2()) * math.log(2)
    # [T, Hq, D] with row = token * group + head of the group
    as_heads = [
        x.reshape(slices, kv_heads, queries, group, -1).transpose(1, 2).flatten(2, 3) for x in (parts, lse[..., None])
    ]
    answer = reference.merge(list(as_heads[0]), [x[..., 0] for x in as_heads[1]])
    torch.testing.assert_close(out[3:], answer, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("slices", [2, 15, 16, 17, 40])
def test_slices_merge_by_their_log_sum_exp(interpreted: Callable[..., object], slices: int) -> None:
    interpreted(check_merge, slices, 64, 4, 0)


@pytest.mark.parametrize(("head_size", "group"), [(96, 3), (256, 1), (16, 8)])
def test_heads_of_other_sizes(interpreted: Callable[..., object], head_size: int, group: int) -> None:
    interpreted(check_merge, 3, head_size, group, 0)


@pytest.mark.parametrize("blind", [1, 18])
def test_a_slice_that_a_row_does_not_see_weighs_nothing(interpreted: Callable[..., object], blind: int) -> None:
    interpreted(check_merge, 20, 32, 4, blind)
