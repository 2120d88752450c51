from __future__ import annotations

import html
import itertools
import json
import random
import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import lazyrag.segmenter as segmenter_module
from lazyrag.anchors import MIN_CHARS, AnchorIndex
from lazyrag.segmenter import CUT_LOSS, MAX_HINTED, PLACE_COST, Segmenter, _num_shared, _schedule, _Span
from lazyrag.types import Occurrence, canonical, chunk_id

MakeSegmenter = Callable[..., Segmenter]

ALPHABETS = {
    "english": "etaoin shrdlu etaoin shrdlucmfwyp\n.,",
    "cjk": "的一是了我不人在他有这中大来上国和也子时道说",
    "combining": "ae\u0301o\u0308\u200d\ufe0f ñ漢",
    "astral": "😀👩\u200d🏽🇩🇪 ab",
    "halves": "\ud83d\ude00\udc00a ",
    "two letters": "ab",
}


def text_of(rng: random.Random, length: int, alphabet: str = ALPHABETS["english"]) -> str:
    """A canonical text of exactly this length."""
    return "x" + "".join(rng.choices(alphabet, k=length - 2)) + "."


def check(segmenter: Segmenter, text: str, occurrences: Sequence[Occurrence]) -> None:
    """What always holds: ordered, disjoint, and each is what it says."""
    texts = segmenter.texts(o.chunk_id for o in occurrences)
    at = 0
    for o in occurrences:
        assert at <= o.start < o.end <= len(text)
        chunk = texts[o.chunk_id]
        assert text[o.start : o.end] == (chunk if o.whole else chunk[: o.end - o.start])
        at = o.end


def weight(occurrences: Iterable[Occurrence]) -> int:
    return sum(o.end - o.start - (0 if o.whole else CUT_LOSS) for o in occurrences)


def planted(parts: Sequence[tuple[str, bool]]) -> list[Occurrence]:
    """The occurrences of a prompt made of (text, is a chunk) parts."""
    out, at = [], 0
    for text, is_chunk in parts:
        if is_chunk:
            out.append(Occurrence(chunk_id(text), at, at + len(text)))
        at += len(text)
    return out


# ---------------------------------------------------------------- generated prompts


def generated_prompt(rng: random.Random, chunks: Sequence[str], alphabet: str) -> list[tuple[str, bool]]:
    """Parts of a prompt: chunks, cut chunks, altered chunks, literals; next to each other or not."""
    parts: list[tuple[str, bool]] = []
    for _ in range(rng.randint(0, 8)):
        kind = rng.random()
        chunk = rng.choice(chunks)
        if kind < 0.6:
            parts.append((chunk, True))
        elif kind < 0.7:
            parts.append((chunk[: rng.randint(0, len(chunk) - 1)], False))
        elif kind < 0.75:
            parts.append((chunk[rng.randint(1, len(chunk) - 1) :], False))
        elif kind < 0.8:
            at = rng.randrange(len(chunk))
            parts.append((chunk[:at] + "¤" + chunk[at + 1 :], False))
        else:
            parts.append(("".join(rng.choices(alphabet, k=rng.randint(0, 60))), False))
        if rng.random() < 0.7:
            parts.append((rng.choice(["\n\n", " ", "\n---\n", "</doc>\n<doc>", "\n\n[2] ", "¶"]), False))
    return parts


NUM_SEEDS, PROMPTS_PER_SEED = 250, 45  # 11,250 prompts


