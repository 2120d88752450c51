"""Micro-benchmark of attention alone: CUDA graph replays of our kernels against stock FlashAttention-3.

    python -m lazyrag.kernels.bench [--json FILE] [--quick] [--only VARIANT,...] [decode|prefill|pages|ordinary ...]

The stock call is what a perfect prefix hit costs: the same tokens as one contiguous causal context, in the same paged
cache. `FA3+md` has the scheduler metadata that vLLM computes once a step. Every "layer" of a graph has a cache of its
own, so that replays read memory and not what the last replay left in L2, as the layers of a model do. Replays of all
variants take turns, for clocks drift; times are medians, per layer, attention and merge together.

No time is reported for a variant whose answer is wrong: the gate compares each with the fp32 oracle first.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path

import torch
import triton
from torch import Tensor

from lazyrag.kernels import dispatch, reference
from lazyrag.kernels.plan import Context, DevicePlan, Row, make_plan, turn_table
from lazyrag.kernels.reduce import Workspace
from lazyrag.kernels.rope import Rope

ROUNDS = 41
GATE = 4e-3
"""Largest error that is let through, of the norm: queries and weights are rounded to bf16 (2^-9 each, at worst)."""

LLAMA_8B = dispatch.Shape(32, 8, 128, 16, torch.bfloat16, torch.bfloat16, 128)


@dataclass(frozen=True, slots=True)
class Workload:
    """A step to time.

    Attributes:
        documents: of each request, the lengths of its segments.
        queries: tokens that each request computes.
        suffix: tokens of each request's suffix, the queries included.
        page: tokens of a page.
        shared: all requests reuse the same documents, in the same order.
    """

    title: str
    documents: tuple[tuple[int, ...], ...]
    queries: int
    suffix: int
    page: int = 16
    shared: bool = False


def even(batch: int, count: int, length: int, queries: int, suffix: int = 64, page: int = 16) -> Workload:
    """Every request reuses `count` documents of `length` tokens."""
    title = f"B={batch} {count}x{length}" if count else f"B={batch} ordinary {suffix}"
    return Workload(title, ((length,) * count,) * batch, queries, max(suffix, queries), page)


def shared(batch: int, count: int, length: int, queries: int) -> Workload:
    """Every request reuses the same `count` documents of `length` tokens."""
    workload = even(batch, count, length, queries)
    return replace(workload, title=f"{workload.title} shared", shared=True)


def ragged(batch: int, count: int, low: int, high: int, queries: int) -> Workload:
    """Documents of any length between `low` and `high`, the same ones in every run."""
    lengths = random.Random(0)
    documents = tuple(tuple(lengths.randrange(low, high) for _ in range(count)) for _ in range(batch))
    return Workload(f"B={batch} {count}x({low}..{high})", documents, queries, max(64, queries))


def uneven(batch: int, length: int, queries: int) -> Workload:
    """Requests of 1 to 20 documents."""
    counts = random.Random(0)
    documents = tuple((length,) * counts.randint(1, 20) for _ in range(batch))
    return Workload(f"B={batch} (1..20)x{length}", documents, queries, max(64, queries))


WORKLOADS = {
    "decode": (
        *(even(batch, 10, 2048, 1) for batch in (1, 4, 8, 16, 32)),
        *(even(batch, 10, 512, 1) for batch in (1, 8, 32)),
        even(64, 20, 256, 1),
        *(shared(batch, 10, 2048, 1) for batch in (4, 8, 16, 32, 64)),
        ragged(1, 10, 200, 800, 1),
        ragged(32, 10, 200, 800, 1),
        uneven(16, 512, 1),
    ),
    "prefill": (
        even(1, 10, 512, 64),
        even(1, 10, 2048, 64),
        even(4, 10, 512, 64),
        even(1, 10, 2048, 256),
        even(4, 10, 512, 256),
        even(16, 10, 512, 16),
        ragged(1, 20, 100, 400, 64),
        ragged(4, 10, 200, 800, 64),
        ragged(4, 10, 200, 800, 256),
        uneven(8, 512, 64),
    ),
    "pages": tuple(
        even(batch, 10, 2048, queries, page=page) for page in (32, 64) for batch, queries in ((8, 1), (1, 64), (1, 256))
    ),
    "ordinary": (even(8, 0, 0, 1, suffix=10304), even(1, 0, 0, 512, suffix=16384), even(1, 0, 0, 2048, suffix=2048)),
}


# ---------------------------------------------------------------- one workload


class Setup:
    """Caches, queries and block table of a workload on the device."""

    def __init__(self, workload: Workload, shape: dispatch.Shape, device: torch.device) -> None:
        page, dtype = workload.page, shape.dtype
        self.workload, self.shape = workload, shape
        self.rows: list[Row] = []
        shifts, used = [0], []
        for number, documents in enumerate(workload.documents):
            starts = [sum(-(-n // page) for n in documents[:i]) for i in range(len(documents) + 1)]
            lines = range(len(shifts), len(shifts) + len(documents))
            segments = [(first, n, 0, line) for first, n, line in zip(starts, documents, lines, strict=False)]
            context = Context.of(segments, starts[-1])
            self.rows.append(Row(workload.queries, workload.suffix, context))
            shifts += [1 + 17 * s + number for s in range(len(documents))]
            used.append(starts[-1] + -(-workload.suffix // page))
        self.contexts = [sum(documents) + workload.suffix for documents in workload.documents]
        distinct = self.contexts[:1] if workload.shared else self.contexts
        cache_bytes = sum(distinct) * shape.kv_heads * 2 * shape.head_size * dtype.itemsize
        self.layers = max(3, min(24, int(6e8 // cache_bytes)))
        blocks = sum(used)
        size = (blocks, page, shape.kv_heads, 2 * shape.head_size)
        self.caches = [torch.randn(size, device=device, dtype=dtype).transpose(1, 2) for _ in range(self.layers)]
        order = torch.randperm(blocks, device=device).int()
        self.table = torch.zeros(len(used), max(used), dtype=torch.int32, device=device)
        for r, (count, end) in enumerate(zip(used, torch.tensor(used).cumsum(0).tolist(), strict=True)):
            self.table[r, :count] = order[end - count : end]
            if workload.shared:
                columns = self.rows[r].context.suffix_page
                self.table[r, :columns] = self.table[0, :columns]
        tokens = len(used) * workload.queries
        self.query = torch.randn(tokens, shape.num_heads, shape.head_size, device=device, dtype=dtype)
        self.out = torch.empty_like(self.query)
        inv_freq = 500_000.0 ** (-torch.arange(0, shape.rotary_dim, 2, dtype=torch.float64) / shape.rotary_dim)
        self.rope = Rope(inv_freq, shape.head_size)
        self.shifts, self.turns = shifts, turn_table(self.rope, shifts).to(device)
        self.scale = shape.head_size**-0.5

    def calls(self, variant: dispatch.Variant, gpu: dispatch.Gpu) -> list[Callable[[], Tensor]]:
        """Our attention, one call a layer."""
        plan = make_plan(self.rows, variant.tiling, variant.slots(gpu, self.shape.kv_heads))
        on_device = DevicePlan(variant.tiling, plan.size, self.query.device)
        on_device.load(plan, self.table)
        slots, head_size = max(1, plan.size.slots), self.shape.head_size
        workspace = Workspace(slots, self.shape.kv_heads, variant.tiling.block_m, head_size, self.query.device)
        attend = partial(dispatch.attend, variant, scale=self.scale, turns=self.turns)
        return [partial(attend, self.query, cache, self.out, on_device, workspace) for cache in self.caches]

    def stock_calls(self) -> dict[str, list[Callable[[], Tensor]]]:
        """FlashAttention-3 over the same tokens as one context; without and with the scheduler's metadata."""
        # By name: kernels know nothing of vLLM, and it need not be there.
        flash = import_module("vllm.vllm_flash_attn")
        shape, workload, device = self.shape, self.workload, self.query.device
        ends = torch.arange(0, len(self.query) + 1, workload.queries, device=device, dtype=torch.int32)
        used = torch.tensor(self.contexts, device=device, dtype=torch.int32)
        metadata = flash.get_scheduler_metadata(
            batch_size=len(self.rows),
            max_seqlen_q=workload.queries,
            max_seqlen_k=max(self.contexts),
            num_heads_q=shape.num_heads,
            num_heads_kv=shape.kv_heads,
            headdim=shape.head_size,
            cache_seqlens=used,
            qkv_dtype=shape.dtype,
            cu_seqlens_q=ends,
            page_size=workload.page,
            causal=True,
        )

        def call(cache: Tensor, metadata: Tensor | None) -> Tensor:
            k, v = cache.transpose(1, 2).chunk(2, -1)
            result: Tensor = flash.flash_attn_varlen_func(
                self.query,
                k,
                v,
                max_seqlen_q=workload.queries,
                cu_seqlens_q=ends,
                max_seqlen_k=max(self.contexts),
                seqused_k=used,
                block_table=self.table,
                causal=True,
                out=self.out,
                fa_version=3,
                scheduler_metadata=metadata,
            )
            return result

        return {
            "FA3": [partial(call, cache, None) for cache in self.caches],
            "FA3+md": [partial(call, cache, metadata) for cache in self.caches],
        }

    def error(self, out: Tensor) -> float:
        """Of the last request in layer 0, against the oracle, relative to its norm."""
        row, page, request = self.rows[-1], self.workload.page, len(self.rows) - 1
        cache, table = self.caches[0], self.table[request]

        def keys(first: int, tokens: int) -> tuple[Tensor, Tensor]:
            return reference.gather(cache, table[first : first + -(-tokens // page)], tokens)

        context = row.context
        columns = zip(context.first_page.tolist(), context.num_tokens.tolist(), context.line.tolist(), strict=True)
        runs = [reference.KeyRun(*keys(first, tokens), self.shifts[line]) for first, tokens, line in columns]
        k, v = keys(context.suffix_page, row.suffix)
        # A few queries tell: the oracle's scores of all of them would not fit.
        last = self.query[-row.queries :][-8:]
        freq = self.rope.inv_freq.to(last.device)
        exact = reference.suffix_attention(last, runs, k, v, scale=self.scale, inv_freq=freq)
        return float((out[-len(last) :].float() - exact).norm() / exact.norm())


def capture(calls: Sequence[Callable[[], Tensor]]) -> torch.cuda.CUDAGraph:
    """One graph of all layers."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def medians_us(graphs: dict[str, torch.cuda.CUDAGraph], layers: int, rounds: int) -> dict[str, float]:
    """Microseconds a layer; all graphs take turns."""
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for turn in range(rounds + 2):
        for name, graph in graphs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            if turn > 1:
                times[name].append(start.elapsed_time(end) * 1e3 / layers)
    return {name: sorted(values)[len(values) // 2] for name, values in times.items()}


def host_us(call: Callable[[], object], repeats: int = 50) -> float:
    """Microseconds that the host spends on a call (median); the device works meanwhile."""
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e6)
        torch.cuda.synchronize()
    return sorted(times)[repeats // 2]


def measure(
    workload: Workload, gpu: dispatch.Gpu, device: torch.device, rounds: int, only: Sequence[str] = ()
) -> Iterator[dict[str, object]]:
    """Time every variant that `dispatch` lists for the workload's kind of step, or `only` those.

    Yields:
        a row for each: its time, those of stock, the ratios, the error; `chosen`: what `dispatch.choose` picks.
    """
    shape = replace(LLAMA_8B, page=workload.page)
    setup = Setup(workload, shape, device)
    chosen = dispatch.choose(shape, gpu, num_rows=len(setup.rows), most_queries=workload.queries)
    candidates = dict(dispatch.variants(shape, gpu))
    candidates = {
        name: variant
        for name, variant in candidates.items()
        if (not only or name in only) and (workload.queries > 1 or variant.tiling.block_m <= dispatch.FEW_ROWS)
    }
    stock = setup.stock_calls()  # kept until the graphs have run: a graph does not own what its calls made
    graphs = {name: capture(calls) for name, calls in stock.items()}
    errors: dict[str, float] = {}
    keep = []
    for name, variant in candidates.items():
        calls = setup.calls(variant, gpu)
        setup.out.fill_(float("nan"))
        calls[0]()
        errors[name] = setup.error(setup.out)
        if errors[name] <= GATE:  # NaN is not
            graphs[name] = capture(calls)
        keep.append(calls)
    times = medians_us(graphs, setup.layers, rounds)
    fa3_launch_us = host_us(stock["FA3+md"][0])
    plan = partial(make_plan, setup.rows, chosen.tiling, chosen.slots(gpu, shape.kv_heads))
    for name in candidates:
        ours = times.get(name)
        yield {
            "workload": workload.title,
            "queries": workload.queries,
            "page": workload.page,
            "variant": name,
            "chosen": name == chosen.name,
            "error": errors[name],
            "us": ours,
            "fa3_us": times["FA3"],
            "fa3_md_us": times["FA3+md"],
            "ratio": ours and ours / times["FA3"],
            "ratio_best": ours and ours / min(times["FA3"], times["FA3+md"]),
            "plan_us": host_us(plan, 11),
            "launch_us": host_us(keep[list(candidates).index(name)][0]) if ours else None,
            "fa3_launch_us": fa3_launch_us,
        }


# ---------------------------------------------------------------- report


def machine() -> dict[str, str]:
    """What the figures belong to."""
    git = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent,
        check=False,
    )
    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": str(torch.version.cuda),
        "vllm": str(import_module("vllm").__version__),
        "commit": git.stdout.strip() or "unknown",
    }


def line(row: dict[str, object]) -> str:
    """A row of the table."""
    mark = "*" if row["chosen"] else " "
    head = f"{row['workload']:22s} q={row['queries']:<4d} P={row['page']:<3d} {mark}{row['variant']:8s}"
    if row["us"] is None:
        return f"{head} WRONG: off by {row['error']:.1e} of the norm"
    return (
        f"{head} {row['us']:8.1f} us  FA3 {row['fa3_us']:8.1f}  +md {row['fa3_md_us']:8.1f}  "
        f"{row['ratio']:.3f} of FA3  {row['ratio_best']:.3f} of the better  err {row['error']:.1e}  "
        f"host: plan {row['plan_us']:.0f}, call {row['launch_us']:.0f}, FA3's {row['fa3_launch_us']:.0f}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; exit code 1 if a variant was wrong."""
    parser = argparse.ArgumentParser(prog="python -m lazyrag.kernels.bench", description=__doc__.splitlines()[0])
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"of {', '.join(WORKLOADS)}; default: all")
    parser.add_argument("--json", type=Path, help="write machine and rows to this file")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--only", default="", metavar="VARIANT,...", help="time these variants; default: all")
    options = parser.parse_args(arguments)
    unknown = set(options.kinds) - set(WORKLOADS)
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(WORKLOADS)}")
    device = torch.device("cuda", 0)
    gpu, rows = dispatch.Gpu.of(device), []
    flags = ["--quick"] if options.quick else []
    only = [name for name in options.only.split(",") if name]
    flags += ["--only", options.only] if only else []
    facts = {**machine(), "command": " ".join(["python -m lazyrag.kernels.bench", *flags, *options.kinds])}
    sys.stdout.write("  ".join(f"{name} {value}" for name, value in facts.items()) + "\n")
    for kind in options.kinds or WORKLOADS:
        for workload in WORKLOADS[kind]:
            for row in measure(workload, gpu, device, 9 if options.quick else ROUNDS, only):
                rows.append({"kind": kind, **row})
                sys.stdout.write(line(row) + "\n")
                sys.stdout.flush()
            if options.json:
                options.json.write_text(json.dumps({"machine": facts, "rows": rows}, indent=1))
    return int(any(row["us"] is None for row in rows))


if __name__ == "__main__":
    sys.exit(main())
