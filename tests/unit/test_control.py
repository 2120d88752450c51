"""Operations on the tiers survive the way to the engine, and what is none is refused."""

from __future__ import annotations

from typing import Any

import pytest

from lazyrag.backend.control import CHUNKS, CONTROL, OPERATIONS, control_from_args, control_to_args
from lazyrag.errors import InputError


@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_operation_arrives_as_it_was_sent(operation: str) -> None:
    chunks = [[1, 2, 3], [], [2**31 - 1]]
    found = control_from_args(control_to_args(operation, chunks))
    assert (found.operation, [list(tokens) for tokens in found.chunks]) == (operation, chunks)


def test_an_ordinary_request_is_no_operation() -> None:
    assert control_from_args({"lazyrag_spans": [0, 1, 0]}) is None


@pytest.mark.parametrize(
    "args",
    [
        {CONTROL: "wipe"},
        {CONTROL: 1},
        {CONTROL: "pin", CHUNKS: b"12"},
        {CONTROL: "pin", CHUNKS: [[1, 2]]},
        {CONTROL: "pin", CHUNKS: [b"123"]},
        {CONTROL: "pin", CHUNKS: [b"\xff\xff\xff\xff"]},
    ],
    ids=str,
)
def test_what_cannot_be_read_is_refused(args: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        control_from_args(args)