@settings(max_examples=NUM_SEEDS, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 2**32), script=st.sampled_from([name for name in ALPHABETS if name != "two letters"]))
def test_every_planted_chunk_is_found(seed: int, script: str, make_segmenter: MakeSegmenter) -> None:
    rng = random.Random(seed)
    alphabet = ALPHABETS[script]
    chunks = [text_of(rng, rng.randint(MIN_CHARS, 400), alphabet) for _ in range(12)]
    segmenter = make_segmenter(chunks)
    for _ in range(PROMPTS_PER_SEED):
        parts = generated_prompt(rng, chunks, alphabet)
        text = "".join(part for part, _ in parts)
        occurrences = segmenter.find(text)
        check(segmenter, text, occurrences)
        assert set(planted(parts)) <= set(occurrences)


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_of_nested_overlapping_and_repetitive_chunks_the_most_text_is_covered(
    seed: int, make_segmenter: MakeSegmenter
) -> None:
    """Here a planted chunk may lose to others that cover more, but the whole never covers less than was planted."""
    rng = random.Random(seed)
    source = text_of(rng, 1500, rng.choice(list(ALPHABETS.values())))
    spans = [(rng.randint(0, 1300), rng.randint(MIN_CHARS, 400)) for _ in range(10)]
    chunks = [source[start : start + length] for start, length in spans]
    chunks += ["-" * rng.randint(MIN_CHARS, 90), "ab" * rng.randint(MIN_CHARS, 90)]
    chunks = [chunk for chunk in map(canonical, chunks) if len(chunk) >= MIN_CHARS]
    segmenter = make_segmenter(chunks)
    for _ in range(10):
        parts = generated_prompt(rng, chunks, "-ab")
        text = "".join(part for part, _ in parts)
        occurrences = segmenter.find(text)
        check(segmenter, text, occurrences)
        assert weight(occurrences) >= weight(planted(parts))


@given(intervals=st.lists(st.tuples(st.integers(0, 8), st.integers(2, 5), st.booleans()), max_size=9, unique=True))
def test_the_schedule_is_the_best_of_all(intervals: list[tuple[int, int, bool]]) -> None:
    spans = [
        (50 * start, 50 * (start + length), whole, f"{i:032x}") for i, (start, length, whole) in enumerate(intervals)
    ]

    def disjoint(some: Sequence[_Span]) -> bool:
        return all(one[1] <= other[0] or other[1] <= one[0] for one, other in itertools.combinations(some, 2))

    def weighed(some: Sequence[_Span]) -> tuple[int, int]:
        return sum(end - start - (0 if whole else CUT_LOSS) for start, end, whole, _ in some), -len(some)

    subsets = itertools.chain.from_iterable(itertools.combinations(spans, size) for size in range(len(spans) + 1))
    chosen = _schedule(spans)
    assert disjoint(chosen)
    assert chosen == sorted(chosen)
    assert weighed(chosen) == max(weighed(some) for some in subsets if disjoint(some))


# ---------------------------------------------------------------- one promise at a time


@pytest.mark.parametrize("hinted", [False, True])
def test_chunks_made_to_match_everywhere_take_few_comparisons(
    hinted: bool, make_segmenter: MakeSegmenter, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def counted(text: str, start: int, chunk: str) -> int:
        calls.append(start)
        return _num_shared(text, start, chunk)

    monkeypatch.setattr("lazyrag.segmenter._num_shared", counted)
    chunks = ["-" * (300 + n) + "!" * (n % 2) for n in range(20)]
    ordinary = text_of(random.Random(0), 200)
    text = "-" * 20_000 + ordinary + "-" * 20_000
    segmenter = make_segmenter([] if hinted else [*chunks, ordinary])
    occurrences = segmenter.find(text, hints=[*chunks, ordinary] if hinted else ())
    check(make_segmenter([*chunks, ordinary]), text, occurrences)
    assert Occurrence(chunk_id(ordinary), 20_000, 20_200) in occurrences
    assert len(calls) < 12_000  # there are 800,000 places


def cover_of(text: str, chunks: Iterable[str], cut_loss: int) -> set[int]:
    """The places of all that is a chunk's text, whole or cut to more than `cut_loss`; found the slow way."""
    cover = set[int]()
    for chunk in chunks:
        for start in range(len(text)):
            shown = next((i for i, c in enumerate(chunk) if text[start + i : start + i + 1] != c), len(chunk))
            if shown == len(chunk) or shown > cut_loss:
                cover.update(range(start, start + shown))
    return cover


REPETITIVE = st.tuples(st.text("ab", min_size=1, max_size=4), st.integers(1, 8), st.text("ab", max_size=6)).map(
    lambda parts: parts[0] * parts[1] + parts[2]
)


@settings(max_examples=300, deadline=None)
@given(
    chunks=st.lists(REPETITIVE, min_size=1, max_size=4),
    parts=st.lists(st.integers(0, 3) | REPETITIVE | st.just("."), max_size=8),
    work=st.sampled_from([1, 30, 200, 1 << 22]),
)
def test_all_that_is_a_hinted_text_is_known_however_it_repeats_itself(
    chunks: list[str], parts: list[int | str], work: int, make_segmenter: MakeSegmenter
) -> None:
    """And if there is time to look at it, nothing else."""
    text = "".join(chunks[part % len(chunks)] if isinstance(part, int) else part for part in parts)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"CUT_LOSS": 4, "SHORTEST_HINT": 1, "MAX_PLACES": 2, "PLACE_COST": 4}.items():
            patch.setattr(segmenter_module, name, value)
        patch.setattr(segmenter_module, "MAX_HINTED", work)
        known = make_segmenter([]).search(text, chunks).known
    known_places = {place for start, end in known for place in range(start, end)}
    cover = cover_of(text, chunks, cut_loss=4)
    assert cover <= known_places
    if work > 1000:
        assert cover == known_places


