"""What recurs in prompts is found whole, counted without being kept, and registered within a budget."""

from __future__ import annotations

import errno
import json
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lazyrag import care
from lazyrag.backend.engine import Sampling
from lazyrag.backend.fake import FakeEngine
from lazyrag.chat import Message
from lazyrag.client import LazyRAG
from lazyrag.errors import ConfigError, StoreError
from lazyrag.recurring import MIN_TOKENS, Recurring
from lazyrag.retrievers.store import Store
from lazyrag.types import Document, chunk_id

WORDS = ["river", "stone", "bridge", "keeper", "letter", "market", "winter", "harbour", "light", "paper", "garden"]
TOOLS = (
    "{% if tools %}<|im_start|>system\nTools, one a line:\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "Call one like this: <|im_start|>{...}<|im_end|>\n{% endif %}"
)
CHATML = TOOLS + (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def text(seed: int, num_lines: int = 4) -> str:
    """Lines of words, other ones for each seed."""
    rng = random.Random(seed)
    return "\n".join(" ".join(rng.choices(WORDS, k=12)) for _ in range(num_lines))


A, B, C = text(1), text(2), text(3)
ONE = Sampling(max_tokens=1)


# ---------------------------------------------------------------- counting


def test_a_text_is_found_whole_among_others_when_it_was_seen_often_enough() -> None:
    recurring = Recurring(3)
    for n in range(3):
        found = recurring.look([f"Question {n}?\n{text(10 + n)}\n\n{A}\n\n{text(20 + n)}\nNow {n}."], is_mixed=False)
        assert found == ([A] if n == 2 else [])


def test_what_is_seen_often_but_in_other_company_is_no_combination() -> None:
    recurring = Recurring(3)
    prompts = [(A, B), (C, A), (B, C), (A, C), (C, B)]
    found: list[str] = []
    for n, parts in enumerate(prompts):
        found += recurring.look([f"{n}?\n" + "\n\n".join(parts)], is_mixed=False)
    assert set(found) == {A, B, C}


def test_one_prompt_counts_once_however_often_it_says_a_text() -> None:
    recurring = Recurring(2)
    assert recurring.look([f"{A}\n\n{B}\n\n{A}", A], is_mixed=True) == []
    assert recurring.look([f"Why?\n{A}"], is_mixed=True) == [A]


def test_the_beginning_of_a_prompt_that_the_engine_caches_is_not_counted_unless_chunks_stand_between() -> None:
    """A conversation that grows has the same beginning again and again, and costs nothing."""
    recurring = Recurring(2)
    history = [A]
    for n in range(5):
        assert recurring.look(history, is_mixed=False) == []
        history = [*history, text(30 + n)]
    assert recurring.look(history, is_mixed=True) == history[:-1]


def test_memory_is_bounded_and_what_was_not_seen_for_longest_is_forgotten() -> None:
    recurring = Recurring(2, max_counted=20)
    recurring.look([A], is_mixed=True)
    for n in range(50):
        recurring.look([text(100 + n, 3)], is_mixed=True)
        assert len(recurring) <= 20
    assert recurring.look([A], is_mixed=True) == []
    assert recurring.look([A], is_mixed=True) == [A]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.sampled_from(["a b", " c ", "", "d\x85e", "f\r", "\ud800"]), max_size=6), max_size=12))
def test_what_is_found_stands_in_the_text_and_was_seen_as_often(prompts: list[list[str]]) -> None:
    recurring = Recurring(2)
    seen: list[str] = []
    for parts in prompts:
        prompt = "\n".join(parts)
        seen.append(prompt)
        for found in recurring.look([prompt], is_mixed=True):
            assert found
            assert found in prompt
            assert found == found.strip()
            for line in found.splitlines():
                assert sum(line.strip() in other for other in seen) >= 2


# ---------------------------------------------------------------- registering


Connect = Callable[..., tuple[LazyRAG, FakeEngine]]


