"""65 usable blocks for eight requests at a time: preemption, eviction, requests that take turns."""

import random

import pytest
from engines import Config, Text
from oracle import Prompt, Use

from lazyrag.errors import ContextOverflowError

CONFIGS = [
    Config("tight", num_blocks=66),
    Config("tight-async-budget-48", num_blocks=66, is_async=True, budget=48),
]
pytestmark = pytest.mark.parametrize("engine", CONFIGS, ids=str, indirect=True)


@pytest.fixture
def preemptions(engine, monkeypatch):
    seen = []
    stock = engine.scheduler._preempt_request

    def counted(request, *args, **kwargs):
        seen.append(request.request_id)
        return stock(request, *args, **kwargs)

    monkeypatch.setattr(engine.scheduler, "_preempt_request", counted)
    return seen


def test_answers_stay_right_while_requests_preempt_and_evict_each_other(engine, preemptions):
    draw, text = random.Random(0), Text(7)
    chunks = [Use(text(draw.randint(1, 120))) for _ in range(30)]
    behind = [{}, {"prefix": text(19)}, {"prefix": text(32)}, {"sink": text(4)}, {"sink": text(16)}]
    for _ in range(3):
        prompts = []
        for i in range(8):
            parts = []
            for chunk in draw.choices(chunks, k=draw.randint(0, 4)):
                parts += [text(draw.randint(1, 20))] if draw.random() < 0.7 else []
                in_part = len(chunk.chunk) > 16 and draw.random() < 0.3
                parts += [chunk.chunk[:16], Use(chunk.chunk, 16, whole=True)] if in_part else [chunk]
            question = text(draw.randint(1, 50))
            prompts.append(Prompt([*parts, question], **behind[i % 5], salt=draw.choice(["", "", "tenant"])))
        engine.check(*prompts, max_tokens=50)
    assert preemptions, "the pool was meant to be too small"


def test_a_request_that_only_its_pads_make_too_long_is_answered_with_an_error(engine):
    text = Text(8)
    chunks = [part for _ in range(8) for part in (Use(text(113)), text(2))]
    (result,) = engine.generate(Prompt([*chunks, text(20)]))
    assert isinstance(result.error, ContextOverflowError)
    assert not result.token_ids
    engine.check(Prompt([text(30)]), Prompt([Use(text(40)), text(10)]))
