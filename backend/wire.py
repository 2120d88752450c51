"""Both contracts that cross a process border, in one place. Versioned; everything is flat ints, strings and lists.

Client -> scheduler (`SamplingParams.extra_args`; fits vLLM's HTTP `vllm_xargs`, which allows flat lists only):
    lazyrag_version  WIRE_VERSION
    lazyrag_spans    [start, num_tokens, offset, start, num_tokens, offset, ...]   over the logical prompt
    lazyrag_prefix   number of tokens of the shared preamble (mode lazy-prefix), 0 or absent otherwise

Scheduler -> worker (`SamplingParams.extra_args`; only the scheduler may write it, a client's is dropped):
    lazyrag_layout   {"suffix_block": int,
                      "segments": [[first_block, num_blocks, num_tokens, visible_from, shift], ...]}

Scheduler -> client (`kv_transfer_params` of the finished request):
    {"lazyrag": {"sources": ["hbm" | "disk" | "computed", ...], "cached_suffix_tokens": int}}
    `sources` has one entry for each span (the preamble not counted).
    {"lazyrag": {"error": {"kind": "RequestError" | "ContextOverflowError" | "CapacityError", "what": str, "why": str,
                           "fix": str}}}   for a request that the scheduler refuses (finish_reason "error")
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from lazyrag.backend.layout import Layout, Span
from lazyrag.errors import InputError

WIRE_VERSION = 1
VERSION, SPANS, PREFIX, LAYOUT, REPORT = (
    "lazyrag_version",
    "lazyrag_spans",
    "lazyrag_prefix",
    "lazyrag_layout",
    "lazyrag",
)
CHILD_PREFIX = "lazyrag-child-"
"""Ids of the scheduler's own requests start with this; a client's request id must not."""


class WireLayout(TypedDict):
    suffix_block: int
    segments: list[list[int]]


def spans_to_args(spans: Sequence[Span], prefix_len: int = 0) -> dict[str, Any]:
    """The `extra_args` of a lazy request; empty for an ordinary one."""
    if not spans and not prefix_len:
        return {}
    flat = [number for span in spans for number in (span.start, span.num_tokens, span.offset)]
    return {VERSION: WIRE_VERSION, SPANS: flat, PREFIX: prefix_len}


def spans_from_args(args: Mapping[str, Any]) -> tuple[list[Span], int]:
    """Read and check what a client sent.

    Raises:
        InputError: another wire version, or values of the wrong shape.
    """
    if SPANS not in args and PREFIX not in args:
        return [], 0
    if args.get(VERSION) != WIRE_VERSION:
        raise InputError(
            f"The request speaks LazyRAG wire version {args.get(VERSION)!r}, this engine speaks {WIRE_VERSION}.",
            fix="Install the same lazyrag version on both sides.",
        )
    flat, prefix_len = args.get(SPANS) or [], args.get(PREFIX) or 0
    numbers = [*flat, prefix_len] if isinstance(flat, (list, tuple)) else [None]
    if any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in numbers) or len(flat) % 3:
        raise InputError(f"{SPANS} must be a flat list of (start, num_tokens, offset) and {PREFIX} an int, all >= 0.")
    return [Span(*flat[i : i + 3]) for i in range(0, len(flat), 3)], prefix_len


def layout_to_wire(layout: Layout) -> WireLayout:
    """What the worker needs of a layout."""
    return {
        "suffix_block": layout.suffix_block,
        "segments": [[s.first_block, s.num_blocks, s.num_tokens, s.visible_from, s.shift] for s in layout.segments],
    }
