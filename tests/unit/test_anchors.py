from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lazyrag import anchors
from lazyrag.anchors import MIN_CHARS, AnchorIndex
from lazyrag.errors import InputError, StoreError
from lazyrag.types import ChunkId, chunk_id

SECRET = b"tests"


def words(rng: random.Random, count: int) -> str:
    return " ".join("".join(rng.choices("abcdefghijklmnop", k=rng.randint(2, 9))) for _ in range(count))


def index_of(*texts: str) -> AnchorIndex:
    index = AnchorIndex(secret=SECRET)
    assert index.add([(chunk_id(text), text) for text in texts]) == []
    return index


def found(index: AnchorIndex, text: str, *, whole: bool = True) -> set[tuple[ChunkId, int]]:
    rows = index.candidates(text)
    return {
        (id, int(start))
        for id, start, is_whole in zip(rows.chunk_ids, rows.start, rows.whole, strict=True)
        if is_whole == whole
    }


@given(
    chunk=st.text(min_size=MIN_CHARS, max_size=300).filter(lambda text: len(text.strip()) >= MIN_CHARS),
    before=st.text(max_size=100),
    after=st.text(max_size=100),
)
def test_every_chunk_of_the_minimum_length_is_found_wherever_it_stands(chunk: str, before: str, after: str) -> None:
    index = index_of(chunk)
    assert (chunk_id(chunk), len(before)) in found(index, before + chunk.strip() + after)


@pytest.mark.parametrize("text", ["-" * 60, "ab" * 40, "\ud800x" * 40, "é" * MIN_CHARS, "漢字かな" * 20])
def test_texts_of_little_variety_are_found(text: str) -> None:
    assert (chunk_id(text), 5) in found(index_of(text), "start" + text + "end")


@given(st.lists(st.integers(0, 5) | st.integers(0, 255), min_size=anchors.REACH, max_size=200))
def test_the_smallest_of_every_reach_of_windows_are_kept(keys: list[int]) -> None:
    kept = set()
    for start in range(len(keys) - anchors.REACH + 1):
        smallest = min(keys[start : start + anchors.REACH])
        kept |= {i for i in range(start, start + anchors.REACH) if keys[i] == smallest}
    assert anchors._minimizers(np.array(keys, np.uint8)).tolist() == sorted(kept)


