import json
import os
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

from lazyrag.errors import ConfigError
from lazyrag.splitter import Splitter
from lazyrag.tokens import Tokenizer
from lazyrag.types import Document, canonical, chunk_id

PROSE = (
    "Caches keep what was expensive to compute. A key-value cache does so for attention.\n\n"
    "Retrieval brings documents to a question, in any order; their text is the same every time.\n"
    "That is why their keys and values should be, too.\n\n"
)


class WordTokenizer:
    """A token is up to five letters with the space before them, or any other character."""

    fingerprint = "words"

    def __init__(self):
        self.pieces = []
        self.ids = {}

    def encode_plain_with_offsets(self, text):
        matches = list(re.finditer(r"\s?\w{1,5}|.", text, re.DOTALL))
        for match in matches:
            if match[0] not in self.ids:
                self.ids[match[0]] = len(self.pieces)
                self.pieces.append(match[0])
        return [self.ids[m[0]] for m in matches], [m.span() for m in matches]

    def decode(self, ids):
        return "".join(self.pieces[i] for i in ids)


class BpeTokenizer:
    """Byte-level BPE: an emoji is several tokens with one offset; a text alone can need more tokens than in context."""

    fingerprint = "bpe"

    def __init__(self):
        self.inner = RustTokenizer(models.BPE())
        self.inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self.inner.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        self.inner.train_from_iterator(
            [PROSE] * 3, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
        )

    def encode_plain_with_offsets(self, text):
        encoding = self.inner.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def decode(self, ids):
        return self.inner.decode(ids)


BPE = BpeTokenizer()
ROOT = Path(__file__).parents[2]
MODEL = Path(os.environ.get("LAZYRAG_TEST_MODEL", ROOT / ".models" / "smollm2-135m-fp32"))
DATA = Path(os.environ.get("LAZYRAG_TEST_DATA", ROOT.parent / "shared" / "data"))
texts = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=600),
    st.lists(
        st.sampled_from(
            [*PROSE.split(), "\n\n", "\n", " ", "\t", "。", "你好。", "🦊🦊", "x" * 70, "a.b.c", "\f", "Né\u0301"]
        ),
        max_size=400,
    ).map(" ".join),
    st.lists(st.sampled_from("ab. \n🦊好\u2029"), max_size=500).map("".join),
)


def split(text, tokenizer=None, **settings):
    return Splitter(tokenizer or WordTokenizer(), **settings).split(Document("d", text, "source.md"))


def chunk_texts(text, **settings):
    return [encoded.chunk.text for encoded in split(text, **settings)]


@pytest.mark.parametrize("tokenizer", [WordTokenizer(), BPE], ids=["words", "bpe"])
@settings(max_examples=250, deadline=None)
@given(text=texts, chunk_size=st.integers(16, 80))
def test_chunks_stand_in_the_text_in_order_and_leave_out_only_whitespace(tokenizer, text, chunk_size):
    place = 0
    for encoded in split(text, tokenizer, chunk_size=chunk_size):
        chunk = encoded.chunk
        assert text[chunk.start : chunk.end] == chunk.text == canonical(chunk.text) != ""
        assert chunk.id == chunk_id(chunk.text)
        assert text[place : chunk.start].strip() == ""
        assert chunk.num_tokens == len(tokenizer.encode_plain_with_offsets(chunk.text)[0]) <= chunk_size
        assert tokenizer.decode(encoded.token_ids) == chunk.text
        place = chunk.end
    assert text[place:].strip() == ""


