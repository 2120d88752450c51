"""The CPU path against the fp32 oracle. The cache is NaN wherever no valid token lies."""

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from lazyrag.kernels import reference, sdpa
from lazyrag.kernels.reference import KeyRun
from lazyrag.kernels.rope import Rope


@dataclass
class Segment:
    num_tokens: int
    shift: int
    visible_from: int = 0


@dataclass
class Case:
    """One request: its segments, the suffix tokens that are stored, and how many more come in this step."""

    num_queries: int
    past: int = 0
    segments: list[Segment] = field(default_factory=list)


def ordinary(num_queries, past=0):
    return Case(num_queries, past)


def lazy(num_queries, past, *segments):
    return Case(num_queries, past, [Segment(*s) for s in segments])


BATCHES = {
    "one-decode": [ordinary(1, 40)],
    "first-token": [ordinary(1, 0)],
    "decodes": [ordinary(1, n) for n in (0, 15, 16, 300, 700)],
    "prefill": [ordinary(63)],
    "prefills": [ordinary(33), ordinary(2), ordinary(17)],
    "prefill-with-past": [ordinary(20, 530)],
    "long-past": [ordinary(3, 2500), ordinary(1, 2500)],
    "long-segment": [lazy(3, 0, (2500, 40), (30, 2540, 1))],
    "lazy-prefill": [lazy(25, 0, (37, 11), (64, 54, 3), (5, 120, 9))],
    "lazy-continued": [lazy(7, 6, (37, 0), (64, 54, 3), (5, 120, 9))],
    "lazy-decode": [lazy(1, 30, (37, 0), (64, 54, 3), (5, 120, 9))],
    "one-query-that-sees-half": [lazy(1, 4, (37, 0), (64, 54, 3))],
    "one-token-segments": [lazy(9, 0, (1, 5), (1, 7, 4), (16, 9, 5))],
    "shifted-back": [lazy(6, 0, (40, -32), (300, -5, 2))],
    "segments-adjacent": [lazy(12, 0, (48, 3, 2), (48, 51, 2), (300, 99, 2))],
    "mixed": [
        ordinary(1, 100),
        lazy(30, 0, (37, 11, 10), (270, 54, 13)),
        lazy(1, 3, (16, 0), (33, 20, 2)),
        ordinary(48, 10),
        lazy(1, 0, (5, 4, 0)),
        ordinary(1, 0),
    ],
}