@pytest.mark.parametrize("repeated", ["-", "abc", "0123456789 "])
def test_a_text_that_repeats_itself_takes_bounded_work_and_hides_no_other_chunk(
    repeated: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(anchors, "MAX_WHOLE", 100)
    monkeypatch.setattr(anchors, "MAX_CUT", 50)
    monkeypatch.setattr(anchors, "MAX_PLACES", 10)
    text = words(random.Random(0), 30)
    many = [repeated * (50 + n) + end for n in range(150) for end in ("", "x")]
    prompt = repeated * 2000 + text + repeated * 2000
    rows = index_of(*many, text).candidates(prompt)
    assert (chunk_id(text), len(repeated) * 2000) in found(index_of(*many, text), prompt)
    assert rows.whole.sum() <= 100 + len(prompt) // anchors.WINDOW
    assert (~rows.whole).sum() <= 50
    monkeypatch.setattr(anchors, "MAX_BYTES", 20_000)
    rows = index_of(*many, text).candidates(prompt)
    assert 0 < (rows.end - rows.start).sum() <= 20_000


def test_a_chunk_that_overlaps_itself_is_found_where_it_stands_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(anchors, "MAX_WHOLE", 100)
    monkeypatch.setattr(anchors, "MAX_PLACES", 1)
    chunk = "-" * 400
    assert {start for _, start in found(index_of(chunk), "-" * 10_000)} == set(range(0, 10_000, 400))


def test_chunks_that_repeat_themselves_are_found_where_they_begin_however_many_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(anchors, "MAX_PROPOSALS", 2000)
    monkeypatch.setattr(anchors, "MAX_WHOLE", 300)
    chunks = ["-" * (400 + n) for n in range(50)]
    prompt = "\n\n".join(chunks[10:18])
    places = {(chunk_id(chunk), prompt.index(f"{chunk}\n")) for chunk in chunks[10:17]}
    assert places <= found(index_of(*chunks), prompt)


@pytest.mark.parametrize("go", ["Go: ", "漢字é: "])
def test_what_there_is_no_time_to_look_at_counts_as_known(go: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that no document's text is taken for the application's, whatever documents are made for."""
    chunks = ["-" * 300, "-" * 301, words(random.Random(0), 30)]
    prompt = f"{go}{chunks[0]} and {chunks[2]}. Go on."
    places = [(prompt.index(chunk), prompt.index(chunk) + len(chunk)) for chunk in chunks[::2]]
    assert index_of(*chunks).candidates(prompt).unproposed == []
    monkeypatch.setattr(anchors, "MAX_PROPOSALS", 10)
    rows = index_of(*chunks).candidates(prompt)
    assert len(rows.chunk_ids) <= 10
    assert chunk_id(chunks[2]) in rows.chunk_ids
    seen = [*rows.unproposed, *zip(rows.start.tolist(), rows.end.tolist(), strict=True)]
    assert all(any(start <= s and e <= end for start, end in seen) for s, e in places)


def test_a_cut_chunk_that_there_is_no_time_to_look_at_counts_as_known(monkeypatch: pytest.MonkeyPatch) -> None:
    chunk = words(random.Random(0), 60)
    prompt = f"Go: {chunk[:200]}. Go on."
    assert index_of(chunk).candidates(prompt).unproposed == []
    monkeypatch.setattr(anchors, "MAX_CUT", 0)
    rows = index_of(chunk).candidates(prompt)
    assert (rows.chunk_ids, rows.unproposed) == ([], [(4, len(prompt))])


def test_an_anchor_that_many_share_proposes_no_cut_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would have to be compared with the text, and at most one of them is meant."""
    texts = ["-" * n for n in range(MIN_CHARS, MIN_CHARS + 10)]
    text = "-" * (MIN_CHARS + 4)
    assert len(found(index_of(*texts), text, whole=False)) > 10
    monkeypatch.setattr(anchors, "MAX_SHARED", 5)
    assert found(index_of(*texts), text, whole=False) == set()
    assert {id for id, _ in found(index_of(*texts), text)} == {chunk_id(text) for text in texts[:5]}


def test_chunks_below_the_minimum_are_reported() -> None:
    index = AnchorIndex()
    short, long = "x" * (MIN_CHARS - 1), "y" * MIN_CHARS
    assert index.add([("0" * 32, short + " \n"), ("1" * 32, long)]) == ["0" * 32]
    assert len(index) == 1


def test_outer_whitespace_is_no_part_of_a_chunk() -> None:
    text = words(random.Random(0), 40)
    assert found(index_of(f"\n  {text} \n"), f"x {text}") == {(chunk_id(text), 2)}


def test_a_header_that_all_chunks_share_is_nobodys_anchor() -> None:
    """First-come anchors made 20,000 chunks with one confidentiality notice propose 20,000 candidates for each."""
    rng = random.Random(1)
    header = "CONFIDENTIAL. This document is for the addressee only and may not be copied. " * 3
    texts = [header + words(rng, 60) for _ in range(400)]
    index = AnchorIndex(secret=SECRET)
    for text in texts:  # one at a time, as documents come in
        index.add([(chunk_id(text), text)])
    prompt = "\n\n".join(texts[:20])
    rows = index.candidates(prompt)
    assert {id for id, is_whole in zip(rows.chunk_ids, rows.whole, strict=True) if is_whole} == {
        chunk_id(text) for text in texts[:20]
    }
    assert len(rows.chunk_ids) <= 100


def test_a_chunk_cut_at_its_end_is_proposed() -> None:
    text = words(random.Random(2), 150)
    index = index_of(text)
    assert found(index, "see: " + text[:200], whole=False) == {(chunk_id(text), 5)}
    assert found(index, "see: " + text[:200] + "... and then something else", whole=False) == {(chunk_id(text), 5)}


def test_a_chunk_whose_beginning_is_missing_is_not_proposed() -> None:
    text = words(random.Random(3), 150)
    assert index_of(text).candidates(text[10:]).chunk_ids == []


def test_a_chunk_whose_beginning_is_another_is_not_proposed() -> None:
    """Its text would be read from the store, and in vain."""
    text = words(random.Random(3), 150)
    assert index_of(text).candidates("another beginning"[:10] + text[10:]).chunk_ids == []


def test_removed_chunks_are_not_found_and_may_come_back() -> None:
    rng = random.Random(4)
    texts = [words(rng, 40) for _ in range(50)]
    index = index_of(*texts)
    prompt = " | ".join(texts)
    index.remove({chunk_id(text) for text in texts[::2]} | {"f" * 32})
    assert len(index) == 25
    assert {id for id, _ in found(index, prompt)} == {chunk_id(text) for text in texts[1::2]}
    index.add([(chunk_id(text), text) for text in texts])
    assert len(index) == 50
    assert {id for id, _ in found(index, prompt)} == {chunk_id(text) for text in texts}


@pytest.mark.parametrize("together", [True, False])
def test_ids_that_agree_in_their_first_half_are_told_apart(together: bool) -> None:
    """Two such texts can be made; if one of them hid the other, control tokens in that would come to life."""
    rng = random.Random(18)
    texts = {"0123456789abcdef" + f"{n:016x}": words(rng, 40) for n in (3, 1, 2)}
    texts["f" * 32] = words(rng, 40)
    ids, prompt = list(texts), " | ".join(texts.values())
    index = AnchorIndex(secret=SECRET)
    for items in [texts.items()] if together else [[item] for item in texts.items()]:
        assert index.add(items) == []
    assert len(index) == 4
    assert index.compare(ids) == ([], [])
    assert index.compare(ids[1:]) == ([], ids[:1])
    assert {id for id, _ in found(index, prompt)} == texts.keys()
    index.remove([ids[0], ids[2][:-1] + "9"])
    assert len(index) == 3
    assert index.compare(ids) == (ids[:1], [])
    assert {id for id, _ in found(index, prompt)} == set(ids[1:])
    index.add(texts.items())
    assert index.compare(ids) == ([], [])
    assert len(index) == 4


def test_removed_chunks_do_not_crowd_an_anchor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(anchors, "MAX_SHARED", 5)
    texts = ["-" * n for n in range(MIN_CHARS + 10, MIN_CHARS + 20)]
    index = index_of(*texts, *(words(random.Random(n), 30) for n in range(30)))
    text = "-" * MIN_CHARS
    assert found(index, text, whole=False) == set()
    index.remove([chunk_id(text) for text in texts[5:]])
    assert {id for id, _ in found(index, text, whole=False)} == {chunk_id(text) for text in texts[:5]}


def test_of_chunks_that_begin_alike_the_longest_is_looked_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    text = words(random.Random(19), 400)
    beginnings = [text[:size].strip() for size in range(100, 2000, 50)]
    index = index_of(*beginnings)
    monkeypatch.setattr(anchors, "MAX_BYTES", len(beginnings[-1]) + 300)
    rows = index.candidates(f"See: {beginnings[-1]}")
    assert chunk_id(beginnings[-1]) in rows.chunk_ids
    assert len(rows.chunk_ids) < len(beginnings)
    assert rows.unproposed


def test_adding_twice_changes_nothing() -> None:
    text = words(random.Random(5), 40)
    index = index_of(text, text)
    index.add([(chunk_id(text), text)])
    assert len(index) == 1
    assert len(index.candidates(text).chunk_ids) == 1


@settings(max_examples=30)
@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=12), seed=st.integers(0, 99))
def test_many_small_additions_find_the_same_as_one_large(sizes: list[int], seed: int) -> None:
    rng = random.Random(seed)
    groups = [[words(rng, 20) for _ in range(size)] for size in sizes]
    texts = [text for group in groups for text in group]
    index = AnchorIndex(secret=SECRET)
    for group in groups:
        index.add([(chunk_id(text), text) for text in group])
    assert len(index) == len(texts)
    prompt = "\n".join(texts)
    assert found(index, prompt) == found(index_of(*texts), prompt)
    assert {id for id, _ in found(index, prompt)} == {chunk_id(text) for text in texts}


