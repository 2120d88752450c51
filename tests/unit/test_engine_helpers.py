"""What every engine gets from `lazyrag.backend.engine`: iterators, batches, warming, cancelling, deadlines."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from lazyrag.backend import engine as engines
from lazyrag.backend.engine import Cancel, Deliver, Delta, EngineInfo, Event, Request, Sampling
from lazyrag.errors import CapacityError, EngineDeadError, RequestTimeoutError
from lazyrag.types import COMPUTED, Reuse, Segment

REUSE = Reuse(3, 1)
LAST = Delta("c", (3,), finish_reason="stop", reuse=REUSE, ttft_s=0.5)
HELLO: Sequence[Event] = (Delta("a", (1,), ({1: -0.1},)), Delta("b", (2,), ({2: -0.2},)), LAST)
NEVER: Sequence[Event] = ()


@dataclass
class Scripted:
    """An engine that plays, for each request, the events written down for its first token id, from another thread."""

    script: dict[int, Sequence[Event]]
    requests: list[Request] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)
    threads: list[threading.Thread] = field(default_factory=list)

    @property
    def info(self) -> EngineInfo:
        raise AssertionError("the helpers need no info")

    def submit(self, request: Request, deliver: Deliver) -> Cancel:
        self.requests.append(request)
        key = request.token_ids[0]

        def play() -> None:
            for event in self.script[key]:
                deliver(event)

        thread = threading.Thread(target=play)
        self.threads.append(thread)
        thread.start()
        return lambda: self.cancelled.append(key)

    def stats(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        for thread in self.threads:
            thread.join()


@pytest.fixture
def engine() -> Iterator[Scripted]:
    failed: Sequence[Event] = (Delta("a", (1,)), CapacityError("No room."))
    engine = Scripted({1: HELLO, 2: failed, 3: NEVER, 4: (LAST,), 5: (Delta("a", (1,)),)})
    yield engine
    engine.close()


def request(key: int, timeout_s: float | None = None) -> Request:
    return Request([key], sampling=Sampling(timeout_s=timeout_s))


# ---------------------------------------------------------------- stream, astream


def test_stream_yields_every_delta_in_order(engine: Scripted) -> None:
    assert list(engines.stream(engine, request(1))) == list(HELLO)
    assert engine.cancelled == [], "a finished request is not cancelled"


def test_stream_raises_the_requests_error(engine: Scripted) -> None:
    deltas = engines.stream(engine, request(2))
    assert next(deltas).text == "a"
    with pytest.raises(CapacityError):
        next(deltas)
    assert engine.cancelled == []


def test_closing_a_stream_early_cancels_the_request(engine: Scripted) -> None:
    deltas = engines.stream(engine, request(1))
    next(deltas)
    deltas.close()  # type: ignore[attr-defined]
    assert engine.cancelled == [1]


def test_a_stream_that_nobody_reads_is_never_submitted(engine: Scripted) -> None:
    engines.stream(engine, request(1))
    assert engine.requests == []


def test_a_stream_past_its_deadline_is_cancelled(engine: Scripted) -> None:
    deltas = engines.stream(engine, request(5, timeout_s=0.01))
    assert next(deltas).text == "a"
    with pytest.raises(RequestTimeoutError) as caught:
        next(deltas)
    assert isinstance(caught.value, TimeoutError)
    assert engine.cancelled == [5]


async def test_astream_yields_every_delta_in_order(engine: Scripted) -> None:
    assert [delta async for delta in engines.astream(engine, request(1))] == list(HELLO)
    assert engine.cancelled == []


async def test_astream_raises_the_requests_error(engine: Scripted) -> None:
    with pytest.raises(CapacityError):
        [delta async for delta in engines.astream(engine, request(2))]
    assert engine.cancelled == []


async def test_closing_an_astream_early_cancels_the_request(engine: Scripted) -> None:
    deltas = engines.astream(engine, request(1))
    await anext(deltas)
    await deltas.aclose()  # type: ignore[attr-defined]
    assert engine.cancelled == [1]


async def test_cancelling_the_task_cancels_the_request(engine: Scripted) -> None:
    async def read() -> None:
        async for _ in engines.astream(engine, request(3)):
            pass

    task = asyncio.create_task(read())
    while not engine.requests:
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert engine.cancelled == [3]


async def test_an_astream_past_its_deadline_is_cancelled(engine: Scripted) -> None:
    with pytest.raises(RequestTimeoutError):
        [delta async for delta in engines.astream(engine, request(3, timeout_s=0.01))]
    assert engine.cancelled == [3]


def test_a_delta_for_a_closed_event_loop_is_dropped() -> None:
    """The engine's thread outlives `asyncio.run`; a late delta must not raise there."""
    kept: list[Deliver] = []

    class Late(Scripted):
        def submit(self, request: Request, deliver: Deliver) -> Cancel:
            kept.append(deliver)
            deliver(LAST)
            return lambda: None

    async def read() -> list[Delta]:
        return [delta async for delta in engines.astream(Late({}), request(1))]

    assert asyncio.run(read()) == [LAST]
    kept[0](LAST)


# ---------------------------------------------------------------- generate, agenerate


