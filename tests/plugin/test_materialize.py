"""The benchmark's copying system: its requests read their own copies, whatever the pool does meanwhile."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

from lazyrag.backend import wire
from lazyrag.backend.layout import lay_out_parts, take_apart
from lazyrag.bench.materialize import COPIES, MaterializeScheduler, groups


@pytest.fixture
def engine(model_folder, lib, make_copying):
    return make_copying(model_folder)


@pytest.fixture
def make_copying(lib):
    """Engines whose runner copies as the worker does, and then takes the request for what its prompt is."""

    def make(model_folder, num_blocks=200):
        engine = lib.Engine(
            model_folder, is_async=True, scheduler_class=MaterializeScheduler, num_blocks=num_blocks, max_num_seqs=8
        )
        runner, stock_start = engine.runner, engine.runner._start

        def start(new):
            copies = (new.sampling_params.extra_args or {}).get(COPIES)
            if copies is None:
                return stock_start(new)
            assert wire.LAYOUT not in new.sampling_params.extra_args
            for first, end in groups(copies):
                read = {
                    (target, i): runner.kv.get((source, i))
                    for source, target, _ in copies[first:end]
                    for i in range(lib.BLOCK)
                }
                runner.kv.update(read)
            engine.copied += len(copies)
            given = runner.prompts[new.req_id]
            literals, contents = take_apart(given.token_ids, given.spans, 0)
            layout, _ = lay_out_parts(literals, given.spans, contents, prefix_len=0, block_size=lib.BLOCK, pad=1)
            assert [shift for *_, shift in copies] == [s.shift for s in layout.segments for _ in range(s.num_blocks)]
            args = {wire.LAYOUT: wire.layout_to_wire(layout)}
            return stock_start(SimpleNamespace(**{**vars_of(new), "sampling_params": SimpleNamespace(extra_args=args)}))

        engine.runner._start, engine.copied = start, 0
        return engine

    return make


def vars_of(new):
    names = ("req_id", "prompt_token_ids", "lora_request", "block_ids")
    return {name: getattr(new, name) for name in names}


def tokens(seed, n):
    return random.Random(seed).choices(range(10, 500), k=n)


def test_every_use_has_blocks_of_its_own_and_reads_the_right_kv(engine, lib):
    docs = [lib.Chunk(tuple(tokens(i, 8 * (1 + i)))) for i in range(3)]
    for order in ((0, 1, 2), (2, 0, 1), (1, 2, 0)):
        (answer,) = engine.generate(lib.prompt(*(docs[i] for i in order), tokens(sum(order[:2]) * 10, 5)))
        assert answer.right
    assert engine.copied == 3 * (2 + 4 + 6)
    assert engine.stats["children_computed"] == 3


def test_requests_that_do_not_fit_together_are_served_one_by_one(make_copying, model_folder, lib):
    engine = make_copying(model_folder, num_blocks=34)
    docs = [lib.Chunk(tuple(tokens(i, 16))) for i in range(6)]
    draws = [random.Random(i).sample(docs, 3) for i in range(12)]
    answers = engine.generate(*(lib.prompt(*draw, tokens(i, 5)) for i, draw in enumerate(draws)))
    assert all(answer.right for answer in answers)


def test_nothing_is_computed_for_a_request_whose_copies_do_not_fit_beside_those_ahead(make_copying, model_folder, lib):
    """It would be evicted by the copies of those ahead, and computed once more."""
    # The documents of two requests fit, and then no copy of any.
    engine = make_copying(model_folder, num_blocks=33)
    docs = [lib.Chunk(tuple(tokens(i, 28))) for i in range(8)]
    answers = engine.generate(*(lib.prompt(*docs[2 * i : 2 * i + 2], tokens(i, 5)) for i in range(4)))
    assert all(answer.right for answer in answers)
    assert engine.stats["children_computed"] == len(docs)


def test_a_document_of_part_of_a_block_is_refused(engine, lib):
    (answer,) = engine.generate(lib.prompt(lib.Chunk(tuple(tokens(0, 10))), tokens(1, 5)))
    assert "whole blocks" in str(answer.error)


def test_copies_are_grouped_so_that_nothing_is_written_that_is_still_to_be_read():
    assert groups([(1, 5), (2, 6), (3, 7)]) == [(0, 3)]
    assert groups([(1, 5), (2, 6), (3, 1), (4, 2)]) == [(0, 2), (2, 4)]
    assert groups([(1, 5), (5, 6)]) == [(0, 1), (1, 2)]