class Problem:
    """Random tensors for a batch; `poison` is what lies in pads, free blocks and behind the batch's tokens."""

    def __init__(
        self, cases, *, dtype, block_size, heads=(6, 2), head_size=32, neox=True, rotary_dim=32, poison=float("nan")
    ):
        g = torch.Generator().manual_seed(len(cases))
        self.heads, self.kv_heads = heads
        exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim
        self.rope = Rope(10000.0**-exponents, head_size, neox)
        self.scale, self.dtype, self.block_size = head_size**-0.5, dtype, block_size

        def blocks_for(n):
            return -(-n // block_size)

        runs = [[s.num_tokens for s in c.segments] + [c.past + c.num_queries] for c in cases]
        total = sum(blocks_for(n) for r in runs for n in r) + 5
        free = iter(torch.randperm(total, generator=g).tolist())
        self.kv_cache = torch.full((total, self.kv_heads, block_size, 2 * head_size), poison, dtype=dtype)
        num_tokens = sum(c.num_queries for c in cases)
        draw = lambda *shape: torch.randn(*shape, generator=g).to(dtype)  # noqa: E731
        self.q = torch.full((num_tokens + 3, self.heads, head_size), poison, dtype=dtype)
        self.q[:num_tokens] = draw(num_tokens, self.heads, head_size)
        self.k = torch.full((num_tokens + 3, self.kv_heads, head_size), poison, dtype=dtype)
        self.v = self.k.clone()
        self.output = torch.full_like(self.q, float("nan"))

        self.rows, self.expected, slots, start = [], [], [], 0
        for case in cases:
            segments, plan_runs = [], []
            for s in case.segments:
                blocks = np.array([next(free) for _ in range(blocks_for(s.num_tokens))])
                k, v = draw(s.num_tokens, self.kv_heads, head_size), draw(s.num_tokens, self.kv_heads, head_size)
                self._write(blocks, 0, k, v)
                segments.append(KeyRun(k, v, s.shift, s.visible_from))
                first = max(0, s.visible_from - case.past)
                if first < case.num_queries:
                    plan_runs.append(sdpa.Run(blocks, s.num_tokens, s.shift, first))
            n = case.past + case.num_queries
            blocks = np.array([next(free) for _ in range(blocks_for(n))])
            k, v = draw(n, self.kv_heads, head_size), draw(n, self.kv_heads, head_size)
            self._write(blocks, 0, k[: case.past], v[: case.past])
            new = slice(start, start + case.num_queries)
            self.k[new], self.v[new] = k[case.past :], v[case.past :]
            at = np.arange(case.past, n)
            slots += (blocks[at // block_size] * block_size + at % block_size).tolist()
            stored = n if case.num_queries == 1 else case.past
            if stored:
                plan_runs.append(sdpa.Run(blocks, stored))
            self.rows.append(sdpa.Row(start, case.num_queries, plan_runs))
            self.expected.append((self.q[new], segments, k, v))
            start += case.num_queries
        self.slots = np.array(slots)

    def _write(self, blocks, begin, k, v):
        for i, pair in enumerate(torch.cat([k, v], -1), begin):
            self.kv_cache[blocks[i // self.block_size], :, i % self.block_size] = pair

    def run(self):
        plan = sdpa.make_plan(
            self.rows,
            self.slots,
            num_kv_heads=self.kv_heads,
            block_size=self.block_size,
            rope=self.rope,
            dtype=self.dtype,
        )
        sdpa.store(self.k, self.v, self.kv_cache, plan)
        sdpa.attend(self.q, self.k, self.v, self.kv_cache, self.output, plan=plan, rope=self.rope, scale=self.scale)
        return self.output[: len(self.slots)]

    def oracle(self):
        how = {"scale": self.scale, "inv_freq": self.rope.inv_freq, "neox": self.rope.neox}
        return torch.cat([reference.suffix_attention(*args, **how) for args in self.expected])


@pytest.mark.parametrize("block_size", [16, 32, 128])
@pytest.mark.parametrize("name", BATCHES)
def test_fp32_agrees_with_the_oracle_and_reads_no_poison(name, block_size):
    p = Problem(BATCHES[name], dtype=torch.float32, block_size=block_size)
    assert_close(p.run(), p.oracle(), rtol=1e-5, atol=2e-6)


def plain(q, segments, k, v, *, scale, rope):
    """Stock attention in the same precision, over keys that were rotated to their true positions and rounded."""
    dtype, group = q.dtype, q.shape[1] // k.shape[1]
    j = torch.arange(k.shape[0] - q.shape[0], k.shape[0])[:, None]
    keys = [reference.rotate(s.k, s.shift, rope.inv_freq, neox=rope.neox).to(dtype) for s in segments] + [k]
    seen = [(j >= s.visible_from).expand(-1, s.k.shape[0]) for s in segments] + [torch.arange(k.shape[0]) <= j]
    keys, values = (torch.cat(x).repeat_interleave(group, 1) for x in (keys, [s.v for s in segments] + [v]))
    heads_first = (x.transpose(0, 1) for x in (q, keys, values))
    attention = torch.nn.functional.scaled_dot_product_attention
    return attention(*heads_first, torch.cat(seen, 1), scale=scale).transpose(0, 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", BATCHES)
def test_low_precision_errs_at_most_twice_as_much_as_plain_attention_in_it(name, dtype):
    p = Problem(BATCHES[name], dtype=dtype, block_size=16)
    ours, exact = p.run().float(), p.oracle()
    theirs = torch.cat([plain(*args, scale=p.scale, rope=p.rope) for args in p.expected]).float()
    rounding = torch.finfo(dtype).eps * exact.abs().max()
    assert (ours - exact).abs().max() <= 2 * (theirs - exact).abs().max() + rounding
    assert (ours - exact).norm() <= 2 * (theirs - exact).norm() + torch.finfo(dtype).eps * exact.norm()


@pytest.mark.parametrize(
    "shape",
    [
        {"heads": (4, 4)},
        {"heads": (5, 1)},
        {"heads": (9, 3), "head_size": 64, "rotary_dim": 64},
        {"neox": False},
        {"rotary_dim": 8},
        {"rotary_dim": 8, "neox": False},
    ],
    ids=["mha", "mqa", "smollm2", "interleaved", "partial", "partial-interleaved"],
)
def test_head_shapes_and_rotation_styles(shape):
    shape = {"head_size": 32, "rotary_dim": 32} | shape
    p = Problem(BATCHES["mixed"], dtype=torch.float32, block_size=16, **shape)
    assert_close(p.run(), p.oracle(), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("name", BATCHES)
def test_what_lies_in_pads_changes_no_bit(name):
    results = [Problem(BATCHES[name], dtype=torch.float32, block_size=16, poison=p).run() for p in (float("nan"), 7.0)]
    assert torch.equal(*results)


def test_a_chunk_in_two_rows_and_twice_in_one_is_read_at_each_rows_shift():
    p = Problem([lazy(5, 0, (40, 7), (40, 60, 2)), lazy(1, 3, (40, 90))], dtype=torch.float32, block_size=16)
    shared = p.rows[0].runs[0].blocks
    k, v = p.expected[0][1][0].k, p.expected[0][1][0].v

    def same(run):
        return sdpa.Run(shared, 40, run.shift, run.first_query) if run.num_tokens == 40 else run

    p.rows = [sdpa.Row(r.start, r.num_queries, [same(run) for run in r.runs]) for r in p.rows]
    p.expected = [(q, [KeyRun(k, v, s.shift, s.visible_from) for s in seg], *own) for q, seg, *own in p.expected]
    assert_close(p.run(), p.oracle(), rtol=1e-5, atol=2e-6)


def test_an_ordinary_row_is_computed_the_same_beside_a_lazy_prefill():
    alone = Problem([ordinary(21, 30)], dtype=torch.float32, block_size=16)
    beside = Problem([ordinary(21, 30), lazy(9, 0, (37, 5))], dtype=torch.float32, block_size=16)
    beside.q[:21], beside.k[:21], beside.v[:21] = alone.q[:21], alone.k[:21], alone.v[:21]
    run = alone.rows[0].runs[0]
    k, v = reference.gather(alone.kv_cache, torch.from_numpy(run.blocks), 30)
    beside._write(beside.rows[0].runs[0].blocks, 0, k, v)
    assert torch.equal(alone.run(), beside.run()[:21])


def test_many_queries_over_many_tiles_are_cut_into_calls(monkeypatch):
    monkeypatch.setattr(sdpa, "MAX_COPIES", 50)
    p = Problem(BATCHES["mixed"], dtype=torch.float32, block_size=16)
    assert_close(p.run(), p.oracle(), rtol=1e-5, atol=2e-6)


def test_tokens_without_a_slot_are_not_stored():
    p = Problem([ordinary(3)], dtype=torch.float32, block_size=16)
    p.slots[1] = -1
    p.run()
    assert torch.isfinite(p.kv_cache).all(-1).sum() == 2 * p.kv_heads


def test_tensors_that_do_not_fit_are_refused():
    p = Problem([ordinary(3)], dtype=torch.float32, block_size=16)
    p.output = p.output[:, :5]
    with pytest.raises(ValueError, match=r"output must have shape \[6, 6, 32\], has \[6, 5, 32\]"):
        p.run()
    p = Problem([ordinary(3)], dtype=torch.float32, block_size=16)
    p.q = p.q.double()
    with pytest.raises(ValueError, match=r"kv_cache is torch\.float32, query is torch\.float64"):
        p.run()
