from types import SimpleNamespace

import pytest

from lazyrag.backend import wire
from lazyrag.backend.layout import Span, lay_out
from lazyrag.backend.plugin.rows import Rows

LAYOUT = wire.layout_to_wire(lay_out(range(60), [Span(2, 20), Span(30, 7)], prefix_len=0, block_size=16, pad=0)[0])


def new(request_id, layout=None):
    args = {wire.LAYOUT: layout} if layout else None
    return SimpleNamespace(req_id=request_id, sampling_params=SimpleNamespace(extra_args=args), block_ids=([],))


def output(*ids, new=(), finished=()):
    return SimpleNamespace(
        num_scheduled_tokens=dict.fromkeys(ids, 1), scheduled_new_reqs=new, finished_req_ids=set(finished)
    )


@pytest.fixture
def batch():
    return SimpleNamespace(req_ids=[])


@pytest.fixture
def rows(batch):
    return Rows(lambda: batch.req_ids, 16, lambda layout, blocks: layout)


def test_rows_follow_the_order_of_the_batch(rows, batch):
    batch.req_ids = ["b", "a", "c"]
    with rows.step(output("a", "b", "c", new=[new("a", LAYOUT), new("b"), new("c", LAYOUT)])):
        first, second, third, padding = rows.of_batch(4)
    assert (first, padding) == (None, None)
    assert wire.layout_to_wire(second) == wire.layout_to_wire(third) == LAYOUT


def test_a_layout_outlives_steps_preemption_and_dummy_runs(rows, batch):
    batch.req_ids = ["a"]
    with rows.step(output("a", new=[new("a", LAYOUT)])):
        assert rows.of_batch(1)[0]
    # A dummy run: the batch still names the last step's requests.
    assert rows.of_batch(1) == [None]
    with rows.step(output()):
        assert rows.of_batch(0) == []
    with rows.step(output("a")):
        assert rows.of_batch(1)[0]


def test_a_finished_requests_id_can_be_used_again(rows, batch):
    batch.req_ids = ["a"]
    with rows.step(output("a", new=[new("a", LAYOUT)])):
        pass
    with rows.step(output("a", finished=["a"], new=[new("a")])):
        assert rows.of_batch(1) == [None]


def test_rows_end_with_the_step_even_if_it_fails(rows, batch):
    batch.req_ids = ["a"]
    with pytest.raises(ZeroDivisionError), rows.step(output("a", new=[new("a", LAYOUT)])):
        1 / 0  # noqa: B018
    assert rows.of_batch(1) == [None]


def test_a_lazy_request_without_a_row_stops_the_step(rows, batch):
    batch.req_ids = ["other"]
    with (
        rows.step(output("a", "other", new=[new("a", LAYOUT), new("other")])),
        pytest.raises(RuntimeError, match="lacks requests that were scheduled with a layout: a"),
    ):
        rows.of_batch(1)