def test_many_hints_that_repeat_themselves_take_the_time_of_one(
    make_segmenter: MakeSegmenter, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[int] = []

    def counted(text: str, start: int, chunk: str) -> int:
        compared.append(_num_shared(text, start, chunk))
        return compared[-1]

    monkeypatch.setattr(segmenter_module, "_num_shared", counted)
    text = "a" * 20_000
    ordinary = text_of(random.Random(0), 200)
    hints = ["a" * (16 + n) + "b" * (n % 2) for n in range(200)]
    found = make_segmenter([]).search(f"{text}{ordinary}{text} Go on.", [*hints, ordinary])
    assert Occurrence(chunk_id(ordinary), 20_000, 20_200) in found.occurrences
    assert {place for start, end in found.known for place in range(start, end)} >= set(range(40_200))
    assert sum(compared) + PLACE_COST * len(compared) < 1.1 * MAX_HINTED
    long = ["a" * (10_000 + n) for n in range(200)]
    compared.clear()
    assert make_segmenter([]).search(text, long).known
    assert sum(compared) < MAX_HINTED + sum(2 * len(hint) for hint in long)


def test_what_lost_to_an_overlapping_chunk_is_known(make_segmenter: MakeSegmenter) -> None:
    source = text_of(random.Random(0), 400)
    found = make_segmenter([source[:250], source[150:]]).search(f"See {source}. Go on.")
    assert len(found.occurrences) == 1
    assert {place for start, end in found.known for place in range(start, end)} == set(range(4, 404))


def test_chunks_at_the_start_at_the_end_and_side_by_side(make_segmenter: MakeSegmenter) -> None:
    rng = random.Random(1)
    a, b = text_of(rng, 100), text_of(rng, 200)
    parts = [(a, True), (b, True), (b, True), (a, True)]
    text = a + b + b + a
    assert make_segmenter([a, b]).find(text) == planted(parts)


def test_the_longest_of_nested_chunks_wins(make_segmenter: MakeSegmenter) -> None:
    parent = text_of(random.Random(2), 600)
    child = canonical(parent[100:300])
    segmenter = make_segmenter([parent, child])
    assert segmenter.find(f"[{parent}]") == [Occurrence(chunk_id(parent), 1, 601)]
    assert segmenter.find(f"[{child}]") == [Occurrence(chunk_id(child), 1, 1 + len(child))]


def test_a_whole_short_chunk_wins_over_the_cut_long_one_that_begins_like_it(make_segmenter: MakeSegmenter) -> None:
    long = text_of(random.Random(3), 600)
    short = canonical(long[:300])
    found = make_segmenter([long, short]).find(f"{short}\n\nQuestion?")
    assert found == [Occurrence(chunk_id(short), 0, len(short))]


def test_a_cut_chunk_covers_what_is_shown_of_it(make_segmenter: MakeSegmenter) -> None:
    a, b = text_of(random.Random(4), 500), text_of(random.Random(5), 500)
    text = f"{a[:300]}¤¤ {b}"
    found = make_segmenter([a, b]).find(text)
    assert found == [
        Occurrence(chunk_id(a), 0, 300, whole=False),
        Occurrence(chunk_id(b), 303, 803),
    ]


def test_a_cut_chunk_gives_way_where_the_next_one_starts(make_segmenter: MakeSegmenter) -> None:
    """By chance the cut chunk goes on as the next chunk begins; both must be found."""
    rng = random.Random(6)
    b = text_of(rng, 300)
    a = text_of(rng, 300) + "\n\n" + b[:5] + text_of(rng, 300)
    text = f"{a[:300]}\n\n{b}"
    assert make_segmenter([a, b]).find(text) == [
        Occurrence(chunk_id(a), 0, 302, whole=False),
        Occurrence(chunk_id(b), 302, 602),
    ]


def test_cut_chunks_inside_a_whole_one_are_chosen_where_it_is_not(make_segmenter: MakeSegmenter) -> None:
    rng = random.Random(19)
    a, b, c, d = (text_of(rng, length) for length in (1000, 200, 600, 900))
    before, whole, inside, after = a + b + "¤" + d, b + c + d[:50], c + "¤" + a, d + "¤" + a
    segmenter = make_segmenter([before, whole, inside, after])
    assert segmenter.find(a + b + c + d[:50] + "####") == [
        Occurrence(chunk_id(before), 0, 1200, whole=False),
        Occurrence(chunk_id(inside), 1200, 1800, whole=False),
    ]
    assert segmenter.find(b + c + d) == [
        Occurrence(chunk_id(inside), 200, 800, whole=False),
        Occurrence(chunk_id(after), 800, 1700, whole=False),
    ]
    assert segmenter.find(whole) == [Occurrence(chunk_id(whole), 0, 850)]


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_what_is_not_compared_would_not_cover_more(seed: int, make_segmenter: MakeSegmenter) -> None:
    rng = random.Random(seed)
    text = text_of(rng, 1500)
    spans = [(rng.randint(0, 1300), rng.randint(100, 800), rng.random() < 0.7) for _ in range(8)]
    chunks = [text[start : start + length] + text_of(rng, 300) * is_cut for start, length, is_cut in spans]
    segmenter = make_segmenter([canonical(chunk) for chunk in chunks])
    found = segmenter.search(text)
    check(segmenter, text, found.occurrences)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segmenter_module, "_is_apart", lambda *_: False)
        all_compared = segmenter.search(text)
    assert weight(found.occurrences) >= weight(all_compared.occurrences)
    known, all_known = (
        {place for start, end in some.known for place in range(start, end)} for some in (found, all_compared)
    )
    assert known == all_known


