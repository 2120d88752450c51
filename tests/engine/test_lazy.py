"""Chunks at any place of a prompt give the answers that the oracle gives, however steps are cut and scheduled."""

from zlib import crc32

import pytest
from engines import Config, Text
from oracle import Prompt, Use

CONFIGS = [
    Config("sync"),
    Config("budget-48", budget=48),
    Config("async", is_async=True),
    Config("async-budget-48", is_async=True, budget=48),
]
pytestmark = pytest.mark.parametrize("engine", CONFIGS, ids=str, indirect=True)

PAD = 1  # the tiny model's start token, see requests.pad_token
LENGTHS = {"A": 37, "B": 64, "C": 5, "D": 50, "E": 90, "F": 16, "G": 1}


class Corpus:
    """Chunks A to G of fixed lengths, literals, and a preamble or a sink: new for every test."""

    def __init__(self, name, prefix_len=0, sink_len=0):
        self.text = Text(crc32(name.encode()))
        self.chunks = {name: Use(self.text(n)) for name, n in LENGTHS.items()}
        self.prefix, self.sink = self.text(prefix_len), self.text(sink_len)
        self.opening, self.between, self.question = self.text(11), self.text(5), self.text(21)

    def __getitem__(self, name):
        return self.chunks[name]

    def prompt(self, *parts, salt=""):
        """Parts as they are, chunks by their names."""
        return Prompt([self[p] if isinstance(p, str) else p for p in parts], self.prefix, salt, self.sink)

    def usual(self, names, salt=""):
        """opening A between B between ... question"""
        parts = [part for name in names for part in (name, self.between)]
        return self.prompt(self.opening, *parts[:-1], self.question, salt=salt)

    def padded(self, names):
        """Tokens of chunks and preamble or sink, padded to whole blocks."""
        return sum(-(-n // 16) * 16 for n in (len(self.prefix + self.sink), *(LENGTHS[name] for name in names)))

    def partly(self, name, *computed):
        """The parts of a chunk of which the given ranges are computed in place."""
        chunk, parts, at = self[name].chunk, [], 0
        for start, end in [*computed, (len(chunk), len(chunk))]:
            parts += [Use(chunk, at, start - at, whole=True)] if at < start else []
            parts += [chunk[start:end]] if start < end else []
            at = end
        return parts


BEHIND = {"alone": {}, "behind-19": {"prefix_len": 19}, "behind-32": {"prefix_len": 32}, "sink-4": {"sink_len": 4}}
"""Chunks computed alone, behind a preamble that does not or does fill its blocks, or behind a sink."""


@pytest.fixture(params=BEHIND.values(), ids=BEHIND)
def corpus(request):
    return Corpus(request.node.name, **request.param)


@pytest.fixture
def alone(request):
    return Corpus(request.node.name)


def num_preambles(corpus):
    return 1 if corpus.prefix or corpus.sink else 0


def test_the_configuration_is_what_it_says(engine):
    """The CPU platform switches asynchronous scheduling off silently; these tests must not lose it unnoticed."""
    assert engine.worker.model_runner.use_async_scheduling == engine.config.is_async
    assert (engine.core.batch_queue is not None) == engine.config.is_async


def test_cold_chunks_are_computed_once_each(engine, corpus):
    (result,) = engine.check(corpus.usual("ABC"), children=3 + num_preambles(corpus), cached=[corpus.padded("ABC")])
    assert result.report["sources"] == ["computed"] * 3


def test_hot_chunks_are_not_computed_again(engine, corpus):
    engine.check(corpus.usual("ABC"))
    # The literals between the chunks are found, too: of 42, two whole blocks.
    (result,) = engine.check(corpus.usual("ABC"), children=0, cached=[corpus.padded("ABC") + 32])
    assert result.report["sources"] == ["hbm"] * 3


def test_reordered_chunks_are_reused_and_nothing_else_is(engine, corpus):
    engine.check(corpus.usual("ABC"))
    engine.check(corpus.usual("CAB"), children=0, cached=[corpus.padded("ABC")])


def test_a_chunk_twice_in_a_prompt(engine, corpus):
    once = 1 + num_preambles(corpus)
    engine.check(corpus.prompt(corpus.opening, "A", corpus.between, "A", "A", corpus.question), children=once)
    engine.check(corpus.prompt("A", corpus.between, "A", corpus.question), children=0)


def test_chunks_beside_each_other(engine, corpus):
    engine.check(corpus.prompt("A", "B", "C", corpus.question))
    engine.check(corpus.prompt("G", "F", "G", corpus.text(1), "F", "E", corpus.question))


def test_literals_of_one_token(engine, corpus):
    one = corpus.text
    engine.check(corpus.prompt(one(1), "A", one(1), "B", one(1), "C", one(1)))


def test_a_preamble_or_text_without_chunks(engine, corpus):
    engine.check(corpus.prompt(corpus.text(45)), children=1 if corpus.prefix else 0)


def test_chunks_beside_ordinary_requests(engine, corpus):
    ordinary = [Prompt([corpus.text(n)]) for n in (40, 3)]
    lazy = [
        corpus.prompt(corpus.opening, "B", corpus.between, "D", corpus.question),
        corpus.prompt("E", corpus.between, "A", corpus.text(1), "D", corpus.question),
        corpus.prompt(corpus.opening, "D", corpus.text(7)),
        corpus.prompt(corpus.text(1), "C", "E", corpus.text(1), "A", corpus.between, "B", corpus.question),
    ]
    engine.check(lazy[0], ordinary[0], lazy[1], ordinary[1], *lazy[2:], max_tokens=30)


def test_requests_in_flight_share_the_computation_of_a_chunk(engine, corpus):
    engine.check(corpus.usual("AB"), corpus.usual("BC"), corpus.usual("CA"), children=3 + num_preambles(corpus))


def test_two_salts_share_nothing(engine, corpus):
    everything = 2 + num_preambles(corpus)
    for salt in ("x", "y", ""):
        engine.check(corpus.usual("AB", salt=salt), children=everything, cached=[corpus.padded("AB")])
    engine.check(corpus.usual("BA", salt="x"), children=0, cached=[corpus.padded("AB")])


def test_a_conversations_second_turn_reuses_the_first(engine, corpus):
    text = corpus.text(30)
    (first,) = engine.check(corpus.prompt("A", text))
    second = corpus.prompt("A", text + first.token_ids, corpus.between, "E", corpus.question)
    # Of text and answer (42 tokens) two whole blocks are found, though E now stands in front of them in the table.
    engine.check(second, cached=[corpus.padded("AE") + 32])


def test_a_segment_that_begins_inside_its_chunk(engine, corpus):
    chunk = corpus["E"].chunk
    tail = Use(chunk, offset=32)
    engine.check(corpus.prompt(corpus.opening + chunk[:32], tail, corpus.question), children=1 + num_preambles(corpus))
    engine.check(corpus.prompt(corpus.text(4) + chunk[:32], tail, corpus.between, "A", corpus.question))
    # The whole chunk is resident by now.
    engine.check(corpus.prompt(corpus.between, "E", corpus.text(9)), children=0)


def test_a_segment_that_ends_inside_its_chunk(engine, corpus):
    chunk = corpus["E"].chunk
    engine.check(corpus.usual("E"))
    at_a_block, inside_a_block = Use(chunk, length=48), Use(chunk, length=53)
    engine.check(corpus.prompt(corpus.opening, at_a_block, corpus.question), children=0)
    engine.check(corpus.prompt(corpus.between, inside_a_block, corpus.question), children=1)
    middle = Use(chunk, offset=16, length=40)
    engine.check(corpus.prompt(chunk[:16], middle, corpus.question))


def test_a_chunk_whose_blocks_are_partly_computed_in_place(engine, corpus):
    """The head of each chunk (LegoLink), or blocks from anywhere in it (CacheBlend); cold, hot and reordered."""
    once = num_preambles(corpus)
    head = [corpus.opening, *corpus.partly("E", (0, 16)), corpus.between, *corpus.partly("A", (0, 32)), corpus.question]
    engine.check(corpus.prompt(*head), children=2 + once)
    (hot,) = engine.check(corpus.prompt(*head), children=0)
    assert hot.report["sources"] == ["hbm"] * 2
    first_and_last = corpus.partly("E", (0, 16), (80, 90))
    engine.check(corpus.prompt(*corpus.partly("A", (16, 32)), *first_and_last, corpus.between), children=0)
    engine.check(corpus.prompt("A", *corpus.partly("E", (32, 48), (64, 80)), corpus.question), children=0)


def test_parts_of_a_cold_chunk_share_one_child(engine, corpus):
    parts = corpus.partly("E", (16, 32), (48, 64))
    (result,) = engine.check(corpus.prompt(corpus.opening, *parts, corpus.question), children=1 + num_preambles(corpus))
    assert result.report["sources"] == ["computed"] * 3
    engine.check(corpus.prompt("E", corpus.question), children=0)


def test_modes_share_nothing_but_what_means_the_same(engine, request):
    """The same chunk alone, behind two sinks and behind preambles of the same tokens: one engine, four meanings."""
    ours = Corpus(request.node.name, sink_len=4)
    other, alone, prefix = (Corpus(request.node.name, **kwargs) for kwargs in ({}, {}, {"prefix_len": 4}))
    other.sink = ours.sink[::-1]
    everything = [corpus.prompt(corpus.opening, "A", "B", corpus.question) for corpus in (ours, other, alone, prefix)]
    for prompt, children in zip(everything, (3, 3, 2, 0), strict=True):
        engine.check(prompt, children=children)
    for prompt in reversed(everything):
        engine.check(prompt, children=0)
    # A prompt that begins with the sink's tokens and the chunk is the text that was computed, and still its own.
    engine.check(Prompt([ours.sink, ours["A"], ours.question], sink=ours.sink), children=0)
    engine.check(Prompt([ours.sink + ours["A"].chunk + ours.question]))


def test_an_aborted_request_leaves_nothing_behind(engine, corpus):
    prompt = corpus.usual("ABE", salt="aborted")
    core = engine.llm.llm_engine
    core.add_request("gone", {"prompt_token_ids": prompt.token_ids, "cache_salt": "aborted"}, engine.params(prompt))
    core.step()
    core.abort_request(["gone"], internal=False)
    engine.check(Prompt([corpus.text(20)]))
    engine.check(prompt)
    assert engine.llm.reset_prefix_cache(), "blocks or pins leaked"


# ---------------------------------------------------------------- cache identity


def test_literals_at_other_places_between_the_same_chunks(engine, alone):
    """Each prompt has the chunks and the literal tokens of the one before, but another meaning for some of them."""
    opening, between, question = alone.opening, alone.between, alone.question
    engine.check(alone.usual("ABC"), cached=[alone.padded("ABC")])
    engine.check(alone.prompt(opening + between, "A", "B", between, "C", question), children=0)
    engine.check(alone.prompt(opening[:7], "A", opening[7:] + between, "B", between, "C", question), children=0)
    engine.check(alone.prompt(opening, "A", alone.text(5), "B", between, "C", question), children=0)


def test_chunks_that_differ_in_valid_length_only(engine, alone):
    """A padded chunk and a chunk that spells the pads out have the same tokens, but not the same meaning."""
    opening, between, question = alone.opening, alone.between, alone.question
    longer = Use(alone["A"].chunk + [PAD] * 3)
    engine.check(alone.usual("AB"))
    engine.check(alone.prompt(opening, longer, between, "B", question), children=1, cached=[alone.padded("AB")])


def test_parts_that_end_in_the_same_block(engine, alone):
    """The chunk's first block once as text and once reused: the text in front of the rest is the same."""
    chunk, opening, between, question = alone["A"].chunk, alone.opening, alone.between, alone.question
    engine.check(alone.prompt(opening + chunk[:16], Use(chunk, offset=16), between, question))
    engine.check(alone.prompt(opening + chunk[:16], "A", between, question), cached=[alone.padded("A") + 16])


def test_an_ordinary_prompt_shares_blocks_with_chunks_where_they_mean_the_same(engine, alone):
    engine.check(alone.prompt("F", alone.question))
    # A chunk that fills its blocks, at the start: the ordinary prompt with these tokens is the same text.
    engine.check(Prompt([alone["F"].chunk + alone.question]), cached=[32])
    engine.check(alone.prompt("A", alone.question))
    spelled_out = alone["A"].chunk + [PAD] * (48 - LENGTHS["A"])
    engine.check(Prompt([spelled_out + alone.question]), cached=[32])
    # Literals in front of the first chunk.
    long = alone.text(40)
    engine.check(alone.prompt(long, "A", alone.question))
    engine.check(Prompt([long + alone.text(9)]), cached=[32])
    engine.check(Prompt([long + alone.text(9)], salt="z"), cached=[0])


def test_ordinary_requests_are_the_same_to_the_last_bit_before_and_after(engine, corpus):
    """Nothing that lazy requests do poisons the cache: cold against cold, hot against hot."""
    shared = corpus["B"].chunk
    ordinary = [Prompt([shared + corpus.text(9)]), Prompt([corpus.prefix + shared + corpus.text(30)])]

    def cold_and_hot():
        assert engine.llm.reset_prefix_cache()
        return [engine.generate(prompt) for _ in range(2) for prompt in ordinary]

    before = cold_and_hot()
    engine.check(corpus.usual("ABC"), *ordinary, corpus.usual("CB"))
    engine.check(corpus.usual("EBB"))
    assert [engine.generate(prompt) for prompt in ordinary] == before[2:]
    assert cold_and_hot() == before
