"""The ring of keys and values: no schedule lets its warps and copies meet, and one that did would be seen (ring.py)."""

from __future__ import annotations

import pytest
from offline import GPT_J, H200, LLAMA_8B
from ring import Sizes, explore

from lazyrag.kernels.dispatch import variants

SCHEDULES = 25
SHAPES = {
    f"{name}-{variant.name}": Sizes(variant.launch.stages, variant.launch.raw, variant.tiling.block_m)
    for name, shape in (("llama", LLAMA_8B), ("gptj", GPT_J))
    for variant in variants(shape, H200).values()
}


@pytest.mark.parametrize("sizes", SHAPES.values(), ids=SHAPES)
def test_every_tile_is_read_as_it_was_meant_to_be(sizes: Sizes) -> None:
    explore(sizes, SCHEDULES)


@pytest.mark.parametrize("num_tiles", [1, 2, 3, 4])
def test_slices_that_do_not_fill_the_ring(num_tiles: int) -> None:
    explore(Sizes(3, True, 128, num_tiles=num_tiles), 5)
    explore(Sizes(2, False, 128, num_tiles=num_tiles), 5)


FAULTS = {
    "values are given up while they are read": (
        "_consume",
        "acc = warpgroup_mma_wait(0, deps=[acc])\n        mbarrier.arrive(free_v.index((j - 1) % STAGES), count=1)",
        "mbarrier.arrive(free_v.index((j - 1) % STAGES), count=1)\n        acc = warpgroup_mma_wait(0, deps=[acc])",
    ),
    "scores are used before they are there": ("_consume", "wait(1, deps=[s])", "wait(2, deps=[s])"),
    "values are read from another entry": ("_start_values", "values.index(stage)", "values.index(0)"),
    "values are not waited for": ("_start_values", "mbarrier.wait(full_v.index(stage), (j // STAGES) & 1)", "pass"),
    "the phase of the keys is another": (
        "_consume",
        "mbarrier.wait(full_k.index(j % STAGES), (j // STAGES) & 1)",
        "mbarrier.wait(full_k.index(j % STAGES), 0)",
    ),
    "the producer does not wait": ("_produce", "mbarrier.wait(free_v.index(stage), free)", "pass"),
    "the producer does not wait to fetch keys": ("_produce", "mbarrier.wait(free_k.index(stage), free)", "pass"),
    "the first keys are given up while they are read": (
        "_consume",
        "s = warpgroup_mma_wait(0, deps=[s])\n    mbarrier.arrive(free_k.index(0), count=1)",
        "mbarrier.arrive(free_k.index(0), count=1)\n    s = warpgroup_mma_wait(0, deps=[s])",
    ),
    "another entry of values is given up": ("_consume", "free_v.index((j - 1) % STAGES)", "free_v.index(j % STAGES)"),
    "a consumer reads the other one's query": ("_turn", "kept.index(FIRST // 64)", "kept.index(0)"),
    "the producer waits for a phase that never comes": ("_produce", "((j // STAGES) & 1) ^ 1", "(j // STAGES) & 1"),
    "one consumer frees for both": ("_attend", "mbarrier.init(free_k.index(stage), count=N)",
                                    "mbarrier.init(free_k.index(stage), count=1)"),
    "the line of another tile is taken": ("_turn", "turn_buffer.index(stage)", "turn_buffer.index(0)"),
    "the query is not turned again": ("_consume", "if line != last_line", "if False"),
    "the line is read before it is there": (
        "_consume",
        "mbarrier.wait(full_k.index(j % STAGES), (j // STAGES) & 1)\n        if line",
        "if line",
    ),
    "half of the query is turned": ("_turn_raw", "(b * cos - a * sin)", "b"),
    "the raw query is not kept": ("_consume", "_keep_raw(query, FIRST, GROUP, D)", "pass"),
    "fewer bytes are announced": ("_produce", "BYTES + R * 4", "BYTES"),
}  # fmt: skip


@pytest.mark.parametrize("change", FAULTS.values(), ids=FAULTS)
def test_a_fault_is_found(change: tuple[str, str, str]) -> None:
    with pytest.raises(AssertionError):
        explore(Sizes(2, True, 128), SCHEDULES, change)
