"""The systems compared. All run on the same vLLM; an arm is an engine and a way to have requests served by it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from lazyrag.bench.workload import Order

EngineName: TypeAlias = Literal["stock", "lazy", "materialize"]


@dataclass(frozen=True, slots=True)
class Arm:
    """One of the systems.

    Attributes:
        name: in reports.
        engine: "stock" is vLLM that has loaded nothing of LazyRAG; "lazy" has its scheduler and worker; "materialize"
            has those of materialize.py, on CUDA only.
        about: one sentence for the report.
        order: in which the arm sends a request's documents.
        spans: documents are marked as reusable.
        salted: every request under a salt of its own.
        in_part: of each document, the workload's `first_k` tokens are computed in their place.
        in_turn: of requests that wait for room none is preferred, and what was used least recently is evicted first, as
            stock vLLM does; else as LazyRAG's scheduler does it. For engines with that scheduler.
    """

    name: str
    engine: EngineName
    about: str
    order: Order = "fresh"
    spans: bool = False
    salted: bool = False
    in_part: bool = False
    in_turn: bool = False


ARMS = {
    arm.name: arm
    for arm in (
        Arm("recompute", "stock", "vLLM finds nothing in its cache (every request has a salt of its own)", salted=True),
        Arm("prefix", "stock", "vLLM's prefix caching, documents in the request's order"),
        Arm("prefix-reorder", "stock", "the same, documents sorted so that prefixes recur", order="sorted"),
        Arm("lazy", "lazy", "LazyRAG, documents in the request's order", spans=True),
        Arm(
            "lazy-in-turn", "lazy", "the same, requests served in turn as by vLLM's scheduler", spans=True, in_turn=True
        ),
        Arm(
            "materialize",
            "materialize",
            "each use copies the KV and turns its keys; stock attention, requests served in turn",
            spans=True,
            in_turn=True,
        ),
        Arm("materialize-ordered", "materialize", "the same, requests in the order of LazyRAG's scheduler", spans=True),
        Arm(
            "first-k", "lazy", "LazyRAG, the first tokens of each document computed in place", spans=True, in_part=True
        ),
        Arm("perfect", "stock", "vLLM, everything in front of the question is one cached prefix", order="sorted"),
        Arm("stock", "stock", "ordinary requests to vLLM", order="sorted"),
        Arm("plugin", "lazy", "ordinary requests to an engine with LazyRAG's scheduler and worker", order="sorted"),
    )
}
"""`perfect` is for workloads whose requests are all about the same documents: sorted, they are one prefix."""