def test_batches_of_the_build_do_not_mix_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(anchors, "BATCH_CHARS", 500)
    rng = random.Random(6)
    texts = [words(rng, 15) for _ in range(40)]
    index = index_of(*texts)
    assert {id for id, _ in found(index, "".join(texts))} == {chunk_id(text) for text in texts}


def test_ids_that_are_no_ids_are_refused() -> None:
    with pytest.raises(InputError, match="32 hexadecimal"):
        AnchorIndex().add([("nonsense", "x" * 100)])


def test_reading_while_writing_finds_what_was_there_before() -> None:
    rng = random.Random(7)
    texts = [words(rng, 30) for _ in range(300)]
    index = index_of(*texts[:100])
    prompt = "\n".join(texts[:100])
    expected = {chunk_id(text) for text in texts[:100]}
    results: list[bool] = []

    def read() -> None:
        results.extend(expected == {id for id, _ in found(index, prompt)} for _ in range(20))

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for text in texts[100:]:
        index.add([(chunk_id(text), text)])
    for reader in readers:
        reader.join()
    assert results == [True] * 40


# ---------------------------------------------------------------- files


def test_a_saved_index_finds_the_same(tmp_path: Path) -> None:
    rng = random.Random(8)
    texts = [words(rng, 30) for _ in range(100)]
    index = index_of(*texts)
    index.remove([chunk_id(texts[0])])
    index.save(tmp_path / "index")
    loaded = AnchorIndex.load(tmp_path / "index", secret=SECRET)
    prompt = "\n".join(texts)
    assert len(loaded) == 99
    assert found(loaded, prompt) == found(index, prompt)
    loaded.add([(chunk_id(texts[0]), texts[0])])
    assert {id for id, _ in found(loaded, prompt)} == {chunk_id(text) for text in texts}


