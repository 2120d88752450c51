"""Scenarios of the scheduler, with the synchronous and the asynchronous class, invariants checked at every step."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from lazyrag.backend import wire
from lazyrag.backend.contents import name_of, pack
from lazyrag.backend.layout import take_apart
from lazyrag.backend.plugin.pins import Budget
from lazyrag.backend.plugin.scheduler import _MOST_OVERTAKEN
from lazyrag.backend.tiers.connector import LazyRAGConnector
from lazyrag.errors import CapacityError, ContextOverflowError, InputError, RequestError, UnknownContentError

PRE, SEP, QUESTION, OTHER = range(10, 21), range(30, 35), range(40, 49), range(60, 71)
PREAMBLE, ALIGNED_PREAMBLE = range(500, 507), range(510, 518)
BEHIND = {"lazy": {}, "sink": {"sink": PREAMBLE}, "prefix": {"prefix": PREAMBLE}}
"""What a mode's chunks are computed behind."""


@pytest.fixture(scope="session")
def docs(lib):
    rng = random.Random(1)
    return [lib.Chunk(tuple(rng.randrange(100, 500) for _ in range(n))) for n in (9, 16, 1, 13, 22, 4, 31)]


# ---------------------------------------------------------------- cold and hot


def test_a_cold_request_and_its_children_run_in_one_step(new_engine, lib, docs):
    engine = new_engine()
    (answer,) = engine.generate(lib.prompt(PRE, docs[0], SEP, docs[1], SEP, docs[2], QUESTION))
    assert answer.right
    assert answer.sources == ["computed"] * 3
    assert answer.report["children_computed"] == 3
    assert engine.children == 3
    assert answer.request_id in engine.steps[0]
    assert len(engine.steps[0]) == 4


def test_a_hot_request_computes_its_literals_only(new_engine, lib, docs):
    engine = new_engine()
    engine.generate(lib.prompt(PRE, docs[0], SEP, docs[1], QUESTION))
    first = len(engine.steps)
    (answer,) = engine.generate(lib.prompt(OTHER, docs[1], SEP, docs[0], QUESTION))
    assert answer.right
    assert answer.sources == ["hbm", "hbm"]
    assert answer.report["children_computed"] == 0
    assert engine.children == 2
    assert engine.steps[first] == {answer.request_id: len(OTHER) + len(SEP) + len(QUESTION)}


def test_the_report_counts_cached_suffix_tokens(new_engine, lib, docs):
    engine = new_engine()
    given = lib.prompt(PRE, docs[0], SEP, docs[1], QUESTION)
    first, second = engine.generate(given)[0], engine.generate(given)[0]
    assert first.report["cached_suffix_tokens"] == 0
    assert first.report["preamble"] == ""
    assert second.report["cached_suffix_tokens"] == (len(PRE) + len(SEP) + len(QUESTION) - 1) // lib.BLOCK * lib.BLOCK
    assert second.token_ids == first.token_ids


def test_mixed_sources_are_told_apart(new_engine, lib, docs):
    engine = new_engine()
    engine.generate(lib.prompt(docs[1], QUESTION))
    (answer,) = engine.generate(lib.prompt(docs[0], docs[1], docs[2], QUESTION))
    assert answer.right
    assert answer.sources == ["computed", "hbm", "computed"]


def test_shapes_of_prompts(new_engine, lib, docs):
    one = range(90, 91)
    engine = new_engine()
    shapes = [
        lib.prompt(docs[0], docs[1], docs[2], QUESTION),
        lib.prompt(docs[3], docs[3], QUESTION),
        lib.prompt(docs[3], SEP, docs[3], docs[3], one),
        lib.prompt(one, docs[0], one, docs[1], one),
        lib.prompt(docs[1], QUESTION),
        lib.prompt(docs[5], docs[2], docs[5], one),
        lib.prompt(PRE, QUESTION),
    ]
    assert all(answer.right for answer in engine.generate(*shapes))
    assert all(answer.right for given in shapes for answer in engine.generate(given))
    assert engine.children == 5


def test_an_aligned_first_chunk_shares_blocks_with_ordinary_prompts_in_both_directions(new_engine, lib, docs):
    engine = new_engine()
    aligned, text = docs[1], tuple(range(200, 212))
    engine.generate(lib.prompt(aligned, text, docs[0], QUESTION))
    first = len(engine.steps)
    (ordinary,) = engine.generate(lib.prompt(aligned.tokens + text + tuple(OTHER)))
    assert ordinary.right
    assert engine.steps[first] == {ordinary.request_id: len(OTHER)}
    engine.generate(lib.prompt((*docs[4].tokens, 5, 6)))
    (lazy,) = engine.generate(lib.prompt(lib.Chunk(docs[4].tokens[:20]), QUESTION))
    assert lazy.right
    assert lazy.sources == ["hbm"]


def test_a_padded_chunk_is_not_the_prompt_with_its_pads_spelled_out(new_engine, lib, docs):
    engine = new_engine()
    pads = (1,) * (-len(docs[0].tokens) % lib.BLOCK)
    answers = [
        engine.generate(lib.prompt(docs[0], QUESTION))[0],
        engine.generate(lib.prompt(lib.Chunk(docs[0].tokens + pads), QUESTION))[0],
        engine.generate(lib.prompt(docs[0].tokens + pads + tuple(QUESTION)))[0],
    ]
    assert all(answer.right for answer in answers)
    assert answers[1].sources == ["computed"]


def test_a_later_turn_reuses_text_and_answer_of_the_earlier_one(new_engine, lib, docs):
    engine = new_engine()
    first = engine.generate(lib.prompt(docs[0], PRE, QUESTION), max_tokens=12)[0]
    said = (*PRE, *QUESTION, *first.token_ids)
    (second,) = engine.generate(lib.prompt(docs[0], said, docs[3], OTHER))
    assert second.right
    assert second.report["cached_suffix_tokens"] == (len(said) - 1) // lib.BLOCK * lib.BLOCK


# ---------------------------------------------------------------- parts of chunks


def test_a_segment_may_begin_at_a_later_block_of_its_chunk(new_engine, lib, docs):
    engine = new_engine()
    part = lib.Chunk(docs[4].tokens, offset=8)
    cold, hot = engine.generate(lib.prompt(PRE, part, QUESTION)), engine.generate(lib.prompt(OTHER, part, SEP))
    assert cold[0].right
    assert cold[0].sources == ["computed"]
    assert hot[0].right
    assert hot[0].sources == ["hbm"]
    (whole,) = engine.generate(lib.prompt(SEP, docs[4], QUESTION))
    assert whole.right
    assert whole.sources == ["hbm"]
    assert engine.children == 1


def test_a_segment_that_ends_at_a_block_shares_the_chunks_blocks(new_engine, lib, docs):
    engine = new_engine()
    engine.generate(lib.prompt(docs[6], QUESTION))
    (answer,) = engine.generate(
        lib.prompt(PRE, lib.Chunk(docs[6].tokens, end=20), SEP, lib.Chunk(docs[6].tokens, offset=4, end=12), QUESTION)
    )
    assert answer.right
    assert answer.sources == ["hbm", "hbm"]


