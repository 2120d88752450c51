"""What crosses process borders survives it, and what does not belong there is refused."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyrag import errors
from lazyrag.backend import wire
from lazyrag.backend.layout import MOST_SINK, Span, lay_out
from lazyrag.errors import CapacityError, InputError, LazyRAGError, RequestError

V = {wire.VERSION: wire.WIRE_VERSION}
numbers = st.integers(0, 2**31)
spans = st.lists(st.builds(Span, numbers, numbers, numbers, numbers), max_size=8)


@given(spans, numbers)
def test_spans_survive_the_way_to_the_scheduler(given_spans, prefix_len):
    args = json.loads(json.dumps(wire.spans_to_args(given_spans, prefix_len)))
    request = wire.request_from_args(args)
    assert (list(request.spans), request.prefix_len, request.names) == (given_spans, prefix_len, None)


def test_names_and_contents_survive_the_way_to_the_scheduler():
    request = wire.WireRequest([Span(3, 2)], 3, ["p", "q"], {"q": b"1234"}, quota=10**12)
    assert wire.request_from_args(wire.request_to_args(request)) == request


def test_a_sink_survives_the_way_to_the_scheduler():
    args = json.loads(json.dumps(wire.spans_to_args([Span(3, 2)], 0, range(4))))
    assert list(wire.request_from_args(args).sink) == [0, 1, 2, 3]
    assert wire.SINK not in wire.strip_sent(args)


@given(spans, numbers)
def test_arguments_fit_vllms_http_interface(given_spans, prefix_len):
    for value in wire.spans_to_args(given_spans, prefix_len).values():
        assert isinstance(value, int) or all(type(number) is int for number in value)


def test_an_ordinary_request_has_no_arguments():
    assert wire.spans_to_args([]) == {}
    assert wire.request_from_args({"other": 1}) == wire.WireRequest()


@pytest.mark.parametrize(
    "args",
    [
        {wire.SPANS: [0, 1, 0, 1]},
        {wire.VERSION: 2, wire.SPANS: [0, 1, 0, 1]},
        {wire.VERSION: "3", wire.SPANS: [0, 1, 0, 1]},
        {**V, wire.SPANS: [0, 1, 0]},
        {**V, wire.SPANS: [0, 1, 0, 1], wire.QUOTA: -1},
        {**V, wire.SPANS: [0, 1, 0, 1], wire.QUOTA: "1"},
        {**V, wire.SPANS: [0, 1, 0, "1"]},
        {**V, wire.SPANS: [0, True, 0, 1]},
        {**V, wire.SPANS: [0, -1, 0, 1]},
        {**V, wire.SPANS: [[0, 1, 0, 1]]},
        {**V, wire.SPANS: {"a": 1}},
        {**V, wire.SPANS: 7},
        {**V, wire.SPANS: [0, 1.0, 0, 1]},
        {**V, wire.PREFIX: "4"},
        {**V, wire.PREFIX: -1},
        {**V, wire.SPANS: [0, 1, 0, 1], wire.NAMES: []},
        {**V, wire.SPANS: [0, 1, 0, 1], wire.NAMES: ["a", "b"]},
        {**V, wire.SPANS: [0, 1, 0, 1], wire.NAMES: [1]},
        {**V, wire.SPANS: [0, 1, 0, 1], wire.NAMES: "a"},
        {**V, wire.SPANS: [0, 1, 0, 1], wire.PREFIX: 1, wire.NAMES: ["a"]},
        {**V, wire.SPANS: [0, 1, 0, 1], wire.NAMES: ["a"], wire.CONTENTS: {"a": [1]}},
        {**V, wire.SPANS: [0, 1, 0, 1], wire.NAMES: ["a"], wire.CONTENTS: ["a"]},
        {wire.NAMES: ["a"]},
        {wire.SINK: [1]},
        {**V, wire.SPANS: [0, 1, 0, 1], wire.SINK: "a"},
        {**V, wire.SPANS: [0, 1, 0, 1], wire.SINK: [-1]},
        {**V, wire.SPANS: [0, 1, 0, 1], wire.SINK: [True]},
        {**V, wire.SPANS: [4, 1, 0, 1], wire.PREFIX: 2, wire.SINK: [1]},
        {**V, wire.SPANS: [0, 1, 0, 1], wire.SINK: [1] * (MOST_SINK + 1)},
    ],
)
def test_anything_else_is_refused(args):
    with pytest.raises(InputError):
        wire.request_from_args(args)


def test_a_layout_is_flat_numbers_for_the_worker():
    layout, _ = lay_out(range(30), [Span(3, 5), Span(12, 6, offset=4)], prefix_len=2, block_size=4, pad=0)
    sent = json.loads(json.dumps(wire.layout_to_wire(layout)))
    assert sent["suffix_block"] == 5
    assert sent["segments"] == [[0, 1, 2, 0, 0], [1, 2, 5, 1, 1], [3, 2, 6, 5, 6]]


def test_a_worker_is_not_told_of_a_sink():
    layout, _ = lay_out(range(30), [Span(3, 5)], prefix_len=0, block_size=4, pad=0, sink=range(6))
    assert wire.layout_to_wire(layout) == {"suffix_block": 4, "segments": [[2, 2, 5, 3, -3]]}


def test_what_only_the_scheduler_may_write_is_stripped():
    assert wire.strip_private({wire.LAYOUT: {}, wire.CHILD: {}, wire.SPANS: [], "own": 1}) == {wire.SPANS: [], "own": 1}


@pytest.mark.parametrize("kind", [CapacityError, InputError, RequestError])
def test_an_error_arrives_as_the_same_kind_with_its_text(kind):
    sent = json.loads(json.dumps(wire.error_to_params(kind("What.", why="Why.", fix="Fix."))))
    error = wire.error_from_params(sent)
    assert type(error) is kind
    assert str(error) == "What. Why. Fix."
    assert wire.report_from_params(sent) is None


@pytest.mark.parametrize("name", ["NoSuchError", "annotations", "_rebuild"])
def test_an_unknown_kind_of_error_is_a_request_error(name):
    error = wire.error_from_params({wire.REPORT: {"error": name, "message": "What."}})
    assert type(error) is RequestError


def test_every_error_can_be_sent():
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, LazyRAGError)]
    for kind in kinds:
        assert type(wire.error_from_params(wire.error_to_params(kind("What.")))) is kind


def test_a_report_is_found_beside_vllms_own_parameters():
    report = {
        "sources": ["hbm"],
        "preamble": "",
        "cached_suffix_tokens": 0,
        "children_computed": 0,
        "children_loaded": 0,
    }
    assert wire.report_from_params({"theirs": 1, wire.REPORT: report}) == report
    assert wire.error_from_params({"theirs": 1, wire.REPORT: report}) is None
    assert wire.report_from_params(None) is wire.report_from_params({"theirs": 1}) is None
