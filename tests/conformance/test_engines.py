"""What every engine promises, run against the fake one and against vLLM."""

from __future__ import annotations

import asyncio
import gc
import json
import queue
import random
import re
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest

from lazyrag.backend import engine as engines
from lazyrag.backend.engine import Delta, Engine, Event, Request, Sampling
from lazyrag.backend.fake import FakeEngine, words
from lazyrag.errors import (
    CapacityError,
    ConfigError,
    ContextOverflowError,
    EngineDeadError,
    EngineStartError,
    RequestError,
    RequestTimeoutError,
    UnsupportedError,
)
from lazyrag.types import COMPUTED, HBM, Segment

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch"),
    # vLLM leaves one behind when it is shut down.
    pytest.mark.filterwarnings("ignore:Unclosed context:ResourceWarning"),
]

BLOCK_SIZE = 16
MAX_MODEL_LEN = 1024
NUM_BLOCKS = 63
"""That a request may need (`small_pool`); one fewer than the longest request needs."""

SHORT = Sampling(max_tokens=8, ignore_eos=True)
LONG = Sampling(max_tokens=900, ignore_eos=True)
COLOURS = ["blue", "green", "silver"]


@pytest.fixture(scope="module")
def model(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with a tokenizer."""
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=640,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_MODEL_LEN,
        initializer_range=0.15,
        bos_token_id=0,
        eos_token_id=1,
    )
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    transformers.LlamaForCausalLM(config).float().save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model_folder / name, folder)
    return folder


def fake(model_folder: Path) -> FakeEngine:
    """A fake engine that keeps to a schema and to the size of a pool, as a real one does."""

    def reply(request: Request) -> str:
        return words(request) if request.sampling.json_schema is None else json.dumps(COLOURS[1])

    def error(request: Request) -> CapacityError | None:
        end = len(request.token_ids) + request.sampling.max_tokens
        fits = end <= NUM_BLOCKS * BLOCK_SIZE or len(request.token_ids) >= MAX_MODEL_LEN
        return None if fits or not request.segments else CapacityError("No room.")

    return FakeEngine(
        model_folder, max_model_len=MAX_MODEL_LEN, block_size=BLOCK_SIZE, reply=reply, error=error, delay_s=0.001
    )


def local(model: Path, **engine_args: Any) -> Engine:
    from lazyrag.backend.local import LocalEngine

    return LocalEngine(
        str(model),
        dtype="float32",
        block_size=BLOCK_SIZE,
        kv_cache_bytes=1 << 26,
        debug=True,
        engine_args={"max_num_seqs": 8, **engine_args},
    )


@pytest.fixture(scope="module", params=["fake", pytest.param("local", marks=pytest.mark.engine)])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    if request.param == "fake":
        engine: Engine = fake(request.getfixturevalue("model_folder"))
    else:
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(str(Path(__file__).parent))  # the engine's process takes it over
            engine = local(
                request.getfixturevalue("model"),
                num_gpu_blocks_override=66,
                scheduler_cls="small_pool.SmallPoolScheduler",
            )
    yield engine
    engine.close()
    gc.collect()  # while the filter above holds


@pytest.fixture
def collected() -> Iterator[None]:
    """What an engine that did not start leaves behind is found while the filter above holds."""
    yield
    gc.collect()


class Text:
    """Random tokens, new at every call: what one test makes resident is new to all others.

    Each stands for a printable character. Behind a prompt of broken ones, vLLM shows the prompt's end in the answer.
    """

    def __init__(self) -> None:
        self._random = random.Random(0)

    def __call__(self, num_tokens: int) -> list[int]:
        return self._random.choices(range(3, 90), k=num_tokens)


text = Text()


def lazy(*parts: Sequence[int], sampling: Sampling = SHORT, namespace: str = "") -> Request:
    """A request of chunks (tuples) and literal tokens (lists)."""
    ids: list[int] = []
    segments = []
    for part in parts:
        if isinstance(part, tuple):
            segments.append(Segment("", len(ids), len(part)))
        ids += part
    return Request(ids, segments, sampling=sampling, namespace=namespace)


def run(engine: Engine, *requests: Request) -> list[Delta]:
    """Run requests together; none may fail."""
    results = engines.generate(engine, requests)
    for result in results:
        assert isinstance(result, Delta), result
    return [result for result in results if isinstance(result, Delta)]


def error_of(engine: Engine, request: Request) -> Exception:
    (result,) = engines.generate(engine, [request])
    assert isinstance(result, Exception)
    return result


def sources(answer: Delta) -> tuple[str, ...]:
    assert answer.reuse is not None
    return answer.reuse.sources


# ---------------------------------------------------------------- deltas


def test_only_the_last_delta_says_how_it_ended(engine: Engine) -> None:
    prompt = text(30)
    *others, last = engines.stream(engine, Request(prompt, sampling=SHORT))
    assert others
    assert {(d.finish_reason, d.reuse, d.ttft_s) for d in others} == {(None, None, None)}
    assert last.finish_reason == "length"
    assert last.reuse is not None
    assert last.reuse.prompt_tokens == len(prompt)
    assert last.ttft_s is not None
    assert last.ttft_s > 0
    assert sum(len(d.token_ids) for d in [*others, last]) == SHORT.max_tokens


async def test_every_way_of_asking_gives_the_same_tokens(engine: Engine) -> None:
    request = Request(text(30), sampling=SHORT)
    (expected,) = run(engine, request)
    assert expected.text
    streamed = list(engines.stream(engine, request))
    astreamed = [delta async for delta in engines.astream(engine, request)]
    (gathered,) = await engines.agenerate(engine, [request])
    assert isinstance(gathered, Delta)
    for answer in (engines.joined(streamed), engines.joined(astreamed), gathered):
        assert (answer.token_ids, answer.text) == (expected.token_ids, expected.text)


def test_a_batch_keeps_its_order(engine: Engine) -> None:
    requests = [Request(text(20 + n), sampling=replace(SHORT, max_tokens=n + 1)) for n in range(12)]
    together = run(engine, *requests)
    assert [len(answer.token_ids) for answer in together] == list(range(1, 13))
    alone = [run(engine, request)[0] for request in requests[::4]]
    assert [answer.token_ids for answer in together[::4]] == [answer.token_ids for answer in alone]


# ---------------------------------------------------------------- sampling


def test_a_stop_text_ends_the_answer_and_is_not_part_of_it(engine: Engine) -> None:
    request = Request(text(30), sampling=replace(SHORT, max_tokens=40))
    (whole,) = run(engine, request)
    stop = re.search(r"(?<=.)[a-z]{3,}", whole.text, re.DOTALL)
    assert stop is not None
    (stopped,) = run(engine, replace(request, sampling=replace(request.sampling, stop=("never", stop[0]))))
    assert (stopped.text, stopped.finish_reason) == (whole.text[: whole.text.index(stop[0])], "stop")
    assert stopped.reuse is not None


def test_a_stop_text_ends_a_request_with_chunks_and_its_report_comes_all_the_same(engine: Engine) -> None:
    request = lazy(tuple(text(40)), text(10), sampling=replace(SHORT, max_tokens=40))
    (whole,) = run(engine, request)
    stop = re.search(r"(?<=.)[a-z]{3,}", whole.text, re.DOTALL)
    assert stop is not None
    (stopped,) = run(engine, replace(request, sampling=replace(request.sampling, stop=(stop[0],))))
    assert (stopped.finish_reason, sources(stopped)) == ("stop", (HBM,))


def test_each_token_has_its_log_probability_if_asked_for(engine: Engine) -> None:
    plain, asked = run(engine, *(Request(text(30), sampling=replace(SHORT, logprobs=n)) for n in (None, 2)))
    assert plain.logprobs == ()
    assert len(asked.logprobs) == len(asked.token_ids)
    for token, logprobs in zip(asked.token_ids, asked.logprobs, strict=True):
        assert logprobs[token] == max(logprobs.values()) <= 0


def test_a_token_that_is_forced_is_as_likely_as_it_would_have_been(engine: Engine) -> None:
    request = lazy(tuple(text(40)), text(10), sampling=replace(SHORT, max_tokens=1, logprobs=3))
    (free,) = run(engine, request)
    token, logprob = min(free.logprobs[0].items(), key=itemgetter(1))
    forced = replace(request.sampling, logprobs=0, allowed_token_ids=(token,))
    (answer,) = run(engine, replace(request, sampling=forced))
    assert answer.token_ids == (token,)
    assert answer.logprobs[0][token] == pytest.approx(logprob, abs=1e-4)


def test_a_seed_makes_sampling_repeatable(engine: Engine) -> None:
    request = Request(text(30), sampling=replace(SHORT, temperature=1.0, top_p=0.9, top_k=50, seed=7))
    one, two = (run(engine, request)[0] for _ in range(2))
    assert one.token_ids == two.token_ids


def test_an_answer_keeps_to_its_schema(engine: Engine) -> None:
    sampling = Sampling(max_tokens=40, json_schema={"enum": COLOURS})
    for request in (Request(text(30), sampling=sampling), lazy(tuple(text(40)), text(10), sampling=sampling)):
        (answer,) = run(engine, request)
        assert json.loads(answer.text) in COLOURS
        assert answer.finish_reason == "stop"


# ---------------------------------------------------------------- reuse


def test_chunks_are_computed_once_and_reused_in_any_order(engine: Engine) -> None:
    a, b, c = (tuple(text(n)) for n in (37, 64, 20))
    cold, hot = (run(engine, lazy(*parts))[0] for parts in ((a, text(3), b, text(9)), (text(2), b, a, c, text(9))))
    assert sources(cold) == (COMPUTED, COMPUTED)
    assert sources(hot) == (HBM, HBM, COMPUTED)
    assert cold.reuse is not None
    assert hot.reuse is not None
    assert (cold.reuse.reused_tokens, cold.reuse.prompt_tokens) == (0, 37 + 3 + 64 + 9)
    assert (hot.reuse.reused_tokens, hot.reuse.computed_tokens) == (37 + 64, 2 + 20 + 9)


def test_requests_that_come_together_share_what_they_compute(engine: Engine) -> None:
    chunk = tuple(text(50))
    answers = run(engine, *(lazy(chunk, text(9)) for _ in range(3)))
    assert sources(answers[0]) == (COMPUTED,)
    assert sources(run(engine, lazy(chunk, text(5)))[0]) == (HBM,)


def test_namespaces_never_share(engine: Engine) -> None:
    chunk, question = tuple(text(50)), text(9)
    answers = [run(engine, lazy(chunk, question, namespace=name))[0] for name in ("", "tenant", "tenant", "other", "")]
    assert [sources(answer) for answer in answers] == [(COMPUTED,), (COMPUTED,), (HBM,), (COMPUTED,), (HBM,)]
    assert len({answer.token_ids for answer in answers}) == 1


def test_warmed_chunks_are_resident(engine: Engine) -> None:
    chunks = [(str(n), text(30 + n)) for n in range(3)]
    assert [id for id, _ in engines.warm(engine, chunks)] == ["0", "1", "2"]
    assert sources(run(engine, lazy(*(tuple(ids) for _, ids in chunks), text(5)))[0]) == (HBM,) * 3


def test_a_request_that_only_warms_is_answered_without_a_token(engine: Engine) -> None:
    request = replace(lazy(tuple(text(40)), text(1)), warms_only=True)
    cold, warm = run(engine, request, request)
    assert (cold.text, cold.token_ids, cold.finish_reason) == ("", (), "stop")
    assert {sources(cold), sources(warm)} == {(COMPUTED,), (HBM,)}


def test_stats_add_up_over_finished_requests(engine: Engine) -> None:
    before = engine.stats()
    chunk = tuple(text(50))
    for _ in range(2):
        run(engine, lazy(chunk, text(9)))
    after = engine.stats()
    grown = {name: after[name] - before[name] for name in after if isinstance(after[name], int)}
    counted = {"requests": 2, "prompt_tokens": 118, "reused_tokens": 50, "hbm": 1, "host": 0, "disk": 0, "computed": 1}
    assert grown == counted


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize("num_chunk_tokens", [0, 600], ids=["ordinary", "lazy"])
def test_a_prompt_longer_than_the_context_is_refused(engine: Engine, num_chunk_tokens: int) -> None:
    parts = [tuple(text(num_chunk_tokens))] if num_chunk_tokens else []
    error = error_of(engine, lazy(*parts, text(MAX_MODEL_LEN - num_chunk_tokens)))
    assert isinstance(error, ContextOverflowError)
    assert str(MAX_MODEL_LEN) in str(error)


def test_a_request_that_never_fits_into_the_pool_is_refused_and_others_go_on(engine: Engine) -> None:
    too_big = lazy(tuple(text(110)), text(9), sampling=LONG)
    failed, answered = engines.generate(engine, [too_big, lazy(tuple(text(100)), text(9))])
    assert isinstance(failed, CapacityError)
    assert isinstance(answered, Delta)


@pytest.mark.parametrize(
    "segments",
    [[Segment("", 0, 40)], [Segment("", 0, 20), Segment("", 10, 20)], [Segment("", 4, 20, offset=3)]],
    ids=["reaches-the-end", "overlap", "offset-inside-a-block"],
)
def test_segments_that_cannot_be_are_refused(engine: Engine, segments: list[Segment]) -> None:
    error = error_of(engine, Request(text(40), segments, sampling=SHORT))
    assert isinstance(error, RequestError)
    run(engine, lazy(tuple(text(20)), text(5)))


# ---------------------------------------------------------------- ending early


def test_a_cancelled_request_falls_silent_and_is_not_counted(engine: Engine) -> None:
    before = engine.stats()["requests"]
    heard: list[queue.SimpleQueue[Event]] = [queue.SimpleQueue() for _ in range(3)]
    cancels = [engine.submit(Request(text(200), sampling=replace(LONG, max_tokens=700)), q.put) for q in heard]
    assert isinstance(heard[0].get(timeout=60), Delta)
    for cancel in cancels:
        cancel()
        cancel()
    # What needs nearly the whole pool runs only if theirs is free.
    run(engine, lazy(tuple(text(700)), text(9), sampling=replace(SHORT, max_tokens=100)))
    sizes = [q.qsize() for q in heard]
    run(engine, Request(text(20), sampling=replace(SHORT, max_tokens=50)))
    assert [q.qsize() for q in heard] == sizes
    assert engine.stats()["requests"] == before + 2


async def test_a_request_past_its_deadline_is_cancelled_and_others_go_on(engine: Engine) -> None:
    late = Request(text(30), sampling=replace(LONG, timeout_s=0.05))
    failed, answered = engines.generate(engine, [late, Request(text(30), sampling=SHORT)])
    assert isinstance(failed, RequestTimeoutError)
    assert isinstance(answered, Delta)
    failed, answered = await engines.agenerate(engine, [late, Request(text(30), sampling=SHORT)])
    assert isinstance(failed, RequestTimeoutError)
    assert isinstance(answered, Delta)


async def test_closing_a_stream_early_leaves_the_engine_alive(engine: Engine) -> None:
    stream = engines.astream(engine, Request(text(30), sampling=LONG))
    await anext(stream)
    await stream.aclose()
    (answer,) = await engines.agenerate(engine, [Request(text(30), sampling=SHORT)])
    assert isinstance(answer, Delta)


def test_an_event_loop_that_ends_before_its_request_harms_nobody(engine: Engine) -> None:
    async def ask_and_leave() -> None:
        await anext(engines.astream(engine, Request(text(30), sampling=replace(LONG, max_tokens=50))))

    asyncio.run(ask_and_leave())
    run(engine, Request(text(30), sampling=replace(SHORT, max_tokens=60)))


def test_threads_and_event_loops_ask_at_once(engine: Engine) -> None:
    chunks = [tuple(text(n)) for n in (20, 33, 48)]
    requests = [lazy(chunks[n % 3], text(3), chunks[(n + 1) % 3], text(9)) for n in range(4)]
    expected = [answer.token_ids for answer in run(engine, *requests)]

    def ask(number: int) -> list[Delta | Exception]:
        if number % 2:
            return engines.generate(engine, requests)
        return asyncio.run(engines.agenerate(engine, requests))

    with ThreadPoolExecutor(6) as pool:
        for results in pool.map(ask, range(12)):
            assert [result.token_ids if isinstance(result, Delta) else result for result in results] == expected


def test_closing_ends_what_is_in_flight_and_what_comes_later(engine: Engine) -> None:
    """The last test of each engine: afterwards it is closed."""
    heard: list[queue.SimpleQueue[Event]] = [queue.SimpleQueue() for _ in range(3)]
    for q in heard:
        engine.submit(Request(text(30), sampling=LONG), q.put)
    for q in heard[:2]:
        assert isinstance(q.get(timeout=60), Delta)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: engine.close(), range(2)))
    engine.close()
    for q in heard:
        *_, last = [q.get(timeout=60) for _ in range(q.qsize())]
        assert isinstance(last, EngineDeadError)
    assert isinstance(error_of(engine, Request(text(30))), EngineDeadError)


# ---------------------------------------------------------------- starts that fail


@pytest.mark.engine
@pytest.mark.usefixtures("collected")
def test_an_argument_that_vllm_does_not_know_is_named(model: Path) -> None:
    with pytest.raises(ConfigError, match="max_num_sequences") as caught:
        local(model, max_num_sequences=3)
    assert isinstance(caught.value.__cause__, TypeError)


@pytest.mark.engine
@pytest.mark.usefixtures("collected")
@pytest.mark.parametrize(
    ("argument", "value"), [("dtype", "float99"), ("max_num_seqs", "many"), ("max_model_len", 1 << 20)]
)
def test_a_value_that_vllm_does_not_take_is_refused_with_its_reason(argument: str, value: Any, model: Path) -> None:
    with pytest.raises(ConfigError, match="does not accept") as caught:
        local(model, **{argument: value})
    assert isinstance(caught.value.__cause__, (TypeError, ValueError))
    assert len(str(caught.value)) < 1000


@pytest.mark.engine
@pytest.mark.usefixtures("collected")
def test_a_folder_without_a_model_starts_nothing(tmp_path: Path) -> None:
    with pytest.raises((ConfigError, EngineStartError), match=re.escape(str(tmp_path))):
        local(tmp_path)


@pytest.mark.engine
@pytest.mark.usefixtures("collected")
def test_every_reason_of_a_refusal_reaches_the_caller(model: Path) -> None:
    with pytest.raises(UnsupportedError) as caught:
        local(model, enable_prefix_caching=False, scheduling_policy="priority")
    assert "enable_prefix_caching=True" in str(caught.value)
    assert "scheduling_policy='fcfs'" in str(caught.value)
