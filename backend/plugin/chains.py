"""The block hashes of segments, remembered for the next request that uses the same chunk.

A request's ten documents are more than a thousand blocks: hashing them takes as long as computing the answer's first
token. The hashes of a chunk depend on its tokens, the request's extra keys and what it is computed behind, so they are
computed once; and with them the blocks are remembered that were found under them, which a comparison of lists confirms.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from operator import attrgetter
from typing import TYPE_CHECKING

from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

from lazyrag.backend.hashing import BlockHash

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

_MARK = attrgetter("_block_hash")  # what the property `block_hash` gives, an order of magnitude faster
MOST_BLOCKS = 1 << 20
"""Whose hashes are remembered; about 100 bytes each."""


@dataclass(eq=False, slots=True)
class Chain:
    """The blocks of a segment.

    Attributes:
        hashes: of each block.
        marks: the same as a block carries them while it is cached.
        found: the blocks that were found last, if all were.
    """

    hashes: list[BlockHash]
    marks: list[bytes] = field(init=False)
    found: list[KVCacheBlock] | None = None

    def __post_init__(self) -> None:
        self.marks = [make_block_hash_with_group_id(block_hash, 0) for block_hash in self.hashes]

    def resident(self, pool: BlockPool) -> list[KVCacheBlock] | None:
        """All blocks, if all are cached. Not to be changed."""
        if self.found is not None and list(map(_MARK, self.found)) == self.marks:
            return self.found
        self.found = None
        # The end of a chunk is evicted first, and of one that is new nothing is there.
        if pool.cached_block_hash_to_block.get_one_block(self.marks[-1]) is not None:
            found = self._search(pool)
            blocks = [block for block in found if block is not None]
            if len(blocks) == len(found):
                self.found = blocks
        return self.found

    def look_up(self, pool: BlockPool) -> Sequence[KVCacheBlock | None]:
        """For each hash the block that holds it, or None; None behind the first that is missing. Not to be changed.

        vLLM looks no further either: whoever computes a block computes all behind it.
        """
        blocks = self.resident(pool)
        return blocks if blocks is not None else self._search(pool)

    def _search(self, pool: BlockPool) -> list[KVCacheBlock | None]:
        found = map(pool.cached_block_hash_to_block.get_one_block, self.marks)
        blocks: list[KVCacheBlock | None] = list(takewhile(lambda block: block is not None, found))
        return blocks + [None] * (len(self.marks) - len(blocks))


class Chains:
    """The chains of the chunks used last.

    Args:
        most_blocks: whose hashes are kept.
    """

    def __init__(self, most_blocks: int = MOST_BLOCKS) -> None:
        self._most_blocks = most_blocks
        self._num_blocks = 0
        self._known: OrderedDict[Hashable, Chain] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], list[BlockHash]]) -> Chain:
        """The chain of a key that covers all that its hashes depend on; made if it is not known."""
        chain = self._known.get(key)
        if chain is None:
            chain = self._known[key] = Chain(make())
            self._num_blocks += len(chain.hashes)
            while self._num_blocks > self._most_blocks and len(self._known) > 1:
                _, dropped = self._known.popitem(last=False)
                self._num_blocks -= len(dropped.hashes)
        else:
            self._known.move_to_end(key)
        return chain