def test_a_segment_that_ends_inside_a_block_is_computed_from_there(new_engine, lib, docs):
    engine = new_engine()
    engine.generate(lib.prompt(docs[6], QUESTION))
    first = len(engine.steps)
    (answer,) = engine.generate(lib.prompt(PRE, lib.Chunk(docs[6].tokens, end=22), QUESTION))
    assert answer.right
    assert answer.sources == ["computed"]
    assert sorted(engine.steps[first].values()) == [lib.BLOCK, len(PRE) + len(QUESTION)]


# ---------------------------------------------------------------- preamble


@pytest.mark.parametrize("preamble", [PREAMBLE, ALIGNED_PREAMBLE], ids=["padded", "aligned"])
def test_chunks_behind_a_preamble(new_engine, lib, docs, preamble):
    engine = new_engine()

    def given(*parts):
        return lib.prompt(*parts, prefix=preamble)

    (cold,) = engine.generate(given(PRE, docs[0], SEP, docs[1], SEP, docs[2], QUESTION))
    assert cold.right
    assert (cold.sources, cold.report["preamble"]) == (["computed"] * 3, "computed")
    assert engine.children == 4
    assert cold.request_id in engine.steps[0]
    (hot,) = engine.generate(given(OTHER, docs[1], QUESTION))
    assert (hot.sources, hot.report["preamble"]) == (["hbm"], "hbm")
    shapes = [
        given(PRE, docs[2], SEP, docs[0], QUESTION),
        given(docs[0], docs[1], QUESTION),
        given(docs[3], SEP, docs[3], QUESTION),
        given(PRE, lib.Chunk(docs[1].tokens, offset=4, end=11), QUESTION),
        given(QUESTION),
        lib.prompt((*preamble, *docs[0].tokens, *QUESTION)),
        lib.prompt(docs[0], QUESTION),
    ]
    assert all(answer.right for answer in engine.generate(*shapes))
    assert all(answer.right for given in shapes for answer in engine.generate(given))


def test_a_waiting_child_gets_its_preamble_again(new_engine, lib, docs):
    engine = new_engine(max_num_seqs=1)
    request_id = engine.add(lib.prompt(docs[6], QUESTION, prefix=PREAMBLE))
    engine.step()  # one at a time: the preamble's child runs, the chunk's child waits for it
    assert engine.stats["children_in_flight"] >= 1
    while not engine.scheduler.reset_prefix_cache():
        engine.step()
    engine.run()
    assert engine.answer(request_id).right
    assert engine.stats["children_in_flight"] == 0


# ---------------------------------------------------------------- sharing


def test_requests_in_flight_share_children(new_engine, lib, docs):
    engine = new_engine()
    answers = engine.generate(
        lib.prompt(PRE, docs[0], SEP, docs[1], QUESTION),
        lib.prompt(OTHER, docs[1], SEP, docs[3], QUESTION),
        lib.prompt(docs[3], docs[0], QUESTION),
    )
    assert all(answer.right for answer in answers)
    assert engine.children == 3
    assert [answer.report["children_computed"] for answer in answers] == [2, 1, 0]
    assert [answer.sources for answer in answers] == [["computed", "computed"], ["hbm", "computed"], ["hbm", "hbm"]]
    assert engine.finished == {answer.request_id for answer in answers}


@pytest.mark.parametrize("steps", range(5))
@pytest.mark.parametrize("loads", [False, True], ids=["computes", "loads"])
def test_when_a_second_request_comes_makes_no_difference_to_its_report(
    new_engine, new_loading_engine, lib, docs, loads, steps
):
    engine = (new_loading_engine if loads else new_engine)(budget=8)
    given = lib.prompt(PRE, docs[0], SEP, docs[4], QUESTION, prefix=PREAMBLE)
    first = engine.add(given)
    for _ in range(steps):
        engine.step()
    second = engine.add(lib.prompt(OTHER, docs[4], docs[0], QUESTION, prefix=PREAMBLE))
    engine.run()
    made, shared = engine.answer(first), engine.answer(second)
    assert made.right
    assert shared.right
    source = "disk" if loads else "computed"
    assert (made.report["preamble"], made.sources) == (source, [source] * 2)
    assert (shared.report["preamble"], shared.sources) == ("hbm", ["hbm"] * 2)


@pytest.mark.parametrize("mode", ["lazy", "sink", "prefix"])
def test_salts_never_share(new_engine, lib, docs, mode):
    engine = new_engine()
    behind = BEHIND[mode]
    for salt in (None, "x", "y"):
        before = engine.children
        (answer,) = engine.generate(lib.prompt(PRE, docs[0], SEP, docs[1], QUESTION, **behind, salt=salt))
        assert answer.right
        assert answer.sources == ["computed", "computed"]
        assert engine.children - before == 2 + bool(behind)
    (answer,) = engine.generate(lib.prompt(OTHER, docs[1], QUESTION, **behind, salt="x"))
    assert answer.sources == ["hbm"]


def test_adapters_never_share(new_engine, lib, docs):
    engine = new_engine()
    for lora in (None, "one", "two"):
        (answer,) = engine.generate(lib.prompt(PRE, docs[0], QUESTION, lora=lora))
        assert answer.right
        assert answer.sources == ["computed"]


# ---------------------------------------------------------------- loads


