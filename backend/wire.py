"""Both contracts that cross a process border, in one place. Versioned; everything is flat ints, strings and lists.

Client -> scheduler (`SamplingParams.extra_args`; fits vLLM's HTTP `vllm_xargs`, which allows flat lists only):
    lazyrag_version  WIRE_VERSION
    lazyrag_spans    [start, num_tokens, offset, chunk_tokens, start, ...]   over the logical prompt (`layout.Span`)
    lazyrag_prefix   number of tokens of the shared preamble (mode prefix), 0 or absent otherwise
    lazyrag_sink     [token, ...] that the chunks are computed behind (mode sink), empty or absent otherwise
    lazyrag_names    [name, ...] of the tokens of the preamble, if there is one, and of each span's chunk (contents.py).
                     The request's own tokens are then the literal ones only. Absent: they are all of the logical prompt
    lazyrag_contents {name: packed tokens} of those that the engine may not know
    lazyrag_quota    bytes of KV that the request's namespace may have on disk; absent: no limit

Scheduler -> worker (`SamplingParams.extra_args`; only the scheduler may write it, a client's is dropped):
    lazyrag_layout   {"suffix_block": int,
                      "segments": [[first_block, num_blocks, num_tokens, visible_from, shift], ...]}

Scheduler -> KV connector (`SamplingParams.extra_args` of a child request; a client's is dropped):
    lazyrag_child    {"key": str, "first_token": int, "num_tokens": int, "may_load": bool, "quota": int or None}:
                     `hashing.chunk_key`, which tokens of the child's prompt are the chunk's (what follows them are
                     pads), whether it may be loaded, and the quota that its file must fit into

Scheduler -> client (`kv_transfer_params` of every output of a lazy request; the last one counts):
    {"lazyrag": {"sources": ["hbm" | "host" | "disk" | "computed", ...], "preamble": one of the same or "",
                 "cached_suffix_tokens": int, "children_computed": int, "children_loaded": int}}  (and see control.py)
    `sources` has one entry for each span; `preamble` is the shared preamble's or the sink's, empty if there is none. A
    chunk that requests in flight share was loaded or computed for the one that asked first, and so are children
    counted: the sum over requests is their number. To the others it is "hbm", as it is to those that come later.
    {"lazyrag": {"error": name of a class in `lazyrag.errors`, "message": str}}   with finish_reason "error"
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

from lazyrag import errors
from lazyrag.backend.layout import MOST_SINK, Layout, Span
from lazyrag.errors import InputError, LazyRAGError, RequestError

WIRE_VERSION = 3
VERSION, SPANS, PREFIX, SINK, NAMES, CONTENTS, QUOTA, LAYOUT, CHILD, REPORT = (
    "lazyrag_version",
    "lazyrag_spans",
    "lazyrag_prefix",
    "lazyrag_sink",
    "lazyrag_names",
    "lazyrag_contents",
    "lazyrag_quota",
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
    may_load: bool
    quota: int | None


class WireReport(TypedDict):
    sources: list[str]
    preamble: str
    cached_suffix_tokens: int
    children_computed: int
    children_loaded: int


@dataclass(frozen=True, slots=True)
class WireRequest:
    """What a client asks for; see the module docstring.

    Attributes:
        names: None if the request's own tokens are the whole logical prompt.
        quota: None for no limit.
    """

    spans: Sequence[Span] = ()
    prefix_len: int = 0
    names: Sequence[str] | None = None
    contents: Mapping[str, bytes] = field(default_factory=dict)
    sink: Sequence[int] = ()
    quota: int | None = None


def request_to_args(request: WireRequest) -> dict[str, Any]:
    """The `extra_args` of a lazy request; empty for an ordinary one."""
    if not request.spans and not request.prefix_len:
        return {}
    flat = [n for span in request.spans for n in (span.start, span.num_tokens, span.offset, span.chunk_tokens)]
    args: dict[str, Any] = {VERSION: WIRE_VERSION, SPANS: flat, PREFIX: request.prefix_len}
    if request.sink:
        args[SINK] = list(request.sink)
    if request.quota is not None:
        args[QUOTA] = request.quota
    if request.names is not None:
        args |= {NAMES: list(request.names), CONTENTS: dict(request.contents)}
    return args


def spans_to_args(spans: Sequence[Span], prefix_len: int = 0, sink: Sequence[int] = ()) -> dict[str, Any]:
    """The `extra_args` of a request whose own tokens are the whole logical prompt."""
    return request_to_args(WireRequest(spans, prefix_len, sink=sink))


def request_from_args(args: Mapping[str, Any]) -> WireRequest:
    """Read and check what a client sent.

    Raises:
        InputError: another wire version, or values of the wrong shape.
    """
    if not {SPANS, PREFIX, SINK, NAMES, CONTENTS} & args.keys():
        return WireRequest()
    if args.get(VERSION) != WIRE_VERSION:
        raise InputError(
            f"The request speaks LazyRAG wire version {args.get(VERSION)!r}, this engine speaks {WIRE_VERSION}.",
            fix="Install the same lazyrag version on both sides.",
        )
    flat, prefix_len = args.get(SPANS) or [], args.get(PREFIX) or 0
    sink = args.get(SINK) or ()
    are_lists = all(isinstance(numbers, (list, tuple)) for numbers in (flat, sink))
    quota = args.get(QUOTA)
    numbers: list[Any] = [*flat, prefix_len, *sink, 0 if quota is None else quota] if are_lists else [None]
    if set(map(type, numbers)) != {int} or min(numbers) < 0 or len(flat) % 4:
        raise InputError(
            f"{SPANS} must be a flat list of (start, num_tokens, offset, chunk_tokens), {PREFIX} and {QUOTA} ints, and "
            f"{SINK} a list of tokens, all >= 0."
        )
    if sink and (prefix_len or len(sink) > MOST_SINK):
        raise InputError(f"{SINK} is for requests without {PREFIX}, and has {MOST_SINK} tokens at most.")
    spans = [Span(*flat[i : i + 4]) for i in range(0, len(flat), 4)]
    names, contents = args.get(NAMES), args.get(CONTENTS) or {}
    if names is not None and (
        not isinstance(names, (list, tuple))
        or not all(isinstance(name, str) for name in names)
        or len(names) != len(spans) + bool(prefix_len)
    ):
        raise InputError(f"{NAMES} must have a name for the preamble, if there is one, and one for each span.")
    if not isinstance(contents, Mapping) or not all(isinstance(data, bytes) for data in contents.values()):
        raise InputError(f"{CONTENTS} must map names to packed tokens.")
    return WireRequest(spans, prefix_len, names, contents, sink, quota)


def layout_to_wire(layout: Layout) -> WireLayout:
    """What the worker needs of a layout: all that is attended to."""
    return {
        "suffix_block": layout.suffix_block,
        "segments": [[s.first_block, s.num_blocks, s.num_tokens, s.visible_from, s.shift] for s in layout.visible],
    }


def strip_private(args: Mapping[str, Any]) -> dict[str, Any]:
    """`extra_args` without what only the scheduler may write."""
    return {key: value for key, value in args.items() if key not in (LAYOUT, CHILD)}


def strip_sent(args: Mapping[str, Any]) -> dict[str, Any]:
    """`extra_args` without what the scheduler has read and the worker has no use for."""
    return {key: value for key, value in args.items() if key not in (SPANS, SINK, NAMES, CONTENTS, QUOTA)}


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
