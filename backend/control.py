"""What a client asks of an engine's tiers, beside answers: compute chunks, bring them nearer, keep them, forget them.

It travels as a request of one token that is answered without being run, for that is what vLLM lets a client send
(`SamplingParams.extra_args`; the namespace is the request's cache salt):

    lazyrag_control  one of `OPERATIONS`
    lazyrag_chunks   [packed tokens of a chunk (contents.py), ...]; none for `PREFETCH` and `WARM`

`PREFETCH` and `WARM` name their chunks as any request does (wire.py): by spans, of a prompt that nobody computes.
`WARM` is a lazy request in all but its end: children compute what is missing, and once its chunks are resident and
saved, it is answered with the report that any lazy request gets.

The answer, like every last answer to a lazy request, carries the tiers' counters:
    kv_transfer_params = {"lazyrag": {..., "tiers": {tier: {counter: int}}, "prefetch": {counter: int}}}
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lazyrag.backend.contents import pack, unpack
from lazyrag.errors import InputError

CONTROL, CHUNKS, TIERS, PREFETCHED = "lazyrag_control", "lazyrag_chunks", "tiers", "prefetch"
WARM, PREFETCH, PIN, UNPIN, FORGET = "warm", "prefetch", "pin", "unpin", "forget"
OPERATIONS = (WARM, PREFETCH, PIN, UNPIN, FORGET)


@dataclass(frozen=True, slots=True)
class Control:
    """An operation on chunks, given by their tokens."""

    operation: str
    chunks: Sequence[Sequence[int]] = ()


def control_to_args(operation: str, chunks: Iterable[Sequence[int]] = ()) -> dict[str, Any]:
    """The `extra_args` of an operation.

    Raises:
        ValueError: a token id that is no whole number of 32 bits.
    """
    return {CONTROL: operation, CHUNKS: [pack(tokens) for tokens in chunks]}


def control_from_args(args: Mapping[str, Any]) -> Control | None:
    """The operation that a request asks for; None for an ordinary request.

    Raises:
        InputError: no such operation, or something that is no chunk.
    """
    operation = args.get(CONTROL)
    if operation is None:
        return None
    if operation not in OPERATIONS:
        raise InputError(f"{CONTROL} is {operation!r}.", fix=f"Known: {', '.join(OPERATIONS)}.")
    packed = args.get(CHUNKS) or []
    if not isinstance(packed, (list, tuple)) or not all(isinstance(data, bytes) for data in packed):
        raise InputError(f"{CHUNKS} must be a list of packed tokens.")
    try:
        return Control(operation, [unpack(data) for data in packed])
    except ValueError as error:
        raise InputError(f"{CHUNKS} cannot be read:", why=f"{error}.") from None
