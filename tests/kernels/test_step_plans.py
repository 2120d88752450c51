"""Steps of a GPU worker, in Triton's interpreter, against the CPU worker's way to the same answer."""

from __future__ import annotations

from collections.abc import Callable

import pytest

Interpreted = Callable[..., object]
PAGE, MAX_LEN = 16, 2048


def random_layout(rng):
    """As a worker gets it: segments of chunks whose heads may be computed in place, behind a sink now and then."""
    from lazyrag.backend.layout import Layout, Span, lay_out

    spans, position = [], 0
    for _ in range(rng.randint(1, 4)):
        position += rng.randint(0, 20)
        offset = rng.choice([0, 0, PAGE])
        spans.append(Span(position + offset, rng.randint(1, 90), offset))
        position = spans[-1].chunk_end
    token_ids, sink = range(position + rng.randint(1, 30)), range(rng.choice([0, 4, 30]))
    layout, _ = lay_out(token_ids, spans, prefix_len=0, block_size=PAGE, pad=0, sink=sink)
    return Layout(PAGE, layout.visible, layout.suffix_block)


def check_steps(seed: int, in_graphs: bool) -> None:
    """Random batches: attention and positions of `Planner` are those of the CPU worker, whatever ran before."""
    import random

    import numpy as np
    import torch

    from lazyrag.backend.plugin.metadata import make_rows
    from lazyrag.backend.plugin.plans import Bucket, Planner
    from lazyrag.backend.plugin.positions import write_true_positions
    from lazyrag.kernels import dispatch, sdpa
    from lazyrag.kernels.rope import Rope

    rng, heads, kv_heads, size = random.Random(seed), 4, 2, 16
    torch.manual_seed(seed)
    rope = Rope(10000.0 ** (-torch.arange(0, size, 2, dtype=torch.float64) / size), size)
    shape = dispatch.Shape(heads, kv_heads, size, PAGE, torch.float32, torch.float32, size)
    gpu = dispatch.Gpu((8, 0), 4, 100_000)
    planner = Planner(rope, shape, torch.device("cpu"), gpu, max_num_rows=8, max_num_tokens=128, max_model_len=MAX_LEN)
    cache = torch.full((400, kv_heads, PAGE, 2 * size), float("nan"))
    for _ in range(3):
        layouts = [random_layout(rng) if rng.random() < 0.7 else None for _ in range(rng.randint(1, 5))]
        done = [rng.randint(0, 40) for _ in layouts]
        queries = [rng.choice([1, 1, rng.randint(2, 20)]) for _ in layouts]
        seq_lens = [
            (layout.suffix_start if layout else 0) + before + now
            for layout, before, now in zip(layouts, done, queries, strict=True)
        ]
        starts = np.cumsum([0, *queries]).tolist()
        table = torch.randperm(len(cache))[: len(layouts) * 60].view(len(layouts), 60).int()
        cache.fill_(float("nan"))
        for row, (layout, length) in enumerate(zip(layouts, seq_lens, strict=True)):
            runs = [(s.first_block, s.num_tokens) for s in layout.segments] if layout else []
            first = layout.suffix_block if layout else 0
            for block, tokens in [*runs, (first, length - first * PAGE)]:
                for token in range(tokens):
                    cache[table[row, block + token // PAGE], :, token % PAGE] = torch.randn(kv_heads, 2 * size)
        total = starts[-1]
        query = torch.randn(total, heads, size)

        plan = sdpa.make_plan(
            make_rows(starts, seq_lens, table.numpy().astype(np.int64), layouts, PAGE),
            np.zeros(total, dtype=np.int64),
            num_kv_heads=kv_heads,
            block_size=PAGE,
            rope=rope,
            dtype=torch.float32,
        )
        expected = torch.empty_like(query)
        physical = torch.cat([torch.arange(n - q, n) for n, q in zip(seq_lens, queries, strict=True)])
        owner = torch.arange(len(layouts)).repeat_interleave(torch.tensor(queries))
        new = cache[table[owner, physical // PAGE], :, physical % PAGE]
        sdpa.attend(query, *new.split(size, -1), cache, expected, plan=plan, rope=rope, scale=0.25)
        true = physical.clone()
        write_true_positions(true, starts, seq_lens, layouts)

        reused = [
            planner.describe(layout, blocks) if layout else None
            for layout, blocks in zip(layouts, table.tolist(), strict=True)
        ]
        bucket = None
        if in_graphs:
            # A row and some tokens of padding; a step of one token a row may also be padded to a decode graph.
            bucket = Bucket(total + 3, min(len(layouts) + 1, total + 2))
            if max(queries) == 1:
                bucket = Bucket(len(layouts) + 1, len(layouts) + 1)
            planner.add_graph(bucket)
            padding = bucket.num_rows - len(layouts)
            starts, seq_lens, reused = starts + [total] * padding, seq_lens + [0] * padding, reused + [None] * padding
            table = torch.cat([table, table.new_full((padding, table.shape[1]), 10**9)])
        positions = torch.full((total + 3,), -1)
        step = planner.make(starts, seq_lens, reused, table, positions, bucket)
        assert positions.tolist() == [*true.tolist(), -1, -1, -1]
        output = torch.full((total, heads, size), float("nan"))
        step.attend(query, cache, output, 0.25)
        torch.testing.assert_close(output, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("in_graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("seed", range(4))
def test_a_steps_attention_and_positions_are_those_of_the_cpu(
    interpreted: Interpreted, seed: int, in_graphs: bool
) -> None:
    interpreted(check_steps, seed, in_graphs)


def check_capacity() -> None:
    """Steps that the graphs' tables cannot hold are not let in."""
    import torch

    from lazyrag.backend.plugin.plans import Planner
    from lazyrag.kernels import dispatch
    from lazyrag.kernels.rope import Rope

    rope = Rope(torch.ones(8, dtype=torch.float64), 16)
    shape = dispatch.Shape(4, 2, 16, PAGE, torch.float32, torch.float32, 16)
    planner = Planner(
        rope,
        shape,
        torch.device("cpu"),
        dispatch.Gpu((8, 0), 4, 100_000),
        max_num_rows=2,
        max_num_tokens=64,
        max_model_len=MAX_LEN,
    )
    from lazyrag.backend.layout import Span, lay_out

    many = [Span(start, 1) for start in range(0, 80, 2)]
    layout = lay_out(range(100), many, prefix_len=0, block_size=PAGE, pad=0)[0]
    reused = planner.describe(layout, range(100))
    assert planner.fits_graphs(1, 2000, [reused])
    assert not planner.fits_graphs(2, 4000, [reused] * 2)
    # Two requests with the same two documents, in blocks 7-8 and 3, each in its own order.
    two = lay_out(range(60), [Span(0, 20), Span(20, 9)], prefix_len=0, block_size=PAGE, pad=0)[0]
    other = lay_out(range(60), [Span(0, 9), Span(20, 20)], prefix_len=0, block_size=PAGE, pad=0)[0]
    for layout, blocks, late in ((two, [7, 8, 3, 10], 0), (other, [3, 7, 8, 11], 11)):
        one = planner.describe(layout, blocks)
        assert [blocks[column] for column in one.by_place.first_page] == [3, 7]
        assert one.by_place.num_tokens.tolist() == [9, 20]
        assert one.all_seen_from == late
        assert one.context.first_page.tolist() == [segment.first_block for segment in layout.segments]
    far = lay_out(range(3000), [Span(2500, 1)], prefix_len=0, block_size=PAGE, pad=0)[0]
    with pytest.raises(RuntimeError, match="are moved by"):
        planner.describe(far, range(200))


def test_steps_with_too_many_pieces_run_without_a_graph(interpreted: Interpreted) -> None:
    interpreted(check_capacity)
