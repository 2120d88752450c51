"""Text -> token ids, in two ways: *plain*, where no text can become a control token, and *template*, where it can.

Documents are encoded plainly: by a clone of the model's tokenizer without its added tokens, so that `<|im_end|>` in a
document is a run of ordinary tokens. (`split_special_tokens=True` of transformers is not enough: it leaves added tokens
with `special=False`, such as `<think>`, active.) What a chat template wrote is encoded with added tokens active.

A prompt is tokenised piece by piece. SentencePiece-like tokenizers put a dummy space in front of every text that they
encode; only the first piece of a prompt may get it (`start=True`), every other piece is encoded as it stands.
"""

from __future__ import annotations

import copy
import json
import re
import unicodedata
from collections.abc import Collection, Iterable, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

import tokenizers

from lazyrag.errors import ConfigError, InputError

Spec: TypeAlias = dict[str, Any]
"""A parsed tokenizer.json."""

PLAIN_RULES = b"lazyrag-plain-1"
"""Part of the fingerprint: changes when this file would give other ids for the same tokenizer.json and text."""

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """The text half's view of a model's tokenizer. Immutable; every method may be called from any thread.

    Attributes:
        fingerprint: hex digest of what decides token ids. The chat template has no part in it: it changes which text
            is sent, never the ids of a chunk.
        bos_id: the token that the model's tokenizer puts in front of a text, if it puts one (transformers 5 takes this
            from tokenizer.json alone and ignores `add_bos_token` in tokenizer_config.json; so does this class), else
            the configured BOS token, else None.
        add_bos: whether a string prompt starts with `bos_id`. A rendered chat never gets one: its template writes it.
        eos_id: the configured EOS token, or None.
        chat_template: Jinja source, or None.
        special_tokens: `bos_token`, `eos_token`, ... as a chat template sees them.
        control_tokens: the texts that template encoding turns into control tokens and plain encoding does not.
    """

    def __init__(self, spec: Spec, config: Mapping[str, Any], *, chat_template: str | None = None) -> None:
        # Truncation and padding are settings of the call that saved the file (MiniLM's cuts at 128 tokens).
        spec = {**spec, "truncation": None, "padding": None}
        self.fingerprint = blake2b(_dump(spec).encode() + PLAIN_RULES, digest_size=16).hexdigest()
        self.chat_template = chat_template
        self.special_tokens: Mapping[str, str] = MappingProxyType(
            {name: _content(config[name]) for name in _NAMED if config.get(name)}
        )
        spec = _with_named_tokens(spec, self.special_tokens.values())
        inner = _without_dummy_space(spec)
        control = [token for token in spec["added_tokens"] if _is_control(token)]
        self.control_tokens = tuple(token["content"] for token in control)
        self._folded_control = frozenset(map(_folded, self.control_tokens)) - {""}

        self._template_start = _build(spec)
        self._template = self._template_start if inner == spec else _build(inner)
        # Offsets are wanted as the model saw the text; a post-processor would trim spaces off them.
        self._plain = _build_inert({**inner, "post_processor": None}, control)
        self._plain_start = self._plain
        if inner != spec:
            self._plain_start = _build_inert({**spec, "post_processor": None}, control)

        front = _front_ids(self._template_start)
        self.add_bos = bool(front)
        self.bos_id = front[0] if front else self._named_id("bos_token")
        self.eos_id = self._named_id("eos_token")

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        """Read a model folder's tokenizer.json and tokenizer_config.json (and chat_template.jinja, if there is one).

        Raises:
            ConfigError: a file is missing or damaged, or a document could reach a control token through this tokenizer.
        """
        folder = Path(folder)
        spec = _read_json(folder / "tokenizer.json")
        config_path = folder / "tokenizer_config.json"
        config = _read_json(config_path) if config_path.exists() else {}
        template_path = folder / "chat_template.jinja"
        template = config.get("chat_template")
        if template_path.exists():
            template = template_path.read_text(encoding="utf-8")
        elif isinstance(template, list):
            template = {entry["name"]: entry["template"] for entry in template}.get("default")
        try:
            return cls(spec, config, chat_template=template)
        except ConfigError as error:
            raise ConfigError(f"The tokenizer in {folder} cannot be used.", why=str(error), fix=error.fix) from error

    # ---------------------------------------------------------------- encoding

    def encode_plain(self, text: str, *, start: bool = False) -> list[int]:
        """Encode text in which nothing may become a control token: chunks and message contents.

        Args:
            text: any text.
            start: whether the text stands at the start of a prompt (module docstring).

        Raises:
            InputError: the text holds a lone surrogate, which no tokenizer can encode.
        """
        return list(_encode(self._plain_start if start else self._plain, text).ids)

    def encode_plain_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """As `encode_plain`, with the half-open character range [start, end) of each token.

        A character that is split among tokens (the bytes of an emoji) lies in the range of each of them.
        """
        encoding = _encode(self._plain, text)
        return list(encoding.ids), list(encoding.offsets)

    def encode_template(self, text: str, *, start: bool = True, add_bos: bool = False) -> list[int]:
        """Encode text whose control tokens are meant: what a chat template or the application wrote.

        Args:
            text: any text.
            start: whether the text stands at the start of a prompt (module docstring).
            add_bos: whether to put the BOS token in front, if this tokenizer wants one and the text does not begin
                with it already.

        Raises:
            InputError: the text holds a lone surrogate.
        """
        ids = list(_encode(self._template_start if start else self._template, text).ids)
        return [*self.front(ids), *ids] if add_bos else ids

    def front(self, ids: Sequence[int]) -> list[int]:
        """What must be put in front of a string prompt with these ids: the BOS token or nothing."""
        return [self.bos_id] if self.add_bos and self.bos_id is not None and list(ids[:1]) != [self.bos_id] else []

    # ---------------------------------------------------------------- decoding

    def decode(self, ids: Sequence[int], *, start: bool = False, skip_special: bool = False) -> str:
        """The text that ids stand for, no space added or removed.

        Args:
            ids: token ids.
            start: whether they were encoded with `start=True`, so that a dummy space is taken off again.
            skip_special: leave special tokens out.
        """
        tokenizer = self._template_start if start else self._template
        return str(tokenizer.decode(list(ids), skip_special_tokens=skip_special))

    def round_trips(self, text: str) -> bool:
        """Whether plain encoding keeps the text exactly. If not, its KV would be that of another text."""
        try:
            return self.decode(self.encode_plain(text)) == text
        except InputError:
            return False

    def encode_chunk(self, text: str) -> tuple[int, ...]:
        """The plain ids of a chunk's text, wherever that comes from; empty if they do not stand for exactly it."""
        return tuple(self.encode_plain(text)) if self.round_trips(text) else ()

    def spells_control(self, text: str) -> bool:
        """Whether the text may hold a control token's text, as it is or as a normalizer may change it."""
        text = _folded(text)
        return any(token in text for token in self._folded_control)

    def _named_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self._template.token_to_id(token)


