"""An engine that dies is started again; whoever waited for it is told."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from lazyrag.backend.engine import Deliver, Delta, Event, Request, Sampling, generate
from lazyrag.backend.fake import FakeEngine
from lazyrag.backend.server.supervisor import SupervisedEngine
from lazyrag.errors import EngineDeadError, EngineStartError

LONG = Request([5, 6, 7], sampling=Sampling(max_tokens=1000, ignore_eos=True))
SHORT = Request([5, 6, 7], sampling=Sampling(max_tokens=3))


class Starts:
    """Starts fake engines; `failures` of the starts after the first one fail."""

    def __init__(self, folder: Path, failures: int = 0) -> None:
        self.folder, self.failures = folder, failures
        self.engines: list[FakeEngine] = []
        self.attempts = 0
        self.may_start = threading.Event()
        self.may_start.set()

    def __call__(self) -> FakeEngine:
        self.attempts += 1
        assert self.may_start.wait(30)
        if self.engines and self.failures:
            self.failures -= 1
            raise EngineStartError("The engine could not start.")
        self.engines.append(FakeEngine(self.folder, delay_s=0.001))
        return self.engines[-1]


@pytest.fixture
def starts(model_folder: Callable[..., Path]) -> Starts:
    return Starts(model_folder("byte-level"))


def wait_until_alive(engine: SupervisedEngine) -> None:
    deadline = threading.Event()
    for _ in range(3000):
        if engine.alive:
            return
        deadline.wait(0.01)
    pytest.fail("the engine was not started again")


def error_of(events: queue.SimpleQueue[Event]) -> Exception:
    while True:
        event = events.get(timeout=30)
        if isinstance(event, Exception):
            return event
        assert event.finish_reason is None


def test_requests_in_flight_get_an_error_and_later_ones_an_answer(starts: Starts) -> None:
    engine = SupervisedEngine(starts)
    events: list[queue.SimpleQueue[Event]] = [queue.SimpleQueue() for _ in range(5)]
    for waiting in events:
        engine.submit(LONG, waiting.put)
    before = generate(engine, [SHORT])
    starts.engines[0].close()
    assert {type(error_of(waiting)) for waiting in events} == {EngineDeadError}
    wait_until_alive(engine)
    assert generate(engine, [SHORT])[0].text == before[0].text  # type: ignore[union-attr]
    assert (len(starts.engines), engine.restarts) == (2, 1)
    engine.close()


def test_while_there_is_no_engine_requests_are_refused_at_once(starts: Starts) -> None:
    engine = SupervisedEngine(starts)
    starts.may_start.clear()
    starts.engines[0].close()
    assert isinstance(generate(engine, [SHORT])[0], EngineDeadError)
    refused = generate(engine, [SHORT])[0]
    assert isinstance(refused, EngineDeadError)
    assert "again" in refused.fix
    assert not engine.alive
    starts.may_start.set()
    wait_until_alive(engine)
    engine.close()


def test_a_start_that_fails_is_tried_again(starts: Starts) -> None:
    starts.failures = 3
    engine = SupervisedEngine(starts, pause_s=0.001)
    starts.engines[0].close()
    generate(engine, [SHORT])
    wait_until_alive(engine)
    assert (starts.attempts, engine.restarts) == (5, 1)
    engine.close()


def test_a_closed_engine_stays_closed(starts: Starts) -> None:
    engine = SupervisedEngine(starts)
    waiting: queue.SimpleQueue[Event] = queue.SimpleQueue()
    engine.submit(LONG, waiting.put)
    engine.close()
    engine.close()
    assert isinstance(error_of(waiting), EngineDeadError)
    assert isinstance(generate(engine, [SHORT])[0], EngineDeadError)
    assert (starts.attempts, engine.alive) == (1, False)


def test_near_the_end_a_dead_engine_is_not_started_again(starts: Starts) -> None:
    engine = SupervisedEngine(starts)
    engine.stop_restarting()
    starts.engines[0].close()
    assert isinstance(generate(engine, [SHORT])[0], EngineDeadError)
    engine.close()
    assert starts.attempts == 1


def test_an_engine_that_comes_up_after_the_end_is_closed(starts: Starts) -> None:
    engine = SupervisedEngine(starts)
    starts.may_start.clear()
    starts.engines[0].close()
    generate(engine, [SHORT])
    closing = threading.Thread(target=engine.close)
    closing.start()
    starts.may_start.set()
    closing.join(30)
    assert not closing.is_alive()
    assert all(isinstance(generate(late, [SHORT])[0], EngineDeadError) for late in starts.engines)


def test_an_engine_that_dies_idle_is_started_again_before_anybody_asks(starts: Starts) -> None:
    engine = SupervisedEngine(starts, look_s=0.01)
    starts.may_start.clear()
    starts.engines[0].close()
    while engine._engine is not None:
        pass
    assert not engine.alive
    starts.may_start.set()
    wait_until_alive(engine)
    assert (engine.restarts, len(starts.engines)) == (1, 2)
    assert isinstance(generate(engine, [SHORT])[0], Delta)
    engine.close()


def test_asking_whether_an_idle_engine_lives_notices_its_death(starts: Starts) -> None:
    engine = SupervisedEngine(starts, look_s=1000)
    assert engine.alive
    starts.engines[0].close()
    assert not engine.alive
    wait_until_alive(engine)
    engine.close()


def test_a_start_that_fails_at_first_is_the_callers_error(starts: Starts) -> None:
    def fails() -> FakeEngine:
        raise EngineStartError("The engine could not start.")

    with pytest.raises(EngineStartError):
        SupervisedEngine(fails)


def test_info_and_counters_are_the_engines(starts: Starts) -> None:
    engine = SupervisedEngine(starts)
    generate(engine, [SHORT])
    assert engine.info == starts.engines[0].info
    assert engine.stats() == {**starts.engines[0].stats(), "restarts": 0}
    engine.close()


def test_cancelling_reaches_the_engine(starts: Starts) -> None:
    class Watched(FakeEngine):
        cancelled = 0

        def submit(self, request: Request, deliver: Deliver) -> Callable[[], None]:
            def cancel() -> None:
                self.cancelled += 1

            super().submit(request, deliver)
            return cancel

    watched = Watched(starts.folder)
    engine = SupervisedEngine(lambda: watched)
    engine.submit(SHORT, lambda event: None)()
    assert watched.cancelled == 1
    engine.close()
