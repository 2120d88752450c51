"""The fake engine keeps the engine's contract and its books."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import tokenizers

from lazyrag.backend.engine import (
    PREFETCH_COUNTERS,
    TIER_COUNTERS,
    Delta,
    Event,
    Request,
    Sampling,
    generate,
    prefetch_requests,
    stream,
    warm,
)
from lazyrag.backend.fake import FakeEngine, words
from lazyrag.errors import CapacityError, ContextOverflowError, EngineDeadError, EngineError, RequestError
from lazyrag.types import COMPUTED, HBM, Reuse, Segment


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level tokenizer without merges: a token is a byte."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({byte: i for i, byte in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    folder = tmp_path_factory.mktemp("model")
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({}))
    return folder


@pytest.fixture
def engine(folder: Path) -> Iterator[FakeEngine]:
    engine = FakeEngine(folder)
    yield engine
    engine.close()


def saying(folder: Path, text: str, **settings: object) -> FakeEngine:
    return FakeEngine(folder, reply=lambda request: text, **settings)  # type: ignore[arg-type]


def run(engine: FakeEngine, *requests: Request) -> list[Delta]:
    results = generate(engine, requests)
    for result in results:
        if isinstance(result, Exception):
            raise result
    return [result for result in results if isinstance(result, Delta)]


def lazy(*parts: tuple[int, ...] | list[int], namespace: str = "", prefix: tuple[int, ...] = ()) -> Request:
    """A prompt of parts; a list is a chunk, a tuple is literal."""
    ids, segments = list(prefix), []
    for part in parts:
        if isinstance(part, list):
            segments.append(Segment("chunk", len(ids), len(part)))
        ids += part
    return Request(ids, segments, len(prefix), Sampling(max_tokens=1), namespace)


A, B = list(range(40)), list(range(100, 133))


def test_same_token_ids_get_the_same_answer(engine: FakeEngine) -> None:
    first, again, other = run(engine, Request([1, 2, 3]), lazy([1, 2], (3,)), Request([1, 2, 4]))
    sampled = Request([1, 2, 3], sampling=Sampling(max_tokens=1))
    assert first.text == words(Request([1, 2, 3]))
    assert again.text == run(engine, sampled)[0].text
    assert first.text != other.text


def test_an_answer_comes_token_by_token_and_only_the_last_delta_reports(folder: Path) -> None:
    deltas = list(stream(saying(folder, "four"), Request([1, 2])))
    assert [delta.text for delta in deltas] == ["f", "o", "u", "r"]
    assert [delta.finish_reason for delta in deltas] == [None, None, None, "stop"]
    assert [delta.reuse is None for delta in deltas] == [True, True, True, False]
    assert deltas[-1].ttft_s is not None


def test_a_character_of_several_tokens_comes_whole(folder: Path) -> None:
    deltas = list(stream(saying(folder, "a€b"), Request([1])))
    assert [delta.text for delta in deltas] == ["a", "", "", "€", "b"]


def test_max_tokens_ends_the_answer_with_length(folder: Path) -> None:
    (answer,) = run(saying(folder, "forty"), Request([1], sampling=Sampling(max_tokens=3)))
    assert (answer.text, len(answer.token_ids), answer.finish_reason) == ("for", 3, "length")


def test_an_answer_that_just_fits_ends_with_stop(folder: Path) -> None:
    (answer,) = run(saying(folder, "for"), Request([1], sampling=Sampling(max_tokens=3)))
    assert (answer.text, answer.finish_reason) == ("for", "stop")


def test_ignore_eos_generates_exactly_max_tokens(folder: Path) -> None:
    (answer,) = run(saying(folder, "ab"), Request([1], sampling=Sampling(max_tokens=5, ignore_eos=True)))
    assert (answer.text, answer.finish_reason) == ("ababa", "length")


def test_the_first_stop_text_ends_the_answer_and_is_never_shown(folder: Path) -> None:
    engine = saying(folder, "one. two; three")
    deltas = list(stream(engine, Request([1], sampling=Sampling(stop=("; ", ". ")))))
    assert "".join(delta.text for delta in deltas) == "one"
    assert deltas[-1].finish_reason == "stop"
    assert all("." not in delta.text for delta in deltas)


def test_half_a_stop_text_at_the_end_is_shown(folder: Path) -> None:
    (answer,) = run(saying(folder, "one;"), Request([1], sampling=Sampling(stop=("; ",))))
    assert answer.text == "one;"


def test_an_empty_reply_ends_at_once(folder: Path) -> None:
    (answer,) = run(saying(folder, ""), Request([1]))
    assert (answer.text, answer.token_ids, answer.finish_reason) == ("", (), "stop")


def test_logprobs_come_if_asked_for(folder: Path) -> None:
    plain, asked = run(saying(folder, "ab"), Request([1]), Request([1], sampling=Sampling(logprobs=0)))
    assert plain.logprobs == ()
    assert [list(step) for step in asked.logprobs] == [[token] for token in asked.token_ids]


def test_a_chunk_is_computed_once_and_reused_at_any_position(engine: FakeEngine) -> None:
    first = run(engine, lazy((7,), A, (8,)))[0].reuse
    second = run(engine, lazy(B, (7, 7), A, (8,)))[0].reuse
    assert first is not None
    assert second is not None
    assert (first.sources, first.reused_tokens) == ((COMPUTED,), 0)
    assert (second.sources, second.reused_tokens) == ((COMPUTED, HBM), len(A))
    assert second.prompt_tokens == len(A) + len(B) + 3


def test_a_chunk_twice_in_a_prompt_is_computed_once(engine: FakeEngine) -> None:
    reuse = run(engine, lazy(A, (1,), A, (2,)))[0].reuse
    assert reuse is not None
    assert reuse.sources == (COMPUTED, HBM)


def test_chunks_with_equal_ids_but_other_tokens_are_not_mixed_up(engine: FakeEngine) -> None:
    run(engine, lazy(A, (1,)))
    reuse = run(engine, lazy([*A[:-1], 255], (1,)))[0].reuse
    assert reuse is not None
    assert reuse.sources == (COMPUTED,)


def test_the_head_of_a_resident_chunk_is_reused_up_to_a_block(engine: FakeEngine) -> None:
    run(engine, lazy(A, (1,)))
    whole_blocks, cut_block = run(engine, lazy(A[:32], (1,)), lazy(A[:35], (1,)))
    assert whole_blocks.reuse is not None
    assert cut_block.reuse is not None
    assert whole_blocks.reuse.sources == (HBM,)
    assert cut_block.reuse.sources == (COMPUTED,)


def test_a_segment_may_begin_inside_its_chunk(engine: FakeEngine) -> None:
    run(engine, lazy(A, (1,)))
    request = Request([*A, 1], [Segment("chunk", 16, len(A) - 16, offset=16)], sampling=Sampling(max_tokens=1))
    reuse = run(engine, request)[0].reuse
    assert reuse is not None
    assert (reuse.sources, reuse.reused_tokens) == ((HBM,), len(A) - 16)


def test_namespaces_share_nothing(engine: FakeEngine) -> None:
    run(engine, lazy(A, (1,), namespace="one"))
    other, same = run(engine, lazy(A, (1,), namespace="two"), lazy(A, (1,), namespace="one"))
    assert other.reuse is not None
    assert same.reuse is not None
    assert (other.reuse.sources, same.reuse.sources) == ((COMPUTED,), (HBM,))


def test_a_chunk_behind_another_preamble_is_another_chunk(engine: FakeEngine) -> None:
    run(engine, lazy(A, (1,), prefix=(5, 5)))
    bare, other, same = run(engine, lazy(A, (1,)), lazy(A, (1,), prefix=(6, 6)), lazy(B, (1,), A, (1,), prefix=(5, 5)))
    assert [result.reuse.sources for result in (bare, other, same) if result.reuse] == [
        (COMPUTED,),
        (COMPUTED,),
        (COMPUTED, HBM),
    ]
    assert same.reuse is not None
    assert same.reuse.reused_tokens == len(A) + 2, "the preamble is resident, too"


def test_warming_makes_chunks_resident(engine: FakeEngine) -> None:
    assert [id for id, _ in warm(engine, [("a", A), ("b", B)], batch=1)] == ["a", "b"]
    reuse = run(engine, lazy(B, (1,), A, (1,)))[0].reuse
    assert reuse is not None
    assert reuse.sources == (HBM, HBM)


def test_a_request_that_only_warms_generates_nothing(engine: FakeEngine) -> None:
    (answer,) = run(engine, replace(lazy(A, (1,)), warms_only=True))
    assert (answer.text, answer.token_ids, answer.finish_reason) == ("", (), "stop")
    assert answer.reuse == Reuse(len(A) + 1, 0, (COMPUTED,))


def test_a_request_that_fails_leaves_the_engine_to_the_others(folder: Path) -> None:
    def reply(request: Request) -> str:
        if request.sampling.seed == 1:
            raise LookupError("a secret")
        return words(request)

    engine = FakeEngine(folder, reply=reply)
    unforeseen, impossible, good = generate(
        engine,
        [
            Request([5], sampling=Sampling(seed=1)),
            Request([5], sampling=Sampling(allowed_token_ids=(1 << 40,))),
            Request([5]),
        ],
    )
    assert isinstance(unforeseen, EngineError)
    assert "LookupError" in str(unforeseen)
    assert "secret" not in str(unforeseen)
    assert isinstance(impossible, RequestError)
    assert isinstance(good, Delta)
    engine.close()


def test_stats_add_up_over_finished_requests(engine: FakeEngine) -> None:
    run(engine, lazy(A, (1,)), lazy(A, (1,)))
    prompt = 2 * (len(A) + 1)
    expected = {"requests": 2, "prompt_tokens": prompt, "reused_tokens": len(A), "hbm": 1, "disk": 0, "computed": 1}
    stats = engine.stats()
    assert stats | expected == stats
    assert {tuple(counters) for counters in stats["tiers"].values()} == {TIER_COUNTERS}
    assert tuple(stats["prefetch"]) == PREFETCH_COUNTERS


def test_a_forgotten_chunk_is_computed_again(engine: FakeEngine) -> None:
    run(engine, lazy(A, (1,)))
    engine.forget([("b", B)])
    assert run(engine, lazy(A, (1,)))[0].reuse.sources == (HBM,)
    engine.forget([("a", A)], namespace="another")
    assert run(engine, lazy(A, (1,)))[0].reuse.sources == (HBM,)
    engine.forget([("a", A)])
    assert run(engine, lazy(A, (1,)))[0].reuse.sources == (COMPUTED,)


def test_what_is_prefetched_and_pinned_is_shown(engine: FakeEngine) -> None:
    engine.prefetch([("a", A), ("b", B), ("a", A)], prefix=(7, 8), namespace="n")
    (request,) = engine.prefetched
    assert (request.namespace, request.prefix_len) == ("n", 2)
    assert [segment.num_tokens for segment in request.segments] == [len(A), len(B)]
    assert engine.stats()["prefetch"]["asked"] == 2
    engine.pin([("a", A), ("b", B)])
    engine.unpin([("b", B)])
    assert engine.pinned == {("", tuple(A))}
    engine.close()
    engine.prefetch([("a", A)])
    with pytest.raises(EngineDeadError):
        engine.pin([("a", A)])


def test_chunks_to_prefetch_are_spread_over_requests_that_fit(engine: FakeEngine) -> None:
    info = replace(engine.info, max_model_len=64, block_size=16)
    chunks = [("a", range(20)), ("b", range(1, 15)), ("c", range(30)), ("too long", range(64)), ("none", ())]
    requests = prefetch_requests(chunks, (), (), "", info)
    assert [[s.chunk_id for s in request.segments] for request in requests] == [["a", "b"], ["c"]]
    for request in requests:
        padded = sum(-(-s.num_tokens // 16) * 16 for s in request.segments)
        assert padded + 1 < info.max_model_len


def test_a_prompt_that_fills_the_context_is_refused(folder: Path) -> None:
    engine = FakeEngine(folder, max_model_len=8)
    (error,) = generate(engine, [Request([1] * 8)])
    assert isinstance(error, ContextOverflowError)


def test_generation_ends_where_the_context_ends(folder: Path) -> None:
    (answer,) = run(saying(folder, "abcdef", max_model_len=8), Request([1] * 5))
    assert (answer.text, answer.finish_reason) == ("abc", "length")


@pytest.mark.parametrize(
    "segments",
    [
        [Segment("c", 0, 4)],
        [Segment("c", 0, 2), Segment("c", 1, 2)],
        [Segment("c", 1, 2, offset=3)],
    ],
    ids=["reaches-the-end", "overlap", "offset-inside-a-block"],
)
def test_segments_that_cannot_be_are_refused(engine: FakeEngine, segments: list[Segment]) -> None:
    (error,) = generate(engine, [Request([1, 2, 3, 4], segments)])
    assert isinstance(error, RequestError)


def test_an_error_on_demand_fails_that_request_only(folder: Path) -> None:
    engine = FakeEngine(folder, error=lambda request: CapacityError("No room.") if request.token_ids[0] == 13 else None)
    failed, answered = generate(engine, [Request([13]), Request([14])])
    assert isinstance(failed, CapacityError)
    assert isinstance(answered, Delta)


def test_a_cancelled_request_falls_silent(folder: Path) -> None:
    engine = saying(folder, "a" * 100, delay_s=0.001)
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    cancel = engine.submit(Request([1]), events.put)
    events.get()
    cancel()
    run(engine, Request([2], sampling=Sampling(max_tokens=2)))
    heard = events.qsize()
    run(engine, Request([3], sampling=Sampling(max_tokens=5)))
    assert events.qsize() == heard
    assert engine.stats()["requests"] == 2


def test_requests_advance_together(folder: Path) -> None:
    """The second request gets its first token before the first one has its last."""
    engine = saying(folder, "a" * 50, delay_s=0.001)
    order: list[str] = []
    done = threading.Event()

    def deliver(name: str, event: Event) -> None:
        assert isinstance(event, Delta)
        order.append(name)
        if order.count("one") == order.count("two") == 50:
            done.set()

    engine.submit(Request([1]), lambda event: deliver("one", event))
    engine.submit(Request([2]), lambda event: deliver("two", event))
    assert done.wait(30)
    assert order.index("two") < 49


def test_closing_ends_what_is_in_flight_and_what_comes_later(folder: Path) -> None:
    engine = saying(folder, "a" * 1000, delay_s=0.001)
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    engine.submit(Request([1]), events.put)
    assert isinstance(events.get(), Delta)
    engine.close()
    engine.close()
    heard = [events.get() for _ in range(events.qsize())]
    assert isinstance(heard[-1], EngineDeadError)
    (late,) = generate(engine, [Request([1])])
    assert isinstance(late, EngineDeadError)


def test_every_request_is_kept_in_order(engine: FakeEngine) -> None:
    requests = [Request([n], sampling=Sampling(max_tokens=1)) for n in range(5)]
    run(engine, *requests)
    assert engine.requests == requests


def test_info_says_what_it_was_told(folder: Path) -> None:
    info = FakeEngine(folder, mode="exact", model="m", max_model_len=99, block_size=8).info
    assert (info.mode, info.model, info.max_model_len, info.block_size) == ("exact", "m", 99, 8)
    assert info.tokenizer == str(folder)
    assert info.fingerprint == FakeEngine(folder).info.fingerprint