def test_generate_keeps_the_order_and_puts_errors_in_their_place(engine: Scripted) -> None:
    long, failed, short = engines.generate(engine, [request(1), request(2), request(4)])
    assert long == engines.joined([event for event in HELLO if isinstance(event, Delta)])
    assert isinstance(failed, CapacityError)
    assert short == LAST
    assert engine.cancelled == []


def test_generate_submits_everything_before_it_waits(engine: Scripted) -> None:
    seen: list[int] = []

    class Counting(Scripted):
        def submit(self, request: Request, deliver: Deliver) -> Cancel:
            seen.append(len(self.requests))
            return super().submit(request, deliver)

    counting = Counting(engine.script)
    assert len(engines.generate(counting, [request(4)] * 3)) == 3
    counting.close()
    assert seen == [0, 1, 2]


def test_generate_of_nothing_is_nothing(engine: Scripted) -> None:
    assert engines.generate(engine, []) == []


def test_generate_gives_up_on_the_late_request_only(engine: Scripted) -> None:
    late, done = engines.generate(engine, [request(3, timeout_s=0.01), request(1)])
    assert isinstance(late, RequestTimeoutError)
    assert isinstance(done, Delta)
    assert engine.cancelled == [3]


def test_generate_cancels_what_is_in_flight_if_a_submit_fails(engine: Scripted) -> None:
    class Dying(Scripted):
        def submit(self, request: Request, deliver: Deliver) -> Cancel:
            if self.requests:
                raise EngineDeadError("gone")
            return super().submit(request, deliver)

    dying = Dying(engine.script)
    with pytest.raises(EngineDeadError):
        engines.generate(dying, [request(3), request(1)])
    assert dying.cancelled == [3]


async def test_agenerate_gives_what_generate_gives(engine: Scripted) -> None:
    requests = [request(1), request(2), request(4), request(3, timeout_s=0.01)]
    results = await engines.agenerate(engine, requests)
    assert [type(result) for result in results] == [Delta, CapacityError, Delta, RequestTimeoutError]
    assert results[0] == engines.generate(engine, [request(1)])[0]
    assert engine.cancelled == [3]


async def test_cancelling_agenerate_cancels_every_request(engine: Scripted) -> None:
    task = asyncio.create_task(engines.agenerate(engine, [request(3), request(3)]))
    while len(engine.requests) < 2:
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert engine.cancelled == [3, 3]


# ---------------------------------------------------------------- joined, warm


def test_joined_says_what_all_deltas_said() -> None:
    whole = engines.joined([event for event in HELLO if isinstance(event, Delta)])
    assert whole == Delta("abc", (1, 2, 3), ({1: -0.1}, {2: -0.2}), "stop", REUSE, 0.5)


class Warming(Scripted):
    """Answers every request at once; chunks that begin with 9 fail."""

    def submit(self, request: Request, deliver: Deliver) -> Cancel:
        self.requests.append(request)
        first = request.token_ids[request.prefix_len]
        done = Delta("x", (0,), finish_reason="length", reuse=Reuse(len(request.token_ids), 0, (COMPUTED,)))
        deliver(CapacityError("No room.") if first == 9 else done)
        return lambda: None


def test_warm_sends_each_chunk_with_a_token_behind_it_in_a_request_that_is_not_run() -> None:
    engine = Warming({})
    assert [id for id, _ in engines.warm(engine, [("a", [1, 2]), ("b", [3])], namespace="n")] == ["a", "b"]
    first, second = engine.requests
    assert (first.token_ids, first.segments) == ([1, 2, 0], (Segment("a", 0, 2),))
    assert (second.token_ids, second.segments) == ([3, 0], (Segment("b", 0, 1),))
    assert {r.namespace for r in engine.requests} == {"n"}
    assert all(r.warms_only for r in engine.requests)


def test_warm_puts_the_preamble_in_front() -> None:
    engine = Warming({})
    list(engines.warm(engine, [("a", [1, 2])], prefix=[5, 5, 5]))
    (sent,) = engine.requests
    assert (sent.token_ids, sent.prefix_len, sent.segments) == ([5, 5, 5, 1, 2, 0], 3, (Segment("a", 3, 2),))


def test_warm_reports_a_failed_chunk_and_goes_on() -> None:
    results = dict(engines.warm(Warming({}), [("a", [1]), ("b", [9]), ("c", [2])], batch=2))
    assert isinstance(results["b"], CapacityError)
    assert results["a"] == results["c"] == Reuse(2, 0, (COMPUTED,))


def test_warm_has_no_more_than_a_batch_in_flight_and_reads_lazily() -> None:
    taken: list[int] = []

    def chunks() -> Iterator[tuple[str, Sequence[int]]]:
        for n in range(5):
            taken.append(n)
            yield str(n), [n]

    warming = engines.warm(Warming({}), chunks(), batch=2)
    assert next(warming)[0] == "0"
    assert taken == [0, 1]
    assert next(warming)[0] == "1"
    assert taken == [0, 1, 2], "the next one is sent when the oldest is there, not when all of them are"
    assert [id for id, _ in warming] == ["2", "3", "4"]


def test_warming_that_is_given_up_cancels_what_is_in_flight(engine: Scripted) -> None:
    warming = engines.warm(engine, [("done", [4]), *((str(n), [3]) for n in range(9))], batch=4)
    assert next(warming) == ("done", REUSE)
    warming.close()
    assert engine.cancelled == [3, 3, 3]