@pytest.fixture
def connect(
    model_folder: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    saving_engine: Callable[..., Any],
) -> Iterator[Connect]:
    """A client whose engine saves KV into the store `kb`; keywords are settings."""
    monkeypatch.chdir(tmp_path)
    folder = model_folder("byte-level", chat_template=CHATML)
    (folder / "config.json").write_text('{"max_position_embeddings": 8192}')
    engines: list[FakeEngine] = []

    def make(**settings: Any) -> tuple[LazyRAG, FakeEngine]:
        mode = settings.get("mode", "lazy")
        engines.append(saving_engine(folder, Path("kb/kv"), max_model_len=8192, mode=mode))
        return LazyRAG(model=str(folder), engine=engines[-1], embedder="hash", **settings), engines[-1]

    yield make
    for engine in engines:
        engine.close()


def chat(n: int, system: str = A, *passages: str) -> list[Message]:
    shown = "\n\n".join(passages)
    return [Message("system", system), Message("user", f"{shown}\n\nQuestion {n}: {text(50 + n, 1)}?")]


def segments(rag: LazyRAG, prompt: Any) -> tuple[str, ...]:
    """Ids of the chunks that the answer's prompt reused, or might have."""
    (answer,) = rag.generate([prompt], ONE)
    assert answer.plan is not None
    return tuple(segment.chunk_id for segment in answer.plan.segments)


def test_nothing_is_registered_by_itself_unless_it_is_asked_for(connect: Connect) -> None:
    rag, _ = connect()
    rag.register([B])
    for n in range(10):
        assert segments(rag, chat(n, A, B)) == (chunk_id(B),)


def test_a_system_prompt_is_a_chunk_after_so_many_sightings_beside_other_chunks(connect: Connect) -> None:
    rag, engine = connect(auto_register=3)
    rag.register([B])
    found = [segments(rag, chat(n, A, B)) for n in range(5)]
    assert found == [(chunk_id(B),)] * 3 + [(chunk_id(A), chunk_id(B))] * 2
    sent = [rag.tokenizer.decode(request.token_ids) for request in engine.requests]
    assert sent[4] == sent[0].replace(text(50, 1), text(54, 1)).replace("Question 0", "Question 4")


TOOL = {"type": "function", "function": {"name": "look_up", "description": text(5).replace("\n", " ")}}


def test_tools_that_a_template_writes_are_a_chunk_after_so_many_sightings(connect: Connect) -> None:
    rag, engine = connect(auto_register=2)
    rag.register([B])
    for n in range(3):
        rag.generate([chat(n, "Be brief.", B)], ONE, tools=[TOOL])
    first, *_, last = engine.requests
    assert [len(request.segments) for request in engine.requests] == [1, 1, 2]
    (known,) = set(rag.library.registered) - {B}
    assert json.dumps(TOOL) in known
    said = [rag.tokenizer.decode(request.token_ids).split("Question")[0] for request in (first, last)]
    assert said[0] == said[1]
    assert controls(last.token_ids) == controls(first.token_ids)


def test_a_tools_schema_is_registered_by_hand_as_the_template_writes_it(connect: Connect) -> None:
    rag, engine = connect()
    (id,) = rag.register({"look_up": json.dumps(TOOL)})
    rag.generate([chat(1, "Be brief.")], ONE, tools=[TOOL])
    assert [segment.chunk_id for segment in engine.requests[-1].segments] == [id]


def test_a_text_that_spells_the_templates_control_tokens_changes_nothing_in_it(connect: Connect) -> None:
    rag, engine = connect()
    rag.generate([chat(1, "Be brief.")], ONE, tools=[TOOL])
    rag.register(["Call one like this: <|im_start|>{...}<|im_end|>\n<|im_start|>system\nBe brief."])
    rag.generate([chat(1, "Be brief.")], ONE, tools=[TOOL])
    before, after = engine.requests
    assert list(before.token_ids) == list(after.token_ids)


def controls(token_ids: Sequence[int]) -> list[int]:
    """The control tokens of a prompt."""
    return [token for token in token_ids if token < 3]


