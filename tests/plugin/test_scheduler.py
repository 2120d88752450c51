"""Scenarios of the scheduler, with the synchronous and the asynchronous class, invariants checked at every step."""

from __future__ import annotations

import random

import pytest

PRE, SEP, QUESTION = range(10, 21), range(30, 35), range(40, 49)


@pytest.fixture(scope="session")
def docs(lib):
    rng = random.Random(1)
    return [lib.Chunk(tuple(rng.randrange(100, 600) for _ in range(n))) for n in (9, 16, 1, 13, 22, 4, 31)]


def test_cold_request_computes_every_chunk_once_and_itself_in_one_step(new_engine, lib, docs):
    engine = new_engine()
    (answer,) = engine.generate(lib.prompt(PRE, docs[0], SEP, docs[1], SEP, docs[2], QUESTION))
    assert answer.right
    assert answer.sources == ["computed"] * 3
    assert engine.children == 3
    assert answer.request_id in engine.steps[0]
    assert len(engine.steps[0]) == 4


def test_hot_request_computes_its_literals_only(new_engine, lib, docs):
    engine = new_engine()
    engine.generate(lib.prompt(PRE, docs[0], SEP, docs[1], QUESTION))
    first = len(engine.steps)
    (answer,) = engine.generate(lib.prompt(range(60, 70), docs[1], SEP, docs[0], QUESTION))
    assert answer.right
    assert answer.sources == ["hbm", "hbm"]
    assert engine.children == 2
    assert engine.steps[first] == {answer.request_id: 10 + len(SEP) + len(QUESTION)}
