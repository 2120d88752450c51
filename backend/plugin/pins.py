"""Which waiting requests may have their missing chunks computed, and the blocks held for them meanwhile.

A request waits while its missing chunks are computed. What it found resident must not be evicted by then, so those
blocks are pinned: they get a reference, as if a request used them. Pins must not starve others, so they are given
oldest first, as far as everything that the oldest waiting requests need would fit at once (`Budget`). They are taken
anew at the start of every step; nothing allocates blocks between two steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

    from lazyrag.backend.hashing import BlockHash


class Budget:
    """The pool's free blocks, spoken for by waiting requests one after the other.

    Args:
        free: blocks that can be allocated or evicted, without those that what runs now still needs.
        coming: hashes of the blocks that will be filled anyway.
    """

    def __init__(self, free: int, coming: Iterable[BlockHash] = ()) -> None:
        self.left = free
        self._promised = set(coming)

    def take(self, cached: Iterable[KVCacheBlock], missing: Iterable[BlockHash], others: int) -> bool:
        """Speak for what a request needs; False, and nothing taken, if it does not fit.

        Args:
            cached: blocks that hold what it needs; only those that nobody uses cost something.
            missing: hashes of the blocks to be filled; one that an earlier request waits for costs nothing more.
            others: further blocks, for its own tokens.
        """
        new = set(missing) - self._promised
        cost = len({block.block_id for block in cached if block.ref_cnt == 0}) + len(new) + others
        if cost > self.left:
            return False
        self.left -= cost
        self._promised |= new
        return True


class Pins:
    """References on resident blocks, held for waiting requests."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._held: dict[str, list[KVCacheBlock]] = {}

    def hold(self, request_id: str, blocks: Sequence[KVCacheBlock]) -> None:
        """Pin blocks for a request."""
        self._pool.touch(blocks)
        self._held.setdefault(request_id, []).extend(blocks)

    def release(self, request_id: str) -> None:
        """Give a request's pins up; the ends of its chunks are evicted first."""
        self._pool.free_blocks(reversed(self._held.pop(request_id, [])))

    def release_all(self) -> None:
        """Give all pins up."""
        for request_id in list(self._held):
            self.release(request_id)

    @property
    def held(self) -> Collection[Sequence[KVCacheBlock]]:
        """The blocks of each holder."""
        return self._held.values()

    def check(self, used: Iterable[Sequence[KVCacheBlock]]) -> None:
        """Assert that free + used or pinned blocks are all blocks; called after every step in debug mode.

        Args:
            used: the block tables of all requests, and blocks on their way back to the pool.
        """
        expected = Counter(block.block_id for blocks in [*used, *self._held.values()] for block in blocks)
        blocks = [block for block in self._pool.blocks if not block.is_null]
        wrong = [block.block_id for block in blocks if block.ref_cnt != expected[block.block_id]]
        assert not wrong, f"blocks {wrong} have references that no request and no pin holds, or lack one"
        free = [block.block_id for block in self._pool.free_block_queue.get_all_free_blocks()]
        assert sorted(free) == [block.block_id for block in blocks if block.ref_cnt == 0], (
            "a block is lost or free twice"
        )
        assert len(free) == self._pool.get_num_free_blocks()
        for block in blocks:
            if block.block_hash is not None:
                holders = self._pool.cached_block_hash_to_block
                assert holders.contain(block.block_hash, block.block_id), (
                    f"block {block.block_id} is cached under no hash"
                )