def test_a_window_that_no_store_holds_is_a_chunk_in_a_string_prompt_too(connect: Connect) -> None:
    rag, _ = connect(auto_register=2)
    prompts = [f"Use this:\n\n{text(60 + n)}\n\n{A}\n\nQuestion {n}: why?\nAnswer:" for n in range(3)]
    assert [segments(rag, prompt) for prompt in prompts] == [(), (), (chunk_id(A),)]


def test_in_mode_exact_nothing_is_registered(connect: Connect) -> None:
    rag, _ = connect(auto_register=2, mode="exact")
    for n in range(4):
        rag.generate([f"{n}\n{A}"], ONE)
    assert len(rag.library) == 0


def test_what_spells_a_control_token_or_is_short_is_left_alone(connect: Connect) -> None:
    """A registered header would be inert from then on."""
    rag, engine = connect(auto_register=2)
    header = f"<|im_start|>system\n{A}<|im_end|>\n<|im_start|>user\n{text(4, 1)[:40]}"
    sent = []
    for n in range(4):
        rag.generate([f"{text(70 + n)}\n{header}\n{n}"], ONE)
        sent.append(controls(engine.requests[-1].token_ids))
    assert sent[0] == sent[-1]
    assert len(sent[0]) == 3
    assert all("<|" not in known for known in rag.library.registered)
    for known in rag.library.registered:
        assert len(rag.tokenizer.encode_plain(known)) >= MIN_TOKENS


def kv_files() -> int:
    return len(list(Path("kb/kv").rglob("*.safetensors")))


def test_the_longest_unused_is_forgotten_with_its_kv_when_the_budget_is_full(connect: Connect) -> None:
    rag, _ = connect(auto_register=2, auto_register_bytes=len(A) + len(B) + 40, store="kb")
    list(rag.ingest(documents=[Document("d", text(9), "d.txt")], warm=False))

    def ask(n: int, shown: str) -> bool:
        return chunk_id(shown) in segments(rag, f"{text(80 + n)}\n\n{shown}\n\n{n}?")

    assert [ask(n, A) for n in range(3)] == [False, False, True]
    assert [ask(n, B) for n in range(3, 6)] == [False, False, True]
    assert kv_files() == 2
    assert ask(6, A), "used last"
    assert [ask(n, C) for n in range(7, 9)] == [False, False]
    assert set(rag.library.registered) == {A, C}
    assert kv_files() == 1
    assert [ask(n, B) for n in range(9, 11)] == [False, False], "counted from the beginning again"


def test_what_is_registered_by_hand_or_stored_is_not_forgotten(connect: Connect) -> None:
    rag, _ = connect(auto_register=2, auto_register_bytes=len(A) + 10, store="kb")
    for n in range(2):
        rag.generate([f"{text(80 + n)}\n\n{A}\n\n{n}?"], ONE)
    rag.register([A])
    for n in range(2):
        rag.generate([f"{text(90 + n)}\n\n{B}\n\n{n}?"], ONE)
    list(rag.ingest(documents=[Document("d", B, "d.txt")], warm=False))
    for n in range(2):
        rag.generate([f"{text(70 + n)}\n\n{C}\n\n{n}?"], ONE)
    assert set(rag.library.registered) == {A, C}
    plan = rag.plan(f"{A}\n\n{B}\n\n{C}\n\nWhy?")
    assert plan.chunk_ids == (chunk_id(A), chunk_id(B), chunk_id(C))


def test_another_namespace_learns_nothing(connect: Connect) -> None:
    rag, _ = connect(auto_register=2)
    other = rag.for_namespace("other")
    for n in range(3):
        rag.generate([f"{text(80 + n)}\n\n{A}\n\n{n}?"], ONE)
    assert rag.plan(f"{A}\n\nWhy?").chunk_ids
    assert other.plan(f"{A}\n\nWhy?").chunk_ids == ()
    assert rag.plan(f"{A}\n\nWhy?").chunk_ids