def test_an_empty_index_is_saved_and_loaded(tmp_path: Path) -> None:
    AnchorIndex(secret=SECRET).save(tmp_path)
    assert len(AnchorIndex.load(tmp_path, secret=SECRET)) == 0


def test_saving_again_replaces_the_files(tmp_path: Path) -> None:
    rng = random.Random(9)
    index = index_of(words(rng, 30))
    index.save(tmp_path)
    index.add([(chunk_id(text), text) for text in (words(rng, 30),)])
    index.save(tmp_path)
    assert len(AnchorIndex.load(tmp_path, secret=SECRET)) == 2
    assert len(list(tmp_path.glob("*.bin"))) == 3
    assert {path.name for path in tmp_path.iterdir() if path.suffix != ".bin"} == {"manifest.json", "lock"}


def test_a_large_index_is_not_written_again_for_a_small_change(tmp_path: Path) -> None:
    rng = random.Random(14)
    texts = [words(rng, 30) for _ in range(100)]
    index_of(*texts).save(tmp_path)
    (large,) = tmp_path.glob("run-*")
    written = large.stat()
    index = AnchorIndex.load(tmp_path, secret=SECRET)
    new = [words(rng, 30) for _ in range(3)]
    index.add([(chunk_id(text), text) for text in new])
    index.remove([chunk_id(text) for text in texts[:5]])
    index.save(tmp_path)
    assert (large.stat().st_ino, large.stat().st_mtime_ns) == (written.st_ino, written.st_mtime_ns)
    runs = [path.stat().st_size for path in tmp_path.glob("run-*")]
    assert sum(runs) == 103 * anchors._Run.BYTES
    assert len(runs) == 2
    again = AnchorIndex.load(tmp_path, secret=SECRET)
    lacking, others = again.compare([])
    assert (lacking, set(others)) == ([], {chunk_id(text) for text in texts[5:] + new})


