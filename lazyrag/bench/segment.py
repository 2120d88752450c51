"""How fast chunks are found in a prompt, and what their index costs: `lazyrag bench segment`.

The segmenter's peers are Aho-Corasick on 32 characters of each chunk (the daachorse package), and `str.find` of
documents that are known to be there, which finds nothing else. Aho-Corasick comes in two forms: on the first
characters, and on those in the middle, as chosen by somebody who knows that no boilerplate stands there. All verify
what they find, take turns on the same prompts, and are measured in CPU time of their thread. Answers are compared with
how the prompt was made, and those of the segmenter on harder prompts with an oracle (`matcher`); a wrong one ends the
run.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib import metadata
from itertools import islice
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np

from lazyrag.anchors import AnchorIndex
from lazyrag.bench import report
from lazyrag.bench.matcher import Matcher
from lazyrag.bench.samples import rank
from lazyrag.bench.texts import Corpus, Prompt, Words, puzzling, retrieved
from lazyrag.errors import LazyRAGError
from lazyrag.optional import need
from lazyrag.segmenter import CUT_LOSS, Segmenter
from lazyrag.types import ChunkId, chunk_id

LAZYRAG, FIRST, MIDDLE, FIND = "lazyrag", "aho-corasick, first 32", "aho-corasick, middle 32", "str.find of 50"
SELDOM = 10
"""`FIRST` is measured in every tenth round: boilerplate makes it take seconds."""
ANCHOR = 32
RETRIEVED = 50
"""Documents that `str.find` looks for."""
SECRET = b"lazyrag bench segment"
WARM_UP = 10

Arm: TypeAlias = Callable[[Prompt], "list[tuple[int, Any]]"]
"""Finds chunks: (start, what names the chunk)."""


class WrongAnswerError(LazyRAGError):
    """Something was not found, or found where it is not."""


@dataclass(frozen=True, slots=True)
class Options:
    """What to run.

    Attributes:
        corpora: by name.
        prompts: that each arm is measured on, in each corpus.
        checked: prompts that are checked against the oracle, in each corpus.
        change: chunks that are added, or removed, at once.
        changes: how often each.
        seed: of all texts.
    """

    corpora: dict[str, Corpus]
    prompts: int = 300
    checked: int = 10_000
    change: int = 1000
    changes: int = 20
    seed: int = 0


def _options(ordinary: int, one_header: int, overlapping: int, **others: int) -> Options:
    corpora = {
        "ordinary": Corpus(ordinary),
        "one header": Corpus(one_header, shared_by_all=True),
        "overlapping by 100": Corpus(overlapping, overlap=100),
    }
    return Options(corpora, **others)


FULL = _options(1_000_000, 20_000, 100_000)
QUICK = _options(20_000, 2000, 2000, prompts=30, checked=300, changes=3)


@dataclass(frozen=True, slots=True)
class Row:
    """CPU time of an arm for a prompt, in milliseconds. `ratio`: LazyRAG's median over this one."""

    corpus: str
    arm: str
    p50: float
    p99: float
    min: float
    max: float
    n: int
    ratio: float


@dataclass(slots=True)
class Costs:
    """What an index costs; times are CPU seconds.

    Attributes:
        chunks: in it.
        build_s: to make it, without digests and tokens.
        peer_build_s: to make the second automaton.
        index_bytes: in memory, mapped files included, after all changes.
        file_bytes: on disk.
        open_s: to map it and check its digests.
        add_s, remove_s: of each change.
        save_s: to write the files after each pair of changes.
        checked: prompts on which the oracle found no fault.
    """

    chunks: int
    build_s: float = 0.0
    peer_build_s: float = 0.0
    index_bytes: int = 0
    file_bytes: int = 0
    open_s: float = 0.0
    add_s: list[float] = field(default_factory=list)
    remove_s: list[float] = field(default_factory=list)
    save_s: list[float] = field(default_factory=list)
    checked: int = 0


@dataclass(frozen=True, slots=True)
class Result:
    """All figures, and whose they are."""

    machine: dict[str, Any]
    command: str
    corpora: dict[str, dict[str, Any]]
    costs: dict[str, Costs] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)