def test_a_chunk_cut_to_very_little_is_not_worth_it(make_segmenter: MakeSegmenter) -> None:
    a = text_of(random.Random(7), 500)
    assert make_segmenter([a]).find(a[:CUT_LOSS]) == []


def test_an_edited_chunk_counts_as_cut_at_the_edit(make_segmenter: MakeSegmenter) -> None:
    a = text_of(random.Random(8), 500)
    found = make_segmenter([a]).find(a[:200] + "¤" + a[201:])
    assert found == [Occurrence(chunk_id(a), 0, 200, whole=False)]


def test_the_tail_of_a_chunk_is_not_the_chunk(make_segmenter: MakeSegmenter) -> None:
    """The KV of a tail saw the head."""
    a = text_of(random.Random(9), 500)
    assert make_segmenter([a]).find(a[1:]) == []


def test_deleted_chunks_are_not_found(make_segmenter: MakeSegmenter) -> None:
    a, b = text_of(random.Random(10), 200), text_of(random.Random(11), 200)
    segmenter = make_segmenter([a, b])
    segmenter.index.remove([chunk_id(b)])
    assert segmenter.find(a + b) == planted([(a, True)])


def test_only_the_texts_of_chunks_that_may_be_cut_are_asked_for() -> None:
    """A chunk's id proves it; reading 100 texts from a store takes longer than finding them."""
    rng = random.Random(16)
    whole, cut = text_of(rng, 200), text_of(rng, 200)
    asked: list[str] = []
    index = AnchorIndex(secret=b"tests")
    index.add([(chunk_id(whole), whole), (chunk_id(cut), cut)])

    def get_text(ids: Sequence[str]) -> dict[str, str]:
        asked.extend(ids)
        return {chunk_id(cut): cut}

    text = f"{whole}\n{cut[:150]}"
    assert Segmenter(index, get_text).find(text) == [
        Occurrence(chunk_id(whole), 0, 200),
        Occurrence(chunk_id(cut), 201, 351, whole=False),
    ]
    assert asked == [chunk_id(cut)]