def test_what_was_saved_is_read_from_the_file(tmp_path: Path) -> None:
    rng = random.Random(15)
    texts = [words(rng, 30) for _ in range(20)]
    saved = index_of(*texts)
    saved.save(tmp_path)
    for index in (saved, AnchorIndex.load(tmp_path, secret=SECRET)):
        (run,) = index._runs
        assert isinstance(run.data.base, np.memmap)
        index.remove([chunk_id(texts[0])])
        assert {id for id, _ in found(index, "\n".join(texts))} == {chunk_id(text) for text in texts[1:]}


def test_most_of_an_index_being_removed_frees_its_memory() -> None:
    rng = random.Random(16)
    texts = [words(rng, 30) for _ in range(200)]
    index = index_of(*texts)
    before = index.num_bytes
    index.remove([chunk_id(text) for text in texts[20:]])
    assert index.num_bytes <= before - 150 * anchors._Run.BYTES
    assert {id for id, _ in found(index, "\n".join(texts))} == {chunk_id(text) for text in texts[:20]}
    index.remove([chunk_id(text) for text in texts])
    assert index.candidates(texts[0]).chunk_ids == []


def test_boilerplate_is_told_from_text_however_many_windows_were_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(anchors, "COUNT_BITS", 8)
    monkeypatch.setattr(anchors, "BATCH_CHARS", 2000)
    rng = random.Random(17)
    header = "CONFIDENTIAL. This document is for the addressee only and may not be copied. " * 3
    index = index_of(*(words(rng, 60) for _ in range(1500)))
    assert index._num_counted <= (anchors.MAX_MEAN + 1) * 256
    texts = [header + words(rng, 60) for _ in range(300)]
    index.add([(chunk_id(text), text) for text in texts])
    assert len(index.candidates(texts[-1]).chunk_ids) < 100


def test_a_save_that_dies_half_way_leaves_the_old_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(10)
    text, new = words(rng, 30), words(rng, 30)
    index_of(text).save(tmp_path)
    write = anchors._write
    for num_written in (0, 1, 2, 3):
        left = iter(range(num_written))

        def die(path: Path, content: bytes, left: Iterator[int] = left) -> None:
            if next(left, None) is None:
                raise KeyboardInterrupt
            write(path, content)

        monkeypatch.setattr(anchors, "_write", die)
        with pytest.raises(KeyboardInterrupt):
            index_of(text, new).save(tmp_path)
        assert len(AnchorIndex.load(tmp_path, secret=SECRET)) == 1
        for path in tmp_path.glob("*.bin"):
            if path.name not in (tmp_path / "manifest.json").read_text(encoding="utf-8"):
                path.unlink()


def test_two_that_are_saved_into_one_folder_wait_for_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else one takes away the files that the other's manifest is about to name."""
    rng = random.Random(20)
    one, other = index_of(words(rng, 30)), index_of(words(rng, 30), words(rng, 30))
    write = anchors._write
    later = threading.Thread(target=other.save, args=(tmp_path,))

    def begin_another(path: Path, content: bytes) -> None:
        if path.name == anchors.MANIFEST and later.ident is None:
            later.start()
            later.join(0.2)  # it cannot end: it waits for what is being saved here
        write(path, content)

    monkeypatch.setattr(anchors, "_write", begin_another)
    one.save(tmp_path)
    later.join()
    assert len(AnchorIndex.load(tmp_path, secret=SECRET)) == 2
    assert len(list(tmp_path.glob("*.bin"))) == 3