def bench(
    options: Options, tell: Callable[[str], None], *, prompts: int | None, out: Path | None, command: str
) -> Result:
    """Build, change, check and measure, corpus by corpus.

    Args:
        options: what.
        tell: takes a line about what is going on.
        prompts: instead of those of the options.
        out: file for the JSON.
        command: noted in the result.

    Raises:
        WrongAnswerError: see the module.
        MissingExtraError: daachorse is not installed.
    """
    daachorse = need("daachorse", extra="bench")
    versions = {name: metadata.version(name) for name in ("lazyrag", "numpy", "daachorse")}
    corpora = {name: asdict(corpus) for name, corpus in options.corpora.items()}
    result = Result({**report.machine(), "versions": versions}, command, corpora)
    for name, corpus in options.corpora.items():
        with TemporaryDirectory() as folder:
            _examine(name, corpus, options, prompts or options.prompts, result, Path(folder), daachorse, tell)
        if out is not None:
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(json.dumps(asdict(result), indent=1) + "\n", encoding="utf-8")
    return result


def _examine(
    name: str,
    corpus: Corpus,
    options: Options,
    prompts: int,
    result: Result,
    folder: Path,
    daachorse: ModuleType,
    tell: Callable[[str], None],
) -> None:
    """All figures of a corpus."""
    tell(f"{name}: writing {corpus.num_chunks} chunks")
    chunks = {chunk_id(text): text for text in corpus.chunks(options.seed)}
    costs = result.costs[name] = Costs(len(chunks))
    tell(f"{name}: indexing them, and changing {options.changes} times {options.change} of them")
    index = _indexed(chunks, options, costs, folder)
    segmenter = Segmenter(index, lambda ids: {id: chunks[id] for id in ids if id in chunks})
    tell(f"{name}: checking {options.checked} prompts")
    _check(segmenter, chunks, corpus, options, costs)
    tell(f"{name}: making the automaton")
    texts, ids = list(chunks.values()), list(chunks)
    first = daachorse.DoubleArrayAhoCorasick([text[:ANCHOR].encode() for text in texts])
    with _cpu_time() as seconds:
        middle = daachorse.DoubleArrayAhoCorasick([text[len(text) // 2 :][:ANCHOR].encode() for text in texts])
    costs.peer_build_s = seconds[0]
    tell(f"{name}: measuring {prompts} prompts")
    arms: dict[str, Arm] = {
        LAZYRAG: lambda prompt: [(o.start, o.chunk_id) for o in segmenter.find(prompt.text)],
        FIRST: lambda prompt: _by_automaton(first, prompt.text, texts, lambda text: 0),
        MIDDLE: lambda prompt: _by_automaton(middle, prompt.text, texts, lambda text: len(text) // 2),
        FIND: lambda prompt: [(prompt.text.find(texts[i]), i) for _, i in _retrieved(prompt)],
    }
    result.rows.extend(_measured(name, arms, texts, ids, options.seed, prompts))


def tables(result: Result) -> list[str]:
    """Everything as lines of Markdown."""
    machine = result.machine
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    lines = [
        f"machine: {machine['cpu']}, {machine['cores']} cores",
        f"versions: {versions}; commit {machine['commit']}",
    ]
    body = [
        (
            row.corpus,
            row.arm,
            *(report.number(ms) for ms in (row.p50, row.p99)),
            f"{row.p99 / row.p50:.2f}",
            f"{row.ratio:.3f}",
        )
        for row in result.rows
    ]
    lines += ["", *report.table(body, ("corpus", "arm", "p50 ms", "p99 ms", "p99 / p50", "lazyrag / it")), ""]
    head = (
        "corpus",
        "chunks",
        "build s",
        "its peer's",
        "MB",
        "open s",
        "1 add / build",
        "1 removal / build",
        "checked",
    )
    costs = [
        (
            name,
            str(cost.chunks),
            *(report.number(x) for x in (cost.build_s, cost.peer_build_s, cost.index_bytes / 1e6, cost.open_s)),
            *(f"{max(times) / cost.build_s:.2%}" for times in (cost.add_s, cost.remove_s)),
            str(cost.checked),
        )
        for name, cost in result.costs.items()
    ]
    return [*lines, *report.table(costs, head)]


# ---------------------------------------------------------------- the index


def _indexed(chunks: dict[ChunkId, str], options: Options, costs: Costs, folder: Path) -> AnchorIndex:
    """An index that was saved, mapped and changed; `chunks` changes with it."""
    built = AnchorIndex(secret=SECRET)
    with _cpu_time() as seconds:
        built.add(chunks.items())
    costs.build_s = seconds[0]
    built.save(folder)
    costs.file_bytes = sum(path.stat().st_size for path in folder.iterdir())
    with _cpu_time() as seconds:
        index = AnchorIndex.load(folder, secret=SECRET)
    costs.open_s = seconds[0]
    rng = np.random.default_rng(options.seed + 1)
    added = Corpus(options.change * options.changes).chunks(options.seed + 1)
    for _ in range(options.changes):
        new = {chunk_id(text): text for text in islice(added, options.change)}
        with _cpu_time() as seconds:
            index.add(new.items())
        costs.add_s += seconds
        ids = list(chunks)
        old = [ids[i] for i in rng.choice(len(ids), options.change, replace=False)]
        with _cpu_time() as seconds:
            index.remove(old)
        costs.remove_s += seconds
        for id in old:
            del chunks[id]
        chunks |= new
        with _cpu_time() as seconds:
            index.save(folder)
        costs.save_s += seconds
    costs.index_bytes = index.num_bytes
    return index


def _check(segmenter: Segmenter, chunks: dict[ChunkId, str], corpus: Corpus, options: Options, costs: Costs) -> None:
    matcher = Matcher(chunks.items())
    texts = list(chunks.values())
    rng = np.random.default_rng(options.seed + 2)
    words = Words(rng)
    for _ in range(options.checked):
        prompt = puzzling(texts, rng, words, overlap=corpus.overlap)
        if faults := matcher.faults(prompt, segmenter.find(prompt), cut_loss=CUT_LOSS):
            raise WrongAnswerError("A prompt was segmented wrongly; no figure is measured:", why="; ".join(faults))
        costs.checked += 1


# ---------------------------------------------------------------- its peers


def _by_automaton(
    automaton: Any, prompt: str, texts: Sequence[str], offset_in: Callable[[str], int]
) -> list[tuple[int, int]]:
    found = []
    for start, _, i in automaton.find_overlapping(prompt.encode()):
        text = texts[i]
        start -= offset_in(text)
        if prompt.startswith(text, start):
            found.append((start, i))
    return found


def _retrieved(prompt: Prompt) -> list[tuple[int, int]]:
    """So many of a prompt's chunks, from all over it."""
    return prompt.chunks[:: len(prompt.chunks) // RETRIEVED][:RETRIEVED]


# ---------------------------------------------------------------- measuring


def _measured(
    corpus: str, arms: dict[str, Arm], texts: Sequence[str], ids: Sequence[ChunkId], seed: int, prompts: int
) -> list[Row]:
    rng = np.random.default_rng(seed + 3)
    words = Words(rng)
    times: dict[str, list[float]] = {name: [] for name in arms}
    names = list(arms)
    gc.freeze()  # the collector need not look through a million texts, which an application does not hold in memory
    for k in range(WARM_UP + prompts):
        prompt = retrieved(texts, rng, words)
        names.append(names.pop(0))  # who begins changes, so that each finds the caches as the others leave them
        for name in names:
            if name == FIRST and k % SELDOM:
                continue
            start = time.thread_time_ns()
            found = arms[name](prompt)
            elapsed = (time.thread_time_ns() - start) / 1e6
            expected = _retrieved(prompt) if name == FIND else prompt.chunks
            if sorted(found) != [(start, ids[i] if name == LAZYRAG else i) for start, i in expected]:
                raise WrongAnswerError(f"{name} did not find the chunks of a prompt.")
            if k >= WARM_UP:
                times[name].append(elapsed)
    gc.unfreeze()
    ours = median(times[LAZYRAG])
    rows = []
    for name, values in times.items():
        values.sort()
        p50, p99 = median(values), values[rank(len(values), 99) - 1]
        rows.append(Row(corpus, name, p50, p99, values[0], values[-1], len(values), ours / p50))
    return rows


@contextmanager
def _cpu_time() -> Iterator[list[float]]:
    """Takes the CPU seconds of all threads that the block needs."""
    taken: list[float] = []
    start = time.process_time()
    yield taken
    taken.append(time.process_time() - start)
