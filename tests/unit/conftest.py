"""Small tokenizers of the kinds that models use, a segmenter made from texts, and an engine that keeps KV on disk."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Raw

from lazyrag.anchors import AnchorIndex
from lazyrag.backend.engine import Cancel, Deliver, Delta, Event, Request
from lazyrag.backend.fake import FakeEngine
from lazyrag.backend.hashing import chunk_key
from lazyrag.backend.tiers.disk import DiskTier, Form
from lazyrag.segmenter import Segmenter
from lazyrag.tokens import Tokenizer
from lazyrag.types import COMPUTED, Segment, canonical, chunk_id

REPO = Path(__file__).parents[2]

SENTENCES = [
    "The quick brown fox jumps over the lazy dog, and the dog sleeps on.",
    "In 1901 the first Nobel Prize in Physics was awarded to Wilhelm Conrad Röntgen, of Germany.",
    "Context information is below. Given the context and no prior knowledge, answer the question.",
    "def main(argv: list[str]) -> int:\n    return len(argv)\n\n- one\n- two\n",
    "漢字かな交じり文は日本語の標準的な表記である。 Café, naïve, façade. 😀 👩‍👩‍👧",
]


def byte_level(*, bos: bool = False) -> Raw:
    """A byte-level BPE like those of SmolLM2, Qwen and (with `bos`) Llama 3."""
    raw = Raw(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    special = ["<|im_start|>", "<|im_end|>", "<|begin|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    raw.train_from_iterator(SENTENCES, trainer)
    raw.add_tokens([AddedToken("<think>", special=False), AddedToken("</think>", special=False)])
    if bos:
        raw.post_processor = processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", 2)])
    return raw


def sentencepiece(*, dummy: str = "first", model: str = "bpe") -> Raw:
    """A SentencePiece-like tokenizer; `dummy`: "first" or "always" (Metaspace), or "prepend" (Llama 2's normalizer)."""
    special = ["<unk>", "<s>", "</s>"]
    trainer: Any
    if model == "bpe":
        raw = Raw(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
        tokens = [*special, *(f"<0x{i:02X}>" for i in range(256))]
        trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=tokens, show_progress=False)
    else:
        raw = Raw(models.Unigram())
        trainer = trainers.UnigramTrainer(
            vocab_size=250, special_tokens=special, unk_token="<unk>", show_progress=False
        )
    if dummy == "prepend":
        raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        raw.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=dummy, split=model != "bpe")
    raw.train_from_iterator(SENTENCES, trainer)
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    raw.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return raw


def spec_of(raw: Raw) -> dict[str, Any]:
    """The parsed tokenizer.json; byte pieces are ordinary vocabulary, as in SentencePiece models."""
    spec: dict[str, Any] = json.loads(raw.to_str())
    spec["added_tokens"] = [token for token in spec["added_tokens"] if not token["content"].startswith("<0x")]
    return spec


CONFIGS = {
    "byte-level": {"eos_token": "<|im_end|>", "pad_token": "<|im_end|>"},
    "byte-level with BOS": {"bos_token": "<|begin|>", "eos_token": "<|im_end|>"},
    "metaspace": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    "prepend": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    "unigram": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
}


@pytest.fixture(scope="session")
def specs() -> dict[str, dict[str, Any]]:
    """Kind -> parsed tokenizer.json."""
    return {
        "byte-level": spec_of(byte_level()),
        "byte-level with BOS": spec_of(byte_level(bos=True)),
        "metaspace": spec_of(sentencepiece()),
        "prepend": spec_of(sentencepiece(dummy="prepend")),
        "unigram": spec_of(sentencepiece(dummy="always", model="unigram")),
    }


@pytest.fixture(scope="session")
def tokenizers(specs: dict[str, dict[str, Any]]) -> dict[str, Tokenizer]:
    """Kind -> tokenizer."""
    return {kind: Tokenizer(spec, CONFIGS[kind]) for kind, spec in specs.items()}


@pytest.fixture(params=list(CONFIGS))
def tokenizer(request: pytest.FixtureRequest, tokenizers: dict[str, Tokenizer]) -> Tokenizer:
    """Each kind in turn."""
    return tokenizers[request.param]


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    folder = REPO / ".models" / "smollm2-135m-fp32"
    if not (folder / "tokenizer.json").exists():
        pytest.skip("SmolLM2 is not here; make it with: python examples/models.py")
    return folder


@pytest.fixture(scope="session")
def smollm2(smollm2_folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(smollm2_folder)


@pytest.fixture(scope="session")
def model_folder(specs: dict[str, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Writes tokenizer files of a kind into a folder."""

    def write(kind: str, **config: Any) -> Path:
        folder = tmp_path_factory.mktemp("model")
        (folder / "tokenizer.json").write_text(json.dumps(specs[kind]), encoding="utf-8")
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", **CONFIGS[kind], **config}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
        return folder

    return write


@pytest.fixture(scope="module", autouse=True)
def mode() -> Iterator[None]:
    """Models that were never calibrated run in mode exact, and these tests are of reuse."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LAZYRAG_MODE", "lazy")
        yield


def segmenter_of(texts: Iterable[str]) -> Segmenter:
    """A segmenter that knows these texts."""
    known = {chunk_id(text): canonical(text) for text in texts}
    index = AnchorIndex(secret=b"tests")
    index.add(known.items())
    return Segmenter(index, lambda ids: {id: known[id] for id in ids if id in known})


class SavingEngine(FakeEngine):
    """Keeps the KV of chunks on disk as a real engine does: under the names that the plugin gives them."""

    def __init__(self, model: Path, root: Path, fingerprint: str = "0123456789abcdef" * 4, **settings: Any) -> None:
        super().__init__(model, **settings)
        self._info = replace(self._info, fingerprint=fingerprint)
        self.tier = DiskTier(root, fingerprint)

    def submit(self, request: Request, deliver: Deliver) -> Cancel:
        def save(event: Event) -> None:
            if isinstance(event, Delta) and event.reuse is not None:
                for segment, source in zip(request.segments, event.reuse.sources, strict=True):
                    if source == COMPUTED:
                        self._save(request, segment)
            deliver(event)

        return super().submit(request, save)

    def _save(self, request: Request, s: Segment) -> None:
        tokens = request.token_ids[s.start - s.offset : s.start + s.num_tokens]
        key = chunk_key(tokens, prefix=request.token_ids[: request.prefix_len], salt=request.namespace or None)
        form = Form(("a", "b"), "BF16", (len(tokens), 1, 2))
        self.tier.save(key, form, np.full(form.num_bytes, len(tokens) % 256, np.uint8), namespace=request.namespace)


@pytest.fixture(scope="session")
def saving_engine() -> Callable[..., SavingEngine]:
    return SavingEngine


@pytest.fixture(scope="session")
def make_segmenter() -> Callable[..., Segmenter]:
    return segmenter_of


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """Real questions with passages."""
    folder = Path(os.environ.get("LAZYRAG_TEST_DATA") or REPO.parent / "shared" / "data")
    if not folder.is_dir():
        pytest.skip("no test data: set LAZYRAG_TEST_DATA to a folder with the JSONL files of questions and passages")
    return folder