def _folded(text: str) -> str:
    return unicodedata.normalize("NFKC", text).casefold()


def _encode(tokenizer: tokenizers.Tokenizer, text: str) -> tokenizers.Encoding:
    try:
        return tokenizer.encode(text, add_special_tokens=False)
    except (UnicodeEncodeError, TypeError):
        if not isinstance(text, str) or _encodable(text):
            raise
    raise InputError(
        "A text cannot be tokenised:",
        why="it holds half of a surrogate pair, which is no character.",
        fix='Clean it first: text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").',
    )


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


# ---------------------------------------------------------------- making the clones


def _build(spec: Spec) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_str(_dump(spec))
    except Exception as error:  # the Rust side raises bare Exception
        raise ConfigError("tokenizer.json is damaged or of an unknown kind.", why=str(error)) from error


def _build_inert(spec: Spec, control: Sequence[Mapping[str, Any]]) -> tokenizers.Tokenizer:
    """A clone that gives no control token's id for any text.

    Leaving the added tokens out suffices where they are not in the model's own vocabulary, or where no merge leads to
    them. What the self-check still finds is taken out of the vocabulary, and checked again.

    Raises:
        ConfigError: a control token can still be reached.
    """
    spec = _without_added(spec, {token["content"] for token in control})
    tokenizer = _build(spec)
    if leaks := _leaks(tokenizer, control, spec):
        tokenizer = _build(_disarmed(spec, leaks))
        leaks = _leaks(tokenizer, control, spec)
    if leaks:
        raise ConfigError(
            f"Text in a document could become the control token {sorted(leaks)[0]!r},",
            why="and LazyRAG does not know how to keep this kind of tokenizer from it.",
            fix="Use a model with a byte-level BPE, SentencePiece BPE or Unigram tokenizer.",
        )
    return tokenizer


def _without_added(spec: Spec, contents: Collection[str]) -> Spec:
    """The spec without these added tokens, the other ones keeping their ids.

    The tokenizers package numbers added tokens anew if the model's vocabulary does not name them, so it must.
    """
    vocab = spec["model"]["vocab"]
    kept = [token for token in spec["added_tokens"] if token["content"] not in contents]
    if isinstance(vocab, list):  # Unigram: an id is a place in the list
        pieces = {piece for piece, _ in vocab}
        return {**spec, "added_tokens": [token for token in kept if token["content"] in pieces]}
    vocab = {**vocab, **{token["content"]: token["id"] for token in kept}}
    return {**spec, "added_tokens": kept, "model": {**spec["model"], "vocab": vocab}}