def test_a_hash_that_agrees_by_chance_is_no_proof(make_segmenter: MakeSegmenter) -> None:
    a, b = text_of(random.Random(17), 200), text_of(random.Random(18), 200)
    segmenter = make_segmenter([a])
    candidates = segmenter.index.candidates(b + a)
    start, end = np.array([0]), np.array([200])
    lie = candidates._replace(start=start, end=end, first=start, last=end, whole=np.array([True]))
    assert lie.chunk_ids == [chunk_id(a)]
    segmenter.index.candidates = lambda text: lie  # type: ignore[method-assign]
    assert segmenter.find(b + a) == []


def test_hints_find_what_the_index_cannot(make_segmenter: MakeSegmenter) -> None:
    rng = random.Random(12)
    short = "A chunk of thirty characters.."
    unregistered = text_of(rng, 200)
    text = f"{short}\n\n{unregistered}\n\n{short}"
    segmenter = make_segmenter([])
    assert segmenter.find(text) == []
    found = segmenter.find(text, hints=[f"  {short}\n", unregistered, "tiny", ""])
    assert found == planted([(short, True), ("\n\n", False), (unregistered, True), ("\n\n", False), (short, True)])
    check_text = segmenter.texts([chunk_id(short)], [short])
    assert check_text == {chunk_id(short): short}


def test_hints_find_chunks_cut_before_their_anchor(make_segmenter: MakeSegmenter) -> None:
    header = text_of(random.Random(13), 150)
    chunks = [header + text_of(random.Random(i), 300) for i in range(20, 40)]
    segmenter = make_segmenter(chunks)
    text = chunks[3][:151]
    assert segmenter.find(text) == []
    found = segmenter.find(text, hints=[chunks[3]])
    assert found == [Occurrence(chunk_id(chunks[3]), 0, len(text), whole=False)]


def test_an_empty_text_and_an_empty_index_hold_nothing(make_segmenter: MakeSegmenter) -> None:
    assert make_segmenter([]).find("anything " * 50) == []
    assert make_segmenter([text_of(random.Random(14), 100)]).find("") == []


def test_a_long_prompt_is_segmented_whole(make_segmenter: MakeSegmenter) -> None:
    rng = random.Random(15)
    chunks = [text_of(rng, 800) for _ in range(2000)]
    segmenter = make_segmenter(chunks)
    parts: list[tuple[str, bool]] = []
    while sum(len(part) for part, _ in parts) < 100_000:
        parts += [
            (f"[Document {len(parts)}] (source: manual.txt)\n", False),
            (rng.choice(chunks), True),
            ("\n\n", False),
        ]
    text = "".join(part for part, _ in parts)
    assert segmenter.find(text) == planted(parts)


def test_a_prompt_made_to_match_everywhere_ends(make_segmenter: MakeSegmenter) -> None:
    segmenter = make_segmenter(["-" * n for n in range(MIN_CHARS, MIN_CHARS + 5)])
    text = "-" * 5000
    found = segmenter.find(text)
    check(segmenter, text, found)
    assert sum(o.end - o.start for o in found) == 5000 - 5000 % MIN_CHARS or weight(found) > 4900


# ---------------------------------------------------------------- real passages in real wrappers

