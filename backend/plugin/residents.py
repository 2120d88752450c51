"""Which blocks of the pool hold a chunk's KV, by the chunk's name, so that it can be forgotten.

Whatever the pool holds of a chunk was computed or loaded by a child, so this takes note of children when they end. The
pool knows blocks by their hash alone; names are those of files (`hashing.chunk_name`): tokens and namespace.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool

    from lazyrag.backend.hashing import BlockHash


class Residents:
    """Names of what was brought into a pool.

    Args:
        pool: the engine's.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._hashes: OrderedDict[str, dict[BlockHash, None]] = OrderedDict()
        self._num_noted = 0
        self._to_wipe: set[int] = set()

    def note(self, name: str, hashes: Iterable[BlockHash]) -> None:
        """A child has brought these blocks, or some of them, of the chunk with this name."""
        if self._num_noted > 4 * self._pool.num_gpu_blocks:
            self._drop_evicted()
        known = self._hashes.setdefault(name, {})
        before = len(known)
        known.update(dict.fromkeys(hashes))
        self._num_noted += len(known) - before

    def __len__(self) -> int:
        """Chunks that were noted; some may be gone by now."""
        return len(self._hashes)

    def forget(self, names: Iterable[str]) -> None:
        """Let nobody find the blocks of these chunks any more, and have them wiped when nobody uses them."""
        found: set[int] = set()
        for name in names:
            hashes = self._hashes.pop(name, {})
            self._num_noted -= len(hashes)
            for block_hash in hashes:
                while cached := self._pool.get_cached_block(block_hash, [0]):  # several may have the same hash
                    found.add(cached[0].block_id)
                    self._pool.evict_blocks({cached[0].block_id})
        self._to_wipe |= found

    def take_wipes(self) -> list[int]:
        """The blocks to be wiped before this step's forward pass. Call it when the step's blocks have been given out.

        A block that somebody still reads waits; one that holds something new since then has been overwritten.
        """
        if not self._to_wipe:
            return []
        blocks = [self._pool.blocks[block_id] for block_id in self._to_wipe]
        now = [block.block_id for block in blocks if block.ref_cnt == 0 and block.block_hash is None]
        self._to_wipe = {block.block_id for block in blocks if block.ref_cnt > 0 and block.block_hash is None}
        return sorted(now)

    def _drop_evicted(self) -> None:
        for name, hashes in list(self._hashes.items()):
            left = {block_hash: None for block_hash in hashes if self._pool.get_cached_block(block_hash, [0])}
            self._num_noted += len(left) - len(hashes)
            if left:
                self._hashes[name] = left
            else:
                del self._hashes[name]