def _leaks(tokenizer: tokenizers.Tokenizer, control: Iterable[Mapping[str, Any]], spec: Spec) -> set[str]:
    """Control tokens that the clone gives when it meets their text. The unknown token steers nothing and is exempt."""
    unknown = _unknown_token(spec["model"])
    by_id = {token["id"]: token["content"] for token in control if token["content"] != unknown}
    out: set[str] = set()
    for text in by_id.values():
        for around in ("{}", " {}", "\n{}\n", "{}{}", "x{}x"):
            ids = tokenizer.encode(around.replace("{}", text), add_special_tokens=False).ids
            out.update(by_id[i] for i in ids if i in by_id)
    return out


def _disarmed(spec: Spec, contents: Collection[str]) -> Spec:
    """The spec with these tokens out of reach; every other text keeps its ids."""
    model = dict(spec["model"])
    vocab = model["vocab"]
    if isinstance(vocab, list):  # Unigram: an id is a place in the list, so the entry stays, as a piece of no text
        model["vocab"] = [["" if piece in contents else piece, score] for piece, score in vocab]
    else:
        model["vocab"] = {piece: i for piece, i in vocab.items() if piece not in contents}
    if "merges" in model:
        model["merges"] = [merge for merge in model["merges"] if not {*_parts(merge)} & set(contents)]
    return {**spec, "model": model}


def _parts(merge: str | Sequence[str]) -> tuple[str, str, str]:
    left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
    return left, right, left + right


def _unknown_token(model: Mapping[str, Any]) -> str | None:
    if model.get("unk_id") is not None and isinstance(model["vocab"], list):
        return str(model["vocab"][model["unk_id"]][0])
    return model.get("unk_token")


def _is_control(token: Mapping[str, Any]) -> bool:
    """Added tokens that are only spaces (GPT-NeoX, Gemma) or words (a vocabulary made larger) are text."""
    return bool(token["special"] or re.fullmatch(r"[\w\s▁]*", token["content"]) is None)


def _with_named_tokens(spec: Spec, names: Iterable[str]) -> Spec:
    """As in transformers: what tokenizer_config.json calls BOS, EOS, ... is an added token if the vocabulary has it."""
    added = list(spec.get("added_tokens") or [])
    known = {token["content"] for token in added}
    missing = {name for name in names if name not in known}
    if missing:
        tokenizer = _build({**spec, "added_tokens": added})
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        ids = {name: tokenizer.token_to_id(name) for name in sorted(missing)}
        added += [{"id": i, "content": name, **flags} for name, i in ids.items() if i is not None]
    return {**spec, "added_tokens": sorted(added, key=lambda token: token["id"])}


def _without_dummy_space(spec: Spec) -> Spec:
    """The spec without the space that SentencePiece-like tokenizers put in front of a text and take off in decoding."""
    spec = copy.copy(spec)
    spec["normalizer"] = _edit(spec.get("normalizer"), drop=lambda part: part["type"] == "Prepend")
    spec["pre_tokenizer"] = _edit(spec.get("pre_tokenizer"), drop=lambda part: False)
    spec["decoder"] = _edit(
        spec.get("decoder"), drop=lambda part: part["type"] == "Strip" and part["content"] == " " and not part["stop"]
    )
    return spec


def _edit(part: Any, drop: Any) -> Any:
    """A normalizer, pre-tokenizer or decoder without the steps that `drop` names and without prefix spaces."""
    if part is None or drop(part):
        return None
    for name in ("normalizers", "pretokenizers", "decoders"):
        if name in part:
            steps = [step for step in (_edit(step, drop) for step in part[name]) if step is not None]
            return {**part, name: steps} if steps else None
    if part["type"] == "Metaspace":
        part = {**part, "prepend_scheme": "never"}
    if part.get("add_prefix_space"):
        part = {**part, "add_prefix_space": False}
    return part


def _front_ids(tokenizer: tokenizers.Tokenizer) -> list[int]:
    """What the post-processor puts in front of a text."""
    bare = tokenizer.encode("a", add_special_tokens=False).ids
    full = tokenizer.encode("a", add_special_tokens=True).ids
    at = next((i for i in range(len(full)) if full[i : i + len(bare)] == bare), 0)
    return list(full[:at])


# ---------------------------------------------------------------- files


def _content(token: str | Mapping[str, Any]) -> str:
    return token if isinstance(token, str) else str(token["content"])


def _dump(spec: Spec) -> str:
    return json.dumps(spec, ensure_ascii=False, sort_keys=True)


def _read_json(path: Path) -> Spec:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"{path} is missing.",
            fix="Use a folder that transformers' `AutoTokenizer.from_pretrained(...).save_pretrained(folder)` wrote.",
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read.", why=str(error)) from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds no JSON object.")
    return content