WRAPPERS: dict[str, Callable[[str, int], tuple[str, str, str]]] = {
    "joined": lambda text, i: ("", text, "\n\n"),
    "with metadata": lambda text, i: (f"Source: file-{i}.pdf\npage: {i}\n\n", text, "\n\n"),
    "tutorial": lambda text, i: (f"Source: {{'page': {i}}}\nContent: ", text, "\n"),
    "numbered": lambda text, i: (f"[{i}] ", text, "\n"),
    "xml": lambda text, i: (f'<doc id="{i}">', text, "</doc>"),
    "xml on lines": lambda text, i: ("<document>\n", text, "\n</document>\n"),
    "code fence": lambda text, i: ("```text\n", text, "\n```\n"),
    "markdown": lambda text, i: (f"### Passage {i}\n- ", text, "\n\n---\n\n"),
    "no separator": lambda text, i: ("", text, ""),
    "tool message": lambda text, i: ("<|im_start|>tool\n", text, "<|im_end|>\n"),
    "quoted": lambda text, i: ('"', text, '", '),
    "windows line ends around": lambda text, i: ("\r\n", text, "\r\n"),
}


def passages(data_folder: Path, name: str) -> list[str]:
    with (data_folder / name).open(encoding="utf-8") as file:
        docs = [doc["text"] for line in file for doc in json.loads(line)["docs"]]
    return [text for text in dict.fromkeys(map(canonical, docs)) if len(text) >= MIN_CHARS]


@pytest.fixture(
    scope="module",
    params=["nq_open_gold_2655.jsonl", "2wiki_lazyattn_demo_20.jsonl", "musique_cacheblend_80.jsonl"],
)
def corpus(
    request: pytest.FixtureRequest, data_folder: Path, make_segmenter: MakeSegmenter
) -> tuple[list[str], Segmenter]:
    texts = passages(data_folder, request.param)
    return texts, make_segmenter(texts)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_real_passages_are_found_in_every_wrapper(wrapper: str, corpus: tuple[list[str], Segmenter]) -> None:
    texts, segmenter = corpus
    rng = random.Random(wrapper)
    for _ in range(40):
        parts: list[tuple[str, bool]] = [("Answer from the context.\n\n", False)]
        for i, text in enumerate(rng.choices(texts, k=rng.randint(1, 12))):
            before, shown, after = WRAPPERS[wrapper](text, i)
            parts += [(before, False), (shown, True), (after, False)]
        parts.append(("\n\nQuestion: who wrote it?\nAnswer:", False))
        prompt = "".join(part for part, _ in parts)
        found = segmenter.find(prompt)
        check(segmenter, prompt, found)
        assert set(planted(parts)) <= set(found)


def test_every_real_passage_is_found_by_itself(corpus: tuple[list[str], Segmenter]) -> None:
    texts, segmenter = corpus
    for text in texts:
        assert segmenter.find(f"> {text}") == [Occurrence(chunk_id(text), 2, 2 + len(text))]


@pytest.mark.parametrize(
    "alter",
    [
        lambda text: repr([text]),
        lambda text: json.dumps({"page_content": text}),
        lambda text: textwrap.indent(textwrap.fill(text, 40), "> "),
        lambda text: html.escape(text).replace(" ", "&nbsp;"),
        lambda text: " ".join(text.upper().split()),
    ],
    ids=["list repr", "json", "blockquote", "html", "rewritten"],
)
def test_altered_passages_are_never_taken_for_whole(
    alter: Callable[[str], str], corpus: tuple[list[str], Segmenter]
) -> None:
    texts, segmenter = corpus
    for text in random.Random(0).sample(texts, 50):
        prompt = alter(text)
        found = segmenter.find(prompt)
        check(segmenter, prompt, found)
        for occurrence in found:
            assert not occurrence.whole or prompt[occurrence.start : occurrence.end] in texts


def test_passages_cut_by_a_context_limit_are_found_as_cut(corpus: tuple[list[str], Segmenter]) -> None:
    """By the index alone if the corpus shows what is left of them nowhere else, with a hint always."""
    texts, segmenter = corpus
    everything = "\0".join(texts)
    alone = 0
    for text in random.Random(1).sample([text for text in texts if len(text) > 260], 50):
        prompt = f"Context: {text[:250]}\n\nQuestion: what?"
        if all(everything.count(text[at : at + 50]) == 1 for at in range(0, 250, 50)):
            alone += 1
            assert segmenter.find(prompt) == segmenter.find(prompt, hints=[text])
        (found,) = segmenter.find(prompt, hints=[text])
        assert (found.start, found.whole) == (9, False)
        assert found.end >= 9 + 250
    assert alone
