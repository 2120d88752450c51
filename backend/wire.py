"""Both contracts that cross a process border, in one place. Versioned; everything is flat ints, strings and lists.

Client -> scheduler (`SamplingParams.extra_args`; fits vLLM's HTTP `vllm_xargs`, which allows flat lists only):
    lazyrag_version  WIRE_VERSION
    lazyrag_spans    [start, num_tokens, offset, start, num_tokens, offset, ...]   over the logical prompt
    lazyrag_prefix   number of tokens of the shared preamble (mode lazy-prefix), 0 or absent otherwise

Scheduler -> worker (`SamplingParams.extra_args`; only the scheduler may write it, a client's is dropped):
    lazyrag_layout   {"suffix_block": int,
                      "segments": [[first_block, num_blocks, num_tokens, visible_from, shift], ...]}

Scheduler -> KV connector (`SamplingParams.extra_args` of a child request; a client's is dropped):
    lazyrag_child    {"key": str, "first_token": int, "num_tokens": int}: `hashing.chunk_key`, and which tokens of the
                     child's prompt are the chunk's; what follows them are pads and one dummy token

Scheduler -> client (`kv_transfer_params` of every output of a lazy request; the last one counts):
    {"lazyrag": {"sources": ["hbm" | "disk" | "computed", ...], "preamble": one of the same or "",
                 "cached_suffix_tokens": int, "children_computed": int, "children_loaded": int}}
    `sources` has one entry for each span; `preamble` is the shared preamble's, empty if there is none. Children are
    counted for the request that asked first, so that the sum over requests is their number.
    {"lazyrag": {"error": name of a class in `lazyrag.errors`, "message": str}}   with finish_reason "error"
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from lazyrag import errors
from lazyrag.backend.layout import Layout, Span
from lazyrag.errors import InputError, LazyRAGError, RequestError

WIRE_VERSION = 1
VERSION, SPANS, PREFIX, LAYOUT, CHILD, REPORT = (
    "lazyrag_version",
    "lazyrag_spans",
    "lazyrag_prefix",
    "lazyrag_layout",
    "lazyrag_child",
    "lazyrag",
)
REFUSALS = "LAZYRAG_REFUSALS"
"""Environment variable: the file in which a process of a starting engine leaves why it refuses to run. vLLM's parent
process only learns that a child died."""
CHILD_PREFIX = "lazyrag-child-"
"""Ids of the scheduler's own requests start with this; a client's request id must not."""


class WireLayout(TypedDict):
    suffix_block: int
    segments: list[list[int]]


class WireChild(TypedDict):
    key: str
    first_token: int
    num_tokens: int


class WireReport(TypedDict):
    sources: list[str]
    preamble: str
    cached_suffix_tokens: int
    children_computed: int
    children_loaded: int


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


def strip_private(args: Mapping[str, Any]) -> dict[str, Any]:
    """`extra_args` without what only the scheduler may write."""
    return {key: value for key, value in args.items() if key not in (LAYOUT, CHILD)}


def error_to_params(error: LazyRAGError) -> dict[str, Any]:
    """The `kv_transfer_params` that carry an error to the client."""
    return {REPORT: {"error": type(error).__name__, "message": str(error)}}


def error_from_params(params: Mapping[str, Any] | None) -> LazyRAGError | None:
    """The error in a finished request's `kv_transfer_params`, if it holds one."""
    report = (params or {}).get(REPORT) or {}
    if "error" not in report:
        return None
    kind = getattr(errors, report["error"], None)
    if not (isinstance(kind, type) and issubclass(kind, LazyRAGError)):
        kind = RequestError
    return kind(report["message"])


def report_from_params(params: Mapping[str, Any] | None) -> WireReport | None:
    """The scheduler's report in an output's `kv_transfer_params`, if it holds one."""
    report: WireReport | None = (params or {}).get(REPORT)
    return report if report is not None and "sources" in report else None