def test_threads_save_into_one_folder_at_once(tmp_path: Path) -> None:
    def save(seed: int) -> None:
        rng = random.Random(seed)
        index = index_of(words(rng, 30))
        for _ in range(5):
            text = words(rng, 30)
            index.add([(chunk_id(text), text)])
            index.save(tmp_path)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(save, range(3)))
    assert len(AnchorIndex.load(tmp_path, secret=SECRET)) == 6


def test_an_index_that_is_replaced_while_it_is_read_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(21)
    index_of(words(rng, 30)).save(tmp_path)
    new = index_of(words(rng, 30), words(rng, 30))
    read = anchors._map

    def replaced(path: Path) -> anchors.U8:
        monkeypatch.setattr(anchors, "_map", read)
        new.save(tmp_path)
        return read(path)

    monkeypatch.setattr(anchors, "_map", replaced)
    assert len(AnchorIndex.load(tmp_path, secret=SECRET)) == 2


def test_what_a_save_that_died_left_is_removed_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(file: int) -> None:
        raise KeyboardInterrupt

    rng = random.Random(22)
    with monkeypatch.context() as patched:
        patched.setattr(anchors.os, "fsync", die)
        with pytest.raises(KeyboardInterrupt):
            index_of(words(rng, 30)).save(tmp_path)
    assert len(list(tmp_path.glob("*.tmp"))) == 1
    index_of(words(rng, 30)).save(tmp_path)
    assert list(tmp_path.glob("*.tmp")) == []
    assert len(AnchorIndex.load(tmp_path, secret=SECRET)) == 1


@pytest.mark.parametrize(
    "damage",
    ["truncated", "flipped", "empty", "missing", "manifest", "not json", "deep", "no files", "version", "shape"],
)
def test_damage_is_noticed(damage: str, tmp_path: Path) -> None:
    index_of(words(random.Random(11), 30)).save(tmp_path)
    (run,) = tmp_path.glob("run-*")
    manifest = tmp_path / "manifest.json"
    content = json.loads(manifest.read_text(encoding="utf-8"))
    if damage == "truncated":
        run.write_bytes(run.read_bytes()[:-1])
    elif damage == "flipped":
        run.write_bytes(run.read_bytes()[:-1] + b"\1")
    elif damage == "empty":
        run.write_bytes(b"")
    elif damage == "missing":
        run.unlink()
    elif damage == "manifest":
        manifest.unlink()
    elif damage == "not json":
        manifest.write_text("[1", encoding="utf-8")
    elif damage == "deep":
        manifest.write_text("[" * 100_000, encoding="utf-8")
    elif damage == "no files":
        manifest.write_text(json.dumps({**content, "files": None}), encoding="utf-8")
    elif damage == "version":
        manifest.write_text(json.dumps({**content, "version": 99}), encoding="utf-8")
    else:
        content["files"]["alive"] = content["files"]["counts"]
        manifest.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(StoreError, match="cannot be used"):
        AnchorIndex.load(tmp_path, secret=SECRET)
    index_of(words(random.Random(11), 30)).save(tmp_path)
    assert len(AnchorIndex.load(tmp_path, secret=SECRET)) == 1


def test_another_secret_is_noticed(tmp_path: Path) -> None:
    index_of(words(random.Random(12), 30)).save(tmp_path)
    with pytest.raises(StoreError, match="secret"):
        AnchorIndex.load(tmp_path, secret=b"another")


def test_secrets_give_other_hashes() -> None:
    text = words(random.Random(13), 30)
    one, other = AnchorIndex(secret=b"one"), AnchorIndex(secret=b"other")
    data = np.frombuffer(text.encode(), np.uint8)
    places = np.arange(len(data) - anchors.WINDOW + 1)
    assert not np.intersect1d(one._hashes.windows(data, places), other._hashes.windows(data, places)).size
    assert not np.array_equal(one._hashes.keys(data), other._hashes.keys(data))
