"""Block hashes of a request with reusable segments, and the keys of chunks on disk. Pure; the hash comes from outside.

vLLM finds cached blocks by a list of hashes, one a block, and reads each as opaque. An ordinary prompt is one chain:
each block's hash covers the block's tokens and the hash before it. Here the list holds several chains: one for every
segment and one for the suffix. Each starts as a prompt of its own (salt and LoRA name in its first block); a chunk's
goes on with the chain of what the chunk was computed behind, a preamble or a sink, if it was.

A block of a chain that further segments become visible in adds, for each of these,

    ("lazy", visible_from - start of the block, num_tokens, hash of the segment's last block)

and the chain carries that on. So a hash covers all that the block's K and V depend on (tokens, positions, visible
segments) and nothing else: literal text keeps its blocks when chunks are appended later, and text in front of the first
chunk shares its blocks with ordinary prompts. None of the three can be left out: the same text one token later sees the
segment from elsewhere, and a part of a chunk ends in the same block as the whole.

A segment's padded last block adds ("pads", number of valid tokens): what is loaded from disk has no KV for its pads, so
it must not be found for a prompt in which the pads' tokens are text.

A first segment at the place it was computed at needs no such entry: the suffix goes on with its chain, as an ordinary
prompt of these tokens would if there are no pads.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, TypeAlias

from lazyrag.backend.layout import LaidSegment, Layout

BlockHash: TypeAlias = bytes
HashBlock: TypeAlias = Callable[[BlockHash | None, Sequence[int], tuple[Any, ...] | None], BlockHash]
"""(hash of the block before or None, token ids of the block, extra keys or None) -> hash."""

KEY_VERSION = 2
"""Of `chunk_key`; another one when the meaning of a chunk's KV changes."""

NAME_DIGITS = 64
"""Of a key's first part, which names the chunk."""


@dataclass(frozen=True, slots=True)
class ExtraKeys:
    """What vLLM adds to the first block of a prompt (salt, LoRA name) and to every other one (LoRA name)."""

    first: tuple[Any, ...] = ()
    rest: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class _Seen:
    """A segment as a chain sees it that is not the segment's own."""

    visible_from: int
    num_tokens: int
    last_hash: BlockHash
    continues: bool


def block_hashes(
    layout: Layout, token_ids: Sequence[int], known: Sequence[BlockHash], keys: ExtraKeys, hash_block: HashBlock
) -> list[BlockHash]:
    """The hashes of the request's whole blocks that are not in `known`.

    Args:
        layout: the request's.
        token_ids: physical prompt and generated tokens.
        known: hashes computed so far, a prefix of the list; at least those of all segments' blocks (`chunk_hashes`).
        keys: the request's extra keys.
        hash_block: vLLM's hash of one block.
    """
    block_size, end = layout.block_size, len(token_ids) // layout.block_size
    suffix = list(known[layout.suffix_block :])
    num_known = len(suffix)
    seen = [_seen(segment, known) for segment in layout.visible]
    tokens = token_ids[layout.suffix_start : end * block_size]
    _extend(suffix, tokens, block_size, seen, keys, hash_block)
    return suffix[num_known:]


def chunk_hashes(
    token_ids: Sequence[int],
    *,
    block_size: int,
    pad: int,
    keys: ExtraKeys,
    hash_block: HashBlock,
    behind: BlockHash | None = None,
) -> list[BlockHash]:
    """The hashes of a chunk's blocks.

    Args:
        token_ids: the chunk's.
        block_size: tokens a block.
        pad: token id of the pads that fill the last block up.
        keys: the request's extra keys.
        hash_block: vLLM's hash of one block.
        behind: hash of the last block of what the chunk is computed behind; None if it is computed alone.
    """
    chain: list[BlockHash] = []
    tokens = [*token_ids, *[pad] * (-len(token_ids) % block_size)]
    _extend(chain, tokens, block_size, (), keys, hash_block, num_valid=len(token_ids), behind=behind)
    return chain


def _seen(segment: LaidSegment, hashes: Sequence[BlockHash]) -> _Seen:
    return _Seen(segment.visible_from, segment.num_tokens, hashes[segment.last_block], continues=segment.shift == 0)


def _extend(
    chain: list[BlockHash],
    tokens: Sequence[int],
    block_size: int,
    seen: Sequence[_Seen],
    keys: ExtraKeys,
    hash_block: HashBlock,
    num_valid: int | None = None,
    behind: BlockHash | None = None,
) -> None:
    """Append to a chain the hashes of the whole blocks of `tokens` (from the chain's start) that it lacks.

    `num_valid` of the tokens are no pads, or all of them. The chain goes on from the block `behind`, if there is one.
    """
    for i in range(len(chain), len(tokens) // block_size):
        start = i * block_size
        new = [s for s in seen if start <= s.visible_from < start + block_size] if seen else []
        parent = chain[-1] if chain else behind
        if parent is None and new and new[0].continues:
            parent = new.pop(0).last_hash
        extra = keys.first if parent is None else keys.rest
        if new:
            extra += tuple(("lazy", s.visible_from - start, s.num_tokens, s.last_hash) for s in new)
        if num_valid is not None and num_valid < start + block_size:
            extra += (("pads", num_valid - start),)
        chain.append(hash_block(parent, tokens[start : start + block_size], extra or None))


def chunk_key(
    token_ids: Sequence[int], *, prefix: Sequence[int] = (), salt: str | None = None, lora: str | None = None
) -> str:
    """The name of a chunk's KV outside the engine: 96 hex digits, the same in every process.

    The first 64 name the chunk (`chunk_name`), the others what it was computed behind and with, so that all KV of a
    chunk can be found by those who know nothing but the chunk.

    Args:
        token_ids: the chunk's valid tokens, from its first one.
        prefix: the preamble or the sink that it was computed behind.
        salt: the namespace's cache salt.
        lora: the adapter's name.
    """
    digest = _digest(16, b"lazyrag-context", lora)
    digest.update(_packed(prefix))
    return chunk_name(token_ids, salt=salt) + digest.hexdigest()


def chunk_name(token_ids: Sequence[int], *, salt: str | None = None) -> str:
    """The part of `chunk_key` that names tokens and namespace: `NAME_DIGITS` hex digits."""
    digest = _digest(NAME_DIGITS // 2, b"lazyrag-chunk", salt)
    digest.update(_packed(token_ids))
    return digest.hexdigest()


def head_names(token_ids: Sequence[int], *, salt: str | None = None) -> list[str]:
    """`chunk_name` of the first token, the first two, ... and all: a prompt may show, and an engine keep, any of these.

    Takes linear time.
    """
    digest = _digest(NAME_DIGITS // 2, b"lazyrag-chunk", salt)
    names = []
    data = _packed(token_ids)
    for start in range(0, len(data), 8):
        digest.update(data[start : start + 8])
        names.append(digest.copy().hexdigest())
    return names


def _digest(size: int, person: bytes, text: str | None) -> blake2b:
    """A digest that has taken the version and a text, and is open for tokens.

    The text's length first: no two texts and runs of tokens are the same bytes.
    """
    field = (text or "").encode("utf-8", "surrogatepass")
    digest = blake2b(digest_size=size, person=person)
    digest.update(KEY_VERSION.to_bytes(4, "little") + len(field).to_bytes(8, "little") + field)
    return digest


def _packed(token_ids: Sequence[int]) -> bytes:
    """Eight bytes a token, little endian."""
    numbers = array("Q", token_ids)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()