@pytest.fixture
def new_loading_engine(new_engine, lib, tmp_path, monkeypatch):
    """A factory of engines whose connector claims to have every chunk; the runner loads, or fails to.

    With `some`, it has not those whose key begins with a digit below 5.
    """

    def claims(self, request, num_computed_tokens):
        child = (request.sampling_params.extra_args or {}).get(wire.CHILD)
        if not request.request_id.startswith(wire.CHILD_PREFIX) or not child["may_load"]:
            return 0, False
        if has_some and child["key"][0] in "01234":
            return 0, False
        end = child["first_token"] - (-child["num_tokens"] // lib.BLOCK * lib.BLOCK)
        return end - num_computed_tokens, end > num_computed_tokens

    monkeypatch.setattr(LazyRAGConnector, "get_num_new_matched_tokens", claims)
    transfer = lib.KVTransferConfig(
        kv_connector="LazyRAGConnector",
        kv_connector_module_path="lazyrag.backend.tiers.connector",
        kv_role="kv_both",
        kv_connector_extra_config={"root": str(tmp_path), "fingerprint": "0" * 64},
    )
    has_some = False

    def make(*, some=False, **options):
        nonlocal has_some
        has_some = some
        return new_engine(kv_transfer_config=transfer, **options)

    return make


@pytest.mark.parametrize("mode", ["lazy", "sink", "prefix"])
def test_loaded_chunks_are_reported_and_not_computed(new_loading_engine, lib, docs, mode):
    engine = new_loading_engine()
    behind = BEHIND[mode]
    (answer,) = engine.generate(lib.prompt(PRE, docs[0], SEP, docs[1], docs[6], QUESTION, **behind))
    assert answer.right
    assert answer.sources == ["disk"] * 3
    assert answer.report["children_loaded"] == engine.stats["children_loaded"] == 3 + bool(behind)
    assert engine.stats["children_computed"] == engine.stats["fail_safe"] == 0
    assert {request_id for step in engine.steps for request_id in step} == {answer.request_id}


def test_pads_that_were_not_loaded_are_never_read_as_text(new_loading_engine, lib, docs):
    engine = new_loading_engine()
    pads = (1,) * (-len(docs[0].tokens) % lib.BLOCK)
    assert engine.generate(lib.prompt(docs[0], QUESTION))[0].sources == ["disk"]
    spelled_out = docs[0].tokens + pads
    answers = engine.generate(lib.prompt(spelled_out + tuple(QUESTION)), lib.prompt(lib.Chunk(spelled_out), QUESTION))
    assert all(answer.right for answer in answers)


@pytest.mark.parametrize("mode", ["lazy", "sink", "prefix"])
def test_a_chunk_whose_loads_always_fail_is_computed(new_loading_engine, lib, docs, mode):
    engine = new_loading_engine()
    engine.runner.loads_fail = True
    behind = BEHIND[mode]
    answers = engine.generate(
        lib.prompt(PRE, docs[0], SEP, docs[6], QUESTION, **behind),
        lib.prompt(docs[6], OTHER, **behind),
        lib.prompt(docs[6].tokens[:20], QUESTION),
    )
    assert all(answer.right for answer in answers)
    assert answers[0].sources == ["computed", "computed"]
    assert engine.stats["loads_failed"] == engine.stats["children_computed"] == 2 + bool(behind)
    assert engine.stats["children_loaded"] == 0


@pytest.mark.parametrize("mode", ["lazy", "sink", "prefix"])
@pytest.mark.parametrize("seed", range(3))
def test_random_traffic_with_loads_that_fail_now_and_then(new_loading_engine, lib, docs, mode, seed):
    rng = random.Random(seed)
    engine = new_loading_engine(num_blocks=44, max_num_seqs=rng.choice([2, 5, 12]), budget=32)
    alive, gone = [], set()
    for _ in range(60):
        engine.runner.loads_fail = rng.random() < 0.3
        if rng.random() < 0.5:
            alive.append(engine.add(random_prompt(rng, lib, docs, mode), max_tokens=rng.randint(1, 25)))
        if alive and rng.random() < 0.08:
            gone.add(rng.choice(alive))
            engine.abort(max(gone))
        engine.step()
    engine.run()
    for request_id in set(alive) - gone:
        answer = engine.answer(request_id)
        assert answer.right or isinstance(answer.error, CapacityError)
    assert engine.stats["fail_safe"] == 0


def test_a_load_that_others_could_see_stops_the_engine(new_loading_engine, lib, docs, monkeypatch):
    engine = new_loading_engine()
    asked = LazyRAGConnector.get_num_new_matched_tokens
    monkeypatch.setattr(
        LazyRAGConnector, "get_num_new_matched_tokens", lambda self, *args: (asked(self, *args)[0] - lib.BLOCK, False)
    )
    with pytest.raises(RuntimeError, match="asynchronous load"):
        engine.generate(lib.prompt(docs[6], QUESTION))


# ---------------------------------------------------------------- pressure


def test_chunked_prefill_of_children_and_parents(new_engine, lib, docs):
    engine = new_engine(budget=8)
    answers = engine.generate(
        lib.prompt(PRE, docs[6], SEP, docs[4], QUESTION), lib.prompt(OTHER), lib.prompt(docs[4], OTHER)
    )
    assert all(answer.right for answer in answers)
    assert engine.children == 2


def test_an_evicted_block_is_computed_again_and_never_by_the_request_itself(new_engine, lib, docs):
    engine = new_engine()
    given = lib.prompt(PRE, docs[0], SEP, docs[6], QUESTION)
    engine.generate(given)
    pool = engine.scheduler.kv_cache_manager.block_pool
    cached = [block.block_id for block in pool.blocks if block.block_hash is not None]
    for victim in cached:
        pool.evict_blocks({victim})
        (answer,) = engine.generate(given)
        assert answer.right
    assert engine.stats["fail_safe"] == 0


def test_a_partial_hit_is_refused_even_if_the_gate_fails(new_engine, lib, docs, monkeypatch):
    engine = new_engine()
    monkeypatch.setattr(engine.scheduler, "may_run", lambda request: True)
    monkeypatch.setattr(engine.scheduler, "_spawn", lambda: None)
    (answer,) = engine.generate(lib.prompt(PRE, docs[0], QUESTION))
    assert isinstance(answer.error, CapacityError)
    assert engine.stats["fail_safe"] > 0
    assert not any(engine.steps)


def test_requests_that_fit_one_by_one_take_turns(new_engine, lib, docs):
    engine = new_engine(num_blocks=32)
    answers = engine.generate(
        *(lib.prompt(range(100 * i, 100 * i + 9), docs[i], SEP, docs[6], docs[4], QUESTION) for i in (0, 1, 3, 5)),
        lib.prompt(range(300, 340)),
        max_tokens=15,
    )
    assert all(answer.right for answer in answers)
    assert all(answer.finish_reason == "length" for answer in answers)


def test_a_request_larger_than_the_pool_gets_an_error_and_the_others_go_on(new_engine, lib, docs):
    engine = new_engine(num_blocks=14)
    large = engine.add(lib.prompt(PRE, docs[6], docs[4], QUESTION))
    small = engine.add(lib.prompt(docs[0], QUESTION))
    engine.run()
    error = engine.answer(large)
    assert isinstance(error.error, CapacityError)
    assert error.finish_reason == "error"
    assert "13" in error.outputs[-1].stop_reason
    assert engine.answer(small).right


def test_an_answer_that_could_outgrow_the_pool_gets_an_error_at_once(new_engine, lib, docs):
    engine = new_engine(num_blocks=14)
    (answer,) = engine.generate(lib.prompt(docs[0], QUESTION), max_tokens=60)
    assert isinstance(answer.error, CapacityError)
    assert not any(engine.steps)
    (answer,) = engine.generate(lib.prompt(docs[0], QUESTION), max_tokens=30)
    assert answer.right


def test_a_request_stays_admitted_while_its_child_takes_blocks(new_engine, lib, docs):
    engine = new_engine(num_blocks=12, budget=6)  # it needs 8 for the chunk and 3
    request_id = engine.add(lib.prompt(docs[6], QUESTION), max_tokens=3)
    request = engine.scheduler.requests[request_id]
    while not request.num_computed_tokens:
        engine.step()
        assert request_id in engine.scheduler._admitted
    engine.run()
    assert engine.answer(request_id).right
    assert engine.children == 1


def test_a_block_that_a_running_child_was_given_is_not_asked_for_again(new_engine, lib, docs):
    engine = new_engine(num_blocks=21, budget=6)
    ids = [engine.add(lib.prompt(docs[i], QUESTION)) for i in (6, 4)]  # 11 and 9 blocks of 20
    engine.step()  # 6 tokens of a chunk: one block is full and has its hash, another one is not
    engine.scheduler._admit()
    assert list(engine.scheduler._admitted) == ids
    engine.run()
    assert all(engine.answer(request_id).right for request_id in ids)


def test_pins_keep_resident_chunks_while_others_are_computed(new_engine, lib, docs):
    engine = new_engine(num_blocks=27, budget=4)
    engine.generate(lib.prompt(docs[6], QUESTION))
    (answer,) = engine.generate(lib.prompt(docs[6], docs[4], docs[3], QUESTION))
    assert answer.right
    assert answer.sources == ["hbm", "computed", "computed"]
    assert engine.children == 3


def test_requests_are_admitted_oldest_first_as_far_as_all_of_them_fit(new_engine, lib, docs):
    engine = new_engine(num_blocks=24)
    ids = [engine.add(lib.prompt(docs[i], QUESTION)) for i in (6, 4, 3, 2)]  # 11, 9, 7 and 4 blocks of 23
    engine.scheduler._admit()
    assert list(engine.scheduler._admitted) == ids[:2]
    engine.run()
    assert all(engine.answer(request_id).right for request_id in ids)


def test_the_oldest_request_is_admitted_even_if_the_budget_were_wrong(new_engine, lib, docs, monkeypatch):
    engine = new_engine()
    monkeypatch.setattr(Budget, "take", lambda *args: False)
    answers = engine.generate(lib.prompt(docs[6], QUESTION), lib.prompt(docs[4], OTHER))
    assert all(answer.right for answer in answers)


def test_pins_do_not_keep_an_orphaned_child_from_running(new_engine, lib, docs):
    engine = new_engine(num_blocks=21, max_num_seqs=1)
    resident = lib.prompt(docs[6], docs[4], QUESTION)
    engine.generate(resident)
    running = engine.add(lib.prompt(OTHER), max_tokens=2)
    engine.step()
    gone = engine.add(lib.prompt(lib.Chunk(tuple(range(300, 330))), QUESTION))
    engine.step()
    engine.abort(gone)
    waiting = engine.add(resident)
    engine.run()
    assert engine.answer(running).right
    assert engine.answer(waiting).right


def test_pins_do_not_keep_a_loaded_orphan_from_ending(new_loading_engine, lib, docs):
    engine = new_loading_engine(num_blocks=8, max_num_seqs=1)
    resident = lib.prompt(lib.Chunk(tuple(range(100, 108))), range(1))
    engine.generate(resident)  # its chunk stays in 2 of 7 blocks
    gone = engine.add(lib.prompt(lib.Chunk(tuple(range(300, 320))), range(1)))
    engine.step()  # the chunk is loaded into the other 5
    engine.abort(gone)
    waiting = engine.add(resident)
    engine.run()
    assert engine.answer(waiting).right
    assert engine.stats["children_in_flight"] == 0


def test_pins_leave_a_begun_child_what_it_lacks(new_engine, lib, docs):
    engine = new_engine(num_blocks=8, budget=lib.BLOCK)
    resident = lib.prompt(lib.Chunk(tuple(range(100, 108))), range(1))
    engine.generate(resident)  # its chunk stays in 2 of 7 blocks
    gone = engine.add(lib.prompt(lib.Chunk(tuple(range(300, 324))), range(1)), max_tokens=1)
    engine.step()
    (child,) = engine.scheduler.running  # it needs 6
    engine.abort(gone)
    waiting = engine.add(resident)
    engine.run()
    assert engine.answer(waiting).right
    assert child.num_preemptions == 0


def test_pins_do_not_preempt_running_requests(new_engine, lib, docs):
    engine = new_engine(num_blocks=12, max_num_seqs=2)
    engine.generate(lib.prompt(docs[6], range(1)))
    running = [engine.add(lib.prompt(range(10 * i, 10 * i + lib.BLOCK)), max_tokens=6) for i in (1, 2)]
    engine.step()
    engine.add(lib.prompt(docs[6], range(1)))
    requests = [engine.scheduler.requests[request_id] for request_id in running]
    engine.run()
    assert [request.num_preemptions for request in requests] == [0, 0]


def finished_in_order(engine, ids):
    finished = []
    while engine.scheduler.has_requests():
        engine.step()
        finished += [i for i in ids if engine.answer(i).finish_reason and i not in finished]
    assert all(engine.answer(i).right for i in ids)
    return finished


@pytest.mark.parametrize("in_turn", [False, True])
def test_of_those_that_wait_for_room_who_has_the_least_to_compute_goes_first(new_engine, lib, docs, in_turn):
    engine = new_engine(num_blocks=24)
    engine.scheduler.serves_in_turn = in_turn
    engine.generate(lib.prompt(docs[2], QUESTION))
    running = engine.add(lib.prompt(range(300, 330)), max_tokens=30)
    engine.step()
    engine.step()
    first = engine.add(lib.prompt(PRE, docs[6], docs[4], QUESTION), max_tokens=1)
    later = [engine.add(lib.prompt(docs[2], range(70 + i, 75 + i)), max_tokens=1) for i in range(3)]
    order = finished_in_order(engine, (running, first, *later))
    assert order == ([running, first, *later] if in_turn else [*later, running, first])


def test_nobody_is_overtaken_more_than_a_few_times(new_engine, lib, docs):
    engine = new_engine(num_blocks=24)
    engine.generate(lib.prompt(docs[2], QUESTION))
    running = engine.add(lib.prompt(range(300, 330)), max_tokens=30)
    engine.step()
    first = engine.add(lib.prompt(PRE, docs[6], docs[4], QUESTION), max_tokens=1)
    later = [engine.add(lib.prompt(docs[2], range(i, i + 5)), max_tokens=1) for i in range(3 * _MOST_OVERTAKEN)]
    order = finished_in_order(engine, (running, first, *later))
    assert order.index(first) - (order.index(running) < order.index(first)) <= _MOST_OVERTAKEN


def test_an_ordinary_request_is_not_overtaken(new_engine, lib, docs):
    engine = new_engine(num_blocks=24)
    engine.generate(lib.prompt(docs[2], QUESTION))
    running = engine.add(lib.prompt(range(300, 330)), max_tokens=30)
    engine.step()
    first = engine.add(lib.prompt(range(400, 460)), max_tokens=1)
    later = [engine.add(lib.prompt(docs[2], range(70 + i, 75 + i)), max_tokens=1) for i in range(3)]
    order = finished_in_order(engine, (running, first, *later))
    assert order.index(first) < min(map(order.index, later))


def test_a_request_that_waits_for_its_grammar_overtakes_nobody(new_engine, lib, docs):
    engine = new_engine(num_blocks=24)
    engine.generate(lib.prompt(docs[2], QUESTION))
    running = engine.add(lib.prompt(range(300, 330)), max_tokens=30)
    engine.step()
    engine.step()
    first = engine.add(lib.prompt(PRE, docs[6], docs[4], QUESTION), max_tokens=1)
    waits = engine.add(lib.prompt(docs[2], OTHER), max_tokens=1)
    request = engine.scheduler.requests[waits]
    request.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    for _ in range(60):  # its grammar is not compiled
        engine.step()
    assert engine.answer(first).finish_reason
    assert request.num_computed_tokens == 0
    request.status = RequestStatus.WAITING
    engine.run()
    assert all(engine.answer(i).right for i in (running, first, waits))


def test_literals_count_as_what_is_to_compute(new_engine, lib, docs):
    engine = new_engine(num_blocks=30)
    engine.generate(lib.prompt(docs[2], QUESTION))
    running = engine.add(lib.prompt(range(300, 350)), max_tokens=40)
    engine.step()
    engine.step()
    first = engine.add(lib.prompt(docs[6], docs[4], [5]), max_tokens=1)  # 47 tokens to compute
    later = engine.add(lib.prompt(docs[2], range(400, 460)), max_tokens=1)  # 60
    order = finished_in_order(engine, (running, first, later))
    assert order.index(first) < order.index(later)


def test_nobody_is_overtaken_where_only_running_slots_are_short(new_engine, lib, docs):
    engine = new_engine(num_blocks=400, max_num_seqs=1)
    engine.generate(lib.prompt(docs[2], QUESTION))
    running = engine.add(lib.prompt(range(300, 330)), max_tokens=5)
    engine.step()
    later = [engine.add(lib.prompt(docs[i], QUESTION), max_tokens=1) for i in (6, 4, 3, 2, 2)]
    assert finished_in_order(engine, (running, *later)) == [running, *later]


def test_chunks_are_used_before_they_are_evicted(new_engine, lib):
    """32 requests at once, each about 5 of 16 chunks; 9 fit into the pool. In turn, some 70 chunks are computed."""

    def count_children(in_turn):
        numbers = random.Random(0)
        chunks = [lib.Chunk(tuple(numbers.choices(range(500), k=40))) for _ in range(16)]
        engine = new_engine(num_blocks=97, budget=40, max_num_seqs=32)
        engine.scheduler.serves_in_turn = in_turn
        prompts = (lib.prompt(*numbers.sample(chunks, 5), range(i, i + 4)) for i in range(32))
        assert all(answer.right for answer in engine.generate(*prompts, max_tokens=8))
        return engine.children

    assert count_children(in_turn=False) < 0.8 * count_children(in_turn=True)


def test_chunks_are_computed_while_a_grammar_is_compiled(new_engine, lib, docs):
    engine = new_engine()
    request_id = engine.add(lib.prompt(docs[0], QUESTION))
    request = engine.scheduler.requests[request_id]
    request.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    for _ in range(4):
        engine.step()
    assert engine.children == 1
    assert not request.num_computed_tokens
    request.status = RequestStatus.WAITING
    engine.run()
    assert engine.answer(request_id).right


# ---------------------------------------------------------------- aborts and resets


def test_children_that_nobody_waits_for_are_dropped_before_they_hold_blocks(new_engine, lib, docs):
    engine = new_engine(budget=8)
    gone = engine.add(lib.prompt(docs[6], docs[4], docs[3], QUESTION))
    engine.step()
    begun = [c for c in engine.scheduler._children if engine.scheduler.requests[c].num_computed_tokens]
    assert 0 < len(begun) < engine.stats["children_in_flight"]
    engine.abort(gone)
    other = engine.add(lib.prompt(docs[3], OTHER))
    engine.run()
    assert engine.answer(other).right
    assert engine.children == len(begun) + 1
    assert engine.finished == {gone, other}


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_an_aborted_parents_children_finish_unseen(new_engine, lib, docs, steps):
    engine = new_engine(budget=8)
    given = lib.prompt(PRE, docs[6], SEP, docs[4], QUESTION)
    gone = engine.add(given)
    other = engine.add(lib.prompt(docs[4], OTHER))
    for _ in range(steps):
        engine.step()
    engine.abort(gone)
    engine.run()
    assert engine.answer(other).right
    assert engine.answer(gone).finish_reason is None
    assert engine.stats["children_in_flight"] == engine.stats["lazy_in_flight"] == 0 or engine.generate(given)[0].right


def test_pins_of_an_aborted_request_go_at_once(new_engine, lib, docs):
    engine = new_engine(max_num_seqs=1)
    engine.generate(lib.prompt(docs[6], QUESTION))
    running = engine.add(lib.prompt(OTHER), max_tokens=40)
    engine.step()
    waiting = engine.add(lib.prompt(docs[6], QUESTION))
    engine.scheduler._admit()
    engine.scheduler._pins.hold(waiting, engine.scheduler.kv_cache_manager.block_pool.blocks[1:2])
    engine.abort(waiting)
    engine.scheduler._check()
    assert engine.scheduler._pins._held == {}
    engine.run()
    assert engine.answer(running).right


def test_the_prefix_cache_can_be_reset_while_requests_wait(new_engine, lib, docs):
    engine = new_engine(budget=4)
    engine.generate(lib.prompt(docs[0], QUESTION))
    ids = [engine.add(lib.prompt(docs[0], SEP, docs[6], QUESTION)), engine.add(lib.prompt(docs[0], OTHER))]
    engine.step()
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    engine.run()
    assert all(engine.answer(request_id).right for request_id in ids)


# ---------------------------------------------------------------- per-request errors


@pytest.mark.parametrize(
    ("extra", "kind", "word"),
    [
        ({"lazyrag_version": 99, "lazyrag_spans": [0, 4, 0, 4]}, InputError, "version"),
        ({"lazyrag_spans": [0, 4, 0]}, InputError, "lazyrag_spans"),
        ({"lazyrag_spans": "abc"}, InputError, "lazyrag_spans"),
        ({"lazyrag_spans": [0, 99999, 0, 0]}, InputError, "cannot be reused"),
        ({"lazyrag_spans": [4, 4, 0, 4, 2, 4, 0, 4]}, InputError, "cannot be reused"),
        ({"lazyrag_spans": [4, 4, 3, 7]}, InputError, "between two blocks"),
        ({"lazyrag_spans": [4, 3, 0, 5]}, InputError, "between two blocks"),
        ({"lazyrag_spans": [4, 4, 8, 12]}, InputError, "no part of a chunk"),
        ({"lazyrag_spans": [4, 4, 0, 99]}, InputError, "no part of a chunk"),
        ({"lazyrag_spans": [0, 4, 0, 4], "lazyrag_prefix": -1}, InputError, "lazyrag_prefix"),
        ({"lazyrag_spans": [8, 4, 0, 4], "lazyrag_prefix": 4, "lazyrag_sink": [7]}, InputError, "lazyrag_sink"),
        ({"lazyrag_spans": [8, 4, 0, 4], "lazyrag_sink": [7] * 257}, InputError, "256"),
        ({"lazyrag_spans": [8, 4, 0, 4], "lazyrag_sink": [70000]}, InputError, "vocabulary"),
        ({"lazyrag_spans": [8, 4, 0, 4], "lazyrag_sink": ["a"]}, InputError, "lazyrag_sink"),
    ],
)
def test_a_malformed_request_gets_an_error_and_the_engine_goes_on(new_engine, lib, docs, extra, kind, word):
    engine = new_engine()
    bad = engine.add(lib.prompt(range(100, 130)), extra={wire.VERSION: wire.WIRE_VERSION, **extra})
    good = engine.add(lib.prompt(docs[0], QUESTION))
    engine.run()
    answer = engine.answer(bad)
    assert isinstance(answer.error, kind)
    assert answer.finish_reason == "error"
    assert word in str(answer.error)
    assert answer.outputs[-1].stop_reason == str(answer.error)
    assert engine.answer(good).right


@pytest.mark.parametrize("options", [{"prompt_logprobs": 1}, {"skip_reading_prefix_cache": True}])
def test_an_unsupported_option_gets_an_error(new_engine, lib, docs, options):
    engine = new_engine()
    (answer,) = engine.generate(lib.prompt(docs[0], QUESTION), **options)
    assert isinstance(answer.error, RequestError)
    assert next(iter(options)) in str(answer.error)
    assert not any(engine.steps)


def test_a_reserved_id_gets_an_error(new_engine, lib, docs):
    engine = new_engine()
    bad = engine.add(lib.prompt(range(100, 130)), request_id=wire.CHILD_PREFIX + "0")
    good = engine.add(lib.prompt(docs[0], QUESTION))
    engine.run()
    assert isinstance(engine.answer(bad).error, RequestError)
    assert engine.answer(good).right


def test_a_prompt_that_padding_makes_too_long_gets_an_error(new_engine, lib, docs):
    engine = new_engine()
    fits = lib.MAX_MODEL_LEN // lib.BLOCK - 2
    given = lib.prompt(*[docs[2]] * fits, QUESTION)
    assert len(given.token_ids) < lib.MAX_MODEL_LEN
    (answer,) = engine.generate(given)
    assert isinstance(answer.error, ContextOverflowError)
    assert "pad" in str(answer.error)


def test_an_answer_ends_at_the_models_context(new_engine, lib, docs):
    engine = new_engine()
    (answer,) = engine.generate(lib.prompt(*[docs[2]] * 95, QUESTION), max_tokens=300)
    assert answer.right
    assert answer.finish_reason == "length"
    assert len(answer.token_ids) == lib.MAX_MODEL_LEN - 95 * lib.BLOCK - len(QUESTION)


def test_an_exception_while_preparing_stays_with_its_request(new_engine, lib, docs, monkeypatch):
    engine = new_engine()
    monkeypatch.setattr(engine.scheduler._requests, "_apply", lambda *args: 1 / 0)
    bad = engine.add(lib.prompt(docs[0], QUESTION))
    monkeypatch.undo()
    good = engine.add(lib.prompt(docs[0], QUESTION))
    engine.run()
    assert isinstance(engine.answer(bad).error, RequestError)
    assert engine.answer(good).right


def test_an_aborted_error_is_not_answered(new_engine, lib):
    engine = new_engine()
    bad = engine.add(lib.prompt(range(100, 130)), request_id=wire.CHILD_PREFIX + "0")
    engine.abort(bad)
    engine.run()
    assert engine.outputs[bad] == []


def test_an_error_is_not_given_to_the_next_request_with_its_id(new_engine, lib, docs):
    engine = new_engine()
    engine.add(lib.prompt(OTHER), request_id="same", extra={"lazyrag_version": 0, "lazyrag_spans": []})
    engine.abort("same")
    engine.add(lib.prompt(docs[0], QUESTION), request_id="same")
    engine.run()
    assert engine.answer("same").right


def test_an_id_may_be_used_again_at_once(new_engine, lib, docs):
    engine = new_engine()
    for given, extra in [
        (lib.prompt(docs[0], QUESTION), None),
        (lib.prompt(OTHER), None),
        (lib.prompt(OTHER), {"lazyrag_version": 0, "lazyrag_spans": []}),
        (lib.prompt(docs[1], QUESTION), None),
    ]:
        engine.add(given, request_id="same", extra=extra)
        engine.abort("same")
        engine.add(given, request_id="same", extra=extra)
        while not engine.answer("same").finish_reason:
            engine.step()
        answer = engine.answer("same")
        assert answer.right or (extra and answer.error)
    engine.run()


# ---------------------------------------------------------------- what clients send and get


def test_a_clients_layout_and_child_are_dropped(new_engine, lib):
    engine = new_engine()
    forged = {wire.LAYOUT: {"suffix_block": 1, "segments": [[0, 1, 4, 0, 0]]}, wire.CHILD: {"key": "0"}, "own": 1}
    request_id = engine.add(lib.prompt(range(100, 130)), extra=forged)
    assert engine.scheduler.requests[request_id].sampling_params.extra_args == {"own": 1}
    engine.run()
    assert engine.answer(request_id).right


def test_a_clients_sampling_params_are_left_as_they_are(new_engine, lib, docs):
    engine = new_engine()
    given = lib.prompt(docs[0], QUESTION)
    params = SamplingParams(max_tokens=2, extra_args=wire.spans_to_args(given.spans))
    before = dict(params.extra_args)
    request_id = engine.add(given)
    engine.scheduler.requests[request_id].sampling_params = params
    request, layout = engine.scheduler.requests[request_id], engine.scheduler._lazy[request_id].layout
    engine.scheduler._requests._apply(request, layout, list(given.token_ids), ["a"], [docs[0].tokens])
    assert params.extra_args == before
    engine.abort(request_id)
    engine.run()


def test_named_tokens_that_the_engine_lacks_are_asked_for_and_then_known(new_engine, lib, docs):
    engine = new_engine()
    given = lib.prompt(docs[0], OTHER, docs[1], QUESTION)
    literals, contents = take_apart(given.token_ids, given.spans, 0)

    def ask(names, sent):
        extra = wire.request_to_args(wire.WireRequest(given.spans, 0, names, sent))
        (answer,) = engine.generate(given, extra=extra, token_ids=literals)
        return answer

    packed = [pack(content) for content in contents]
    names = [name_of(data) for data in packed]
    error = ask(names, {}).error
    assert isinstance(error, UnknownContentError)
    assert "2 segments" in str(error)
    # A name is the tokens' own: other tokens under it are not believed.
    error = ask(names, {names[0]: packed[1], names[1]: packed[0][:-4]}).error
    assert isinstance(error, UnknownContentError)
    assert "1 segments" in str(error)
    # Nor are tokens that the model does not have: the engine would die of them.
    foreign = pack([600] * len(contents[0]))
    error = ask([name_of(foreign), names[1]], {"any": foreign, names[1]: packed[1]}).error
    assert isinstance(error, InputError)
    assert "600 is out of vocabulary" in str(error)
    assert ask(names, dict(zip(names, packed, strict=True))).sources == ["computed"] * 2
    assert ask(names, {}).sources == ["hbm"] * 2


def test_every_output_carries_the_report_beside_vllms_own_parameters(new_engine, lib, docs, monkeypatch):
    engine = new_engine()
    monkeypatch.setattr(engine.scheduler, "_connector_finished", lambda request: (False, {"theirs": 1}))
    lazy, ordinary = engine.generate(lib.prompt(docs[0], QUESTION), lib.prompt(OTHER))
    assert lazy.outputs[-1].kv_transfer_params["theirs"] == 1
    assert lazy.sources == ["computed"]
    assert all(wire.report_from_params(output.kv_transfer_params) for output in lazy.outputs)
    assert ordinary.outputs[-1].kv_transfer_params == {"theirs": 1}


def test_children_name_their_chunk_to_the_connector(new_engine, lib, docs):
    engine = new_engine()
    engine.add(lib.prompt(PRE, docs[0], SEP, lib.Chunk(docs[4].tokens, offset=4, end=10), QUESTION, prefix=PREAMBLE))
    engine.scheduler._admit()
    engine.scheduler._spawn()
    children = [r for i, r in engine.scheduler.requests.items() if i.startswith(wire.CHILD_PREFIX)]
    named = [request.sampling_params.extra_args[wire.CHILD] for request in children]
    spans = sorted((child["first_token"], child["num_tokens"]) for child in named)
    assert spans == [(0, len(PREAMBLE)), (8, 9), (8, 10)]
    assert len({child["key"] for child in named}) == 3
    engine.run()


def test_stats_count_what_happened(new_engine, lib, docs):
    engine = new_engine(budget=8)
    engine.generate(lib.prompt(docs[0], SEP, docs[1], QUESTION))
    engine.generate(lib.prompt(docs[1], QUESTION))
    engine.generate(lib.prompt(range(100, 130)), extra={"lazyrag_version": 0, "lazyrag_spans": []})
    stats = engine.stats
    assert (stats["requests"], stats["refused"]) == (2, 1)
    assert (stats["segments_missing"], stats["segments_resident"]) == (2, 1)
    assert (stats["children_computed"], stats["children_loaded"]) == (2, 0)


# ---------------------------------------------------------------- requests that only warm


@pytest.mark.parametrize("mode", ["lazy", "sink", "prefix"])
def test_a_request_that_only_warms_is_answered_without_being_run(new_engine, lib, docs, mode):
    engine = new_engine(budget=16)
    behind = BEHIND[mode]
    (cold,) = engine.generate(lib.prompt(docs[0], docs[6], [0], **behind), warms_only=True)
    assert cold.warmed
    assert cold.sources == ["computed", "computed"]
    assert cold.report["children_computed"] == engine.children == 2 + bool(behind)
    ran = {request_id for step in engine.steps for request_id in step}
    assert all(request_id.startswith(wire.CHILD_PREFIX) for request_id in ran)
    (again,) = engine.generate(lib.prompt(docs[6], [0], **behind), warms_only=True)
    assert again.warmed
    assert again.sources == ["hbm"]
    (hot,) = engine.generate(lib.prompt(PRE, docs[6], SEP, docs[0], QUESTION, **behind))
    assert hot.right
    assert hot.sources == ["hbm", "hbm"]
    assert len(ran) == engine.children


def test_warming_is_answered_when_the_last_token_of_the_chunk_is_computed(new_engine, lib, docs, is_async):
    engine = new_engine(budget=8)
    request_id = engine.add(lib.prompt(docs[6], [0]), warms_only=True)
    steps = -(-len(docs[6].tokens) // 8)
    for _ in range(steps - 1):
        engine.step()
    assert not engine.outputs[request_id]
    engine.step()
    assert engine.answer(request_id).warmed
    assert not engine.scheduler.has_unfinished_requests()


def test_requests_that_only_warm_share_children(new_engine, lib, docs):
    engine = new_engine()
    warmed = [engine.add(lib.prompt(docs[4], [0]), warms_only=True) for _ in range(3)]
    other = engine.add(lib.prompt(PRE, docs[4], QUESTION))
    engine.run()
    assert [engine.answer(request_id).sources for request_id in warmed] == [["computed"], ["hbm"], ["hbm"]]
    assert engine.answer(other).right
    assert engine.answer(other).sources == ["hbm"]
    assert engine.children == 1


def test_requests_that_only_warm_do_not_hold_up_others(new_engine, lib, docs):
    engine = new_engine(budget=16)
    engine.generate(lib.prompt(docs[0], QUESTION))
    engine.add(lib.prompt(docs[6], [0]), warms_only=True)
    hot = engine.add(lib.prompt(OTHER, docs[0], [5]), max_tokens=1)
    ordinary = engine.add(lib.prompt([3]), max_tokens=1)
    first = len(engine.steps)
    engine.run()
    assert {hot, ordinary} <= engine.steps[first + 1].keys() | engine.steps[first + 2].keys()
    assert engine.answer(hot).right


@pytest.mark.parametrize("steps", range(4))
def test_warming_that_is_aborted_leaves_nothing(new_engine, lib, docs, steps):
    engine = new_engine(budget=8)
    request_id = engine.add(lib.prompt(docs[6], [0], prefix=PREAMBLE), warms_only=True)
    for _ in range(steps):
        engine.step()
    engine.abort(request_id)
    engine.run()
    assert not engine.outputs[request_id]
    assert engine.stats["lazy_in_flight"] == engine.stats["children_in_flight"] == 0


@pytest.mark.parametrize("fails", [False, True])
def test_warming_loads_or_computes_what_cannot_be_loaded(new_loading_engine, lib, docs, fails):
    engine = new_loading_engine()
    engine.runner.loads_fail = fails
    answers = engine.generate(*(lib.prompt(doc, [0], prefix=PREAMBLE) for doc in docs[:3]), warms_only=True)
    assert all(answer.warmed for answer in answers)
    assert {source for answer in answers for source in answer.sources} == {"computed" if fails else "disk"}
    assert engine.stats["loads_failed"] == 4 * fails
    assert engine.generate(lib.prompt(PRE, *docs[:3], QUESTION, prefix=PREAMBLE))[0].right


def test_more_is_warmed_than_the_pool_holds(new_engine, lib):
    engine = new_engine(num_blocks=12)
    chunks = [lib.Chunk(tuple(range(start, start + 22))) for start in range(100, 450, 25)]
    answers = engine.generate(*(lib.prompt(chunk, [0], sink=PREAMBLE) for chunk in chunks), warms_only=True)
    assert all(answer.warmed for answer in answers)
    assert [answer.sources for answer in answers] == [["computed"]] * len(chunks)


def test_a_chunk_that_never_fits_is_answered_with_an_error(new_engine, lib):
    engine = new_engine(num_blocks=12)
    too_large, fits = (lib.prompt(lib.Chunk(tuple(range(100, 100 + n))), [0]) for n in (60, 30))
    answers = engine.generate(too_large, fits, warms_only=True)
    assert isinstance(answers[0].error, CapacityError)
    assert answers[1].warmed


def test_warming_without_a_chunk_is_answered(new_engine, lib):
    engine = new_engine()
    (answer,) = engine.generate(lib.prompt(QUESTION), warms_only=True)
    assert (answer.finish_reason, answer.token_ids) == ("stop", [])
    assert not any(engine.steps)


# ---------------------------------------------------------------- everything at once


def random_prompt(rng, lib, docs, mode):
    parts = []
    for doc in rng.choices(docs, k=rng.randint(0, 4)):
        if rng.random() < 0.7:
            parts.append([rng.randrange(100) for _ in range(rng.randint(1, 6))])
        offset = rng.choice([0, 0, lib.BLOCK]) if len(doc.tokens) > 2 * lib.BLOCK else 0
        end = rng.choice([None, rng.randint(offset + 1, len(doc.tokens))])
        parts.append(with_gaps(rng, lib, lib.Chunk(doc.tokens, offset, end)))
    parts.append([rng.randrange(100) for _ in range(rng.randint(1, 12))])
    behind = {} if mode == "lazy" else {mode: rng.choice([(), PREAMBLE, ALIGNED_PREAMBLE])}
    return lib.prompt(*parts, **behind, salt=rng.choice([None, None, "s"]))


def ended_otherwise(answer):
    """Without tokens: it did not fit, or was only to warm."""
    asked = answer.prompt.spans or answer.prompt.prefix
    return isinstance(answer.error, CapacityError) or (answer.warmed if asked else answer.finish_reason == "stop")


def with_gaps(rng, lib, chunk):
    """The chunk with some of its whole blocks computed in place, now and then."""
    end = len(chunk.shown)
    starts = [start for start in range(chunk.offset, end, lib.BLOCK) if rng.random() < 0.2]
    gaps = tuple((start, min(start + lib.BLOCK, end)) for start in starts)
    return replace(chunk, gaps=gaps) if rng.random() < 0.4 else chunk


@pytest.mark.parametrize("budget", [7, 64])
@pytest.mark.parametrize("mode", ["lazy", "sink", "prefix"])
@pytest.mark.parametrize("seed", range(4))
def test_random_traffic_under_pressure(new_engine, lib, docs, mode, budget, seed):
    rng = random.Random(seed)
    engine = new_engine(num_blocks=44, max_num_seqs=rng.choice([2, 5, 12]), budget=budget)
    alive, gone = [], set()
    for _ in range(60):
        if rng.random() < 0.5:
            given = random_prompt(rng, lib, docs, mode)
            if rng.random() < 0.2:
                given = lib.prompt(given.token_ids)
            alive.append(engine.add(given, max_tokens=rng.randint(1, 25), warms_only=rng.random() < 0.2))
        if alive and rng.random() < 0.08:
            gone.add(rng.choice(alive))
            engine.abort(max(gone))
        if rng.random() < 0.03:
            engine.scheduler.reset_prefix_cache()
        engine.step()
    engine.run()
    for request_id in set(alive) - gone:
        answer = engine.answer(request_id)
        assert answer.right or ended_otherwise(answer)
        assert answer.finish_reason in ("length", "stop", "error")
    assert engine.stats["fail_safe"] == 0
    assert engine.scheduler.reset_prefix_cache()


@pytest.mark.parametrize("mode", ["lazy", "sink", "prefix"])
@pytest.mark.parametrize("seed", range(40))
def test_every_request_ends_in_a_pool_of_a_few_blocks(new_loading_engine, lib, mode, seed):
    """Few tokens, so that prompts collide; loads, failing loads, aborts and resets in pools that hold one request."""
    rng = random.Random(seed)
    letters = (1, 1, 10, 11)  # 1 is the pad
    docs = [lib.Chunk(tuple(rng.choices(letters, k=rng.randint(1, 14)))) for _ in range(4)]
    prefixes = [(), tuple(rng.choices(letters, k=rng.randint(1, 6))), (10, 11, 1, 1)]
    num_blocks = rng.choice([8, 12, 20])
    settings = {"max_num_seqs": rng.choice([1, 2, 5]), "budget": rng.choice([1, 3, 7, 64])}
    engine = new_loading_engine(num_blocks=num_blocks, some=rng.random() < 0.5, **settings)
    failing, aborting = rng.choice([0, 0.3]), rng.choice([0.1, 0.3])

    def some_prompt():
        parts = []
        for doc in rng.choices(docs, k=rng.randint(0, 4)):
            parts.append(rng.choices(letters, k=rng.randint(0, 4)))
            offset = rng.choice([o for o in (0, 0, 0, 4, 8) if o < len(doc.tokens)])
            end = rng.choice([None, rng.randint(offset + 1, len(doc.tokens))])
            used = with_gaps(rng, lib, lib.Chunk(doc.tokens, offset, end))
            parts.append(doc.tokens if rng.random() < 0.3 else used)
        parts.append(rng.choices(letters, k=rng.randint(1, 6)))
        behind = {} if mode == "lazy" else {mode: rng.choice(prefixes)}
        return lib.prompt(*parts, **behind, salt=rng.choice([None, None, "s"]))

    alive, gone = [], set()
    for _ in range(60):
        engine.runner.loads_fail = rng.random() < failing
        given, max_tokens = some_prompt(), rng.randint(1, 12)
        fits = len(given.token_ids) + max_tokens <= (num_blocks - 1) * lib.BLOCK
        if rng.random() < 0.5 and (fits or given.spans or given.prefix):  # vLLM refuses other requests elsewhere
            alive.append(engine.add(given, max_tokens=max_tokens, warms_only=rng.random() < 0.3))
        if alive and rng.random() < aborting:
            gone.add(rng.choice(alive))
            engine.abort(max(gone))
        if rng.random() < 0.05:
            engine.scheduler.reset_prefix_cache()
        engine.step()
    engine.run()
    for request_id in set(alive) - gone:
        answer = engine.answer(request_id)
        assert answer.right or ended_otherwise(answer)
    assert engine.stats["fail_safe"] == 0
    assert engine.scheduler.reset_prefix_cache()


def test_ordinary_traffic_is_scheduled_as_by_vllm(new_engine, lib, is_async):
    ours = new_engine(num_blocks=30, budget=16)
    theirs = new_engine(num_blocks=30, budget=16, scheduler_class=AsyncScheduler if is_async else Scheduler)
    rng = random.Random(0)
    for _ in range(40):
        if rng.random() < 0.5:
            given = lib.prompt([rng.randrange(20) for _ in range(rng.randint(1, 40))])
            max_tokens = rng.randint(1, 20)
            for engine in (ours, theirs):
                engine.add(given, max_tokens=max_tokens)
        for engine in (ours, theirs):
            engine.step()
    for engine in (ours, theirs):
        engine.run()
    assert ours.steps == theirs.steps
    assert {i: ours.answer(i).token_ids for i in ours.outputs} == {
        i: theirs.answer(i).token_ids for i in theirs.outputs
    }