@settings(max_examples=250, deadline=None)
@given(text=texts, chunk_size=st.integers(16, 80), data=st.data())
def test_with_overlap_the_chunks_move_on_and_still_cover_everything(text, chunk_size, data):
    overlap = data.draw(st.integers(1, chunk_size // 4))
    covered, last_start = 0, -1
    for encoded in split(text, BPE, chunk_size=chunk_size, overlap=overlap):
        chunk = encoded.chunk
        assert text[chunk.start : chunk.end] == chunk.text
        assert chunk.num_tokens <= chunk_size
        assert chunk.start > last_start
        assert chunk.start <= covered or text[covered : chunk.start].strip() == ""
        covered, last_start = max(covered, chunk.end), chunk.start
    assert text[covered:].strip() == ""


def test_overlap_repeats_the_end_of_the_chunk_before():
    text = " ".join(f"w{i}" for i in range(100))
    first, second, *_ = chunk_texts(text, chunk_size=16, overlap=4)
    assert first.split()[-3:] == second.split()[:3]


def test_a_short_document_is_one_chunk():
    assert chunk_texts("  One two three.\n") == ["One two three."]


@pytest.mark.parametrize("text", ["", " \n\t\u2003"])
def test_a_document_without_text_has_no_chunks(text):
    assert split(text) == []


def test_a_paragraph_break_is_better_than_a_sentence_end_and_that_than_a_line_and_a_word():
    words = "One two three four five six"  # 6 tokens
    assert chunk_texts(f"{words}. {words}\n\n{words}. {words}", chunk_size=24)[0] == f"{words}. {words}"
    assert chunk_texts(f"{words} {words}. {words}\n{words}", chunk_size=20)[0] == f"{words} {words}."
    assert chunk_texts(f"{words} {words}\n{words} {words}", chunk_size=20)[0] == f"{words} {words}"
    assert chunk_texts(f"{words} {words} {words} {words}", chunk_size=20)[0] == f"{words} {words}"


def test_an_abbreviation_before_a_small_letter_ends_no_sentence():
    text = "a b c d e f g h approx. i j k l m. N o p q r s t u"
    assert chunk_texts(text, chunk_size=20)[0].endswith("m.")


def test_a_script_without_spaces_is_cut_behind_its_full_stops():
    chunks = chunk_texts("我喜欢茶。" * 12, chunk_size=16)
    assert len(chunks) == 2
    assert all(chunk.endswith("。") for chunk in chunks)


def test_one_token_too_many_leaves_no_crumb():
    text = " ".join(f"word{i:02}" for i in range(33))  # 66 tokens
    sizes = [encoded.chunk.num_tokens for encoded in split(text, chunk_size=64)]
    assert len(sizes) == 2
    assert min(sizes) >= 24


def test_a_long_document_is_tokenised_in_windows_and_covered_all_the_same():
    text = "".join(f"Sentence number {i} says little. " for i in range(4000)) + " " * 50_000 + "The end."
    longest = 0

    class Counting(WordTokenizer):
        def encode_plain_with_offsets(self, text):
            nonlocal longest
            longest = max(longest, len(text))
            return super().encode_plain_with_offsets(text)

    chunks = [encoded.chunk for encoded in split(text, Counting(), chunk_size=32)]
    assert "".join("".join(chunk.text for chunk in chunks).split()) == "".join(text.split())
    assert longest < len(text) // 4


def test_every_chunk_names_its_page():
    pages = ("alpha " * 20, "beta " * 20, "gamma " * 20)
    offsets = (0, len(pages[0]), len(pages[0]) + len(pages[1]))
    document = Document("d", "".join(pages), "book.pdf", pages=offsets)
    for encoded in Splitter(WordTokenizer(), chunk_size=16).split(document):
        first_word = encoded.chunk.text.split()[0]
        assert encoded.chunk.page == ["alpha", "beta", "gamma"].index(first_word) + 1
    assert all(encoded.chunk.page is None for encoded in split("no pages here"))


def test_a_chunk_knows_its_document():
    document = Document("id", "Some text.", "source.md", "Title", {"author": "A"})
    (encoded,) = Splitter(WordTokenizer()).split(document)
    chunk = encoded.chunk
    assert (chunk.document_id, chunk.source, chunk.title, chunk.metadata) == (
        "id",
        "source.md",
        "Title",
        {"author": "A"},
    )


def test_a_text_that_decodes_to_another_one_is_kept_but_has_no_tokens_to_reuse():
    class Lowercasing(WordTokenizer):
        def decode(self, ids):
            return super().decode(ids).lower()

    loud, quiet = split(
        "LOUD WORDS HERE\n\nand quiet words here, a few more of them, so that they fill more than one",
        Lowercasing(),
        chunk_size=16,
    )
    assert loud.token_ids == ()
    assert loud.chunk.num_tokens == 11
    assert len(quiet.token_ids) == quiet.chunk.num_tokens


def test_the_recipe_changes_with_whatever_changes_the_chunks():
    tokenizer, other = WordTokenizer(), WordTokenizer()
    other.fingerprint = "other"
    splitters = [Splitter(tokenizer), Splitter(tokenizer, 128), Splitter(tokenizer, 256, 8), Splitter(other)]
    assert len({splitter.recipe for splitter in splitters}) == 4
    assert Splitter(tokenizer).recipe == Splitter(tokenizer, 256, 0).recipe


@pytest.mark.parametrize("settings", [{"chunk_size": 15}, {"overlap": -1}, {"chunk_size": 64, "overlap": 17}], ids=str)
def test_sizes_that_do_not_go_together_are_refused(settings):
    with pytest.raises(ConfigError, match=r"chunk_size is|overlap is"):
        Splitter(WordTokenizer(), **settings)


@pytest.mark.skipif(not (MODEL / "tokenizer.json").exists(), reason="no model: python examples/models.py makes one")
@pytest.mark.skipif(not DATA.is_dir(), reason="no real passages: set LAZYRAG_TEST_DATA to a folder of .jsonl files")
def test_real_passages_are_split_by_a_real_tokenizer():
    rows = (DATA / "musique_cacheblend_80.jsonl").read_text().splitlines()
    text = "\n\n".join(passage["text"] for row in rows[:30] for passage in json.loads(row)["docs"])
    chunks = split(text, Tokenizer.from_folder(MODEL))
    place = 0
    for encoded in chunks:
        chunk = encoded.chunk
        assert text[chunk.start : chunk.end] == chunk.text
        assert text[place : chunk.start].strip() == ""
        assert len(encoded.token_ids) == chunk.num_tokens <= 256
        place = chunk.end
    assert text[place:].strip() == ""
    # Few chunks are much shorter than they may be: a short one is a request for little reuse.
    assert sum(encoded.chunk.num_tokens >= 128 for encoded in chunks) > 0.9 * len(chunks)