def test_threads_may_ask_at_once(connect: Connect) -> None:
    rag, _ = connect(auto_register=2, auto_register_bytes=3 * len(A))

    def work(n: int) -> str:
        shown = [text(n % 5), text(n % 7)]
        plan = rag.plan(f"{text(100 + n, 1)}\n\n{shown[0]}\n\n{shown[1]}\n\n{n}?")
        return plan.text

    with ThreadPoolExecutor(4) as pool:
        texts = list(pool.map(work, range(200)))
    assert texts[33] == f"{text(133, 1)}\n\n{text(3)}\n\n{text(5)}\n\n33?"
    assert sum(len(known) for known in rag.library.registered) <= 3 * len(A)


@pytest.mark.parametrize("value", [1, -1])
def test_a_number_of_sightings_that_cannot_be_is_refused(value: int) -> None:
    with pytest.raises(ConfigError, match="auto_register"):
        LazyRAG(model="m", auto_register=value)


# ---------------------------------------------------------------- by name


def test_a_text_takes_the_place_of_the_one_that_had_its_name(connect: Connect) -> None:
    rag, _ = connect(store="kb")
    list(rag.ingest(documents=[Document("d", text(9), "d.txt")], warm=False))
    assert rag.register({"system": A, "examples": B}) == [chunk_id(A), chunk_id(B)]
    rag.generate([f"{A}\n\n{B}\n\nWhy?"], ONE)
    assert kv_files() == 2
    rag.register({"system": C, "copy": B})
    assert rag.plan(f"{A}\n\n{B}\n\n{C}\n\nWhy?").chunk_ids == (chunk_id(B), chunk_id(C))
    assert kv_files() == 1
    rag.register({"examples": C})
    assert rag.plan(f"{B}\n\nWhy?").chunk_ids == (chunk_id(B),), "another name has it still"


def failing(*arguments: object, **more: object) -> None:
    raise StoreError("The store is busy.")


@pytest.mark.parametrize("replaced", [False, True])
def test_a_text_that_the_store_does_not_let_go_keeps_its_name(
    replaced: bool, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    def let_go(name: str) -> None:
        rag.register({name: C}) if replaced else rag.unregister([name])

    rag, _ = connect(store="kb")
    list(rag.ingest(documents=[Document("d", text(9), "d.txt")], warm=False))
    rag.register({"a": A, "b": B})
    rag.generate([f"{A}\n\n{B}\n\nWhy?"], ONE)
    for method in ("doom", "get_texts"):
        with monkeypatch.context() as context:
            context.setattr(Store, method, failing)
            with pytest.raises(StoreError, match="busy"):
                let_go("a")
    assert rag.plan(f"{A}\n\n{B}\n\nWhy?").chunk_ids == (chunk_id(A), chunk_id(B))
    assert kv_files() == 2
    let_go("a")
    assert rag.plan(f"{A}\n\n{B}\n\nWhy?").chunk_ids == (chunk_id(B),)
    assert kv_files() == 1


def test_kv_of_a_forgotten_text_that_cannot_be_removed_goes_with_the_next(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(paths: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    rag, _ = connect(store="kb")
    list(rag.ingest(documents=[Document("d", text(9), "d.txt")], warm=False))
    rag.register({"a": A, "b": B})
    rag.generate([f"{A}\n\n{B}\n\nWhy?"], ONE)
    with monkeypatch.context() as context:
        context.setattr(care, "remove_files", refused)
        with pytest.raises(StoreError, match="Mend that and type: lazyrag gc"):
            rag.unregister(["a"])
    assert rag.plan(f"{A}\n\n{B}\n\nWhy?").chunk_ids == (chunk_id(B),)
    rag.unregister(["b"])
    assert kv_files() == 0


def test_a_short_text_that_spells_a_control_token_is_forgotten_with_its_name(connect: Connect) -> None:
    rag, _ = connect()
    rag.register({"short": "Pump?<|im_end|>"})
    assert rag.library.short_texts() == ["Pump?<|im_end|>"]
    rag.register({"short": "Pump."})
    assert rag.library.short_texts() == []
