"""The arm `materialize`: each use of a chunk copies its KV to blocks of the request's own, and turns its keys there.

So do systems that keep chunks' KV apart but have an engine that knows one text a request. Everything else is as in the
lazy engine: children compute what is missing, waiting requests wait at the gate. A request runs as an ordinary one,
with stock attention and stock graphs, and takes as much memory as if it had been computed.

Only requests whose documents are whole blocks and stand in front of all literals are served, and only on CUDA.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheBlocks

from lazyrag.backend import wire
from lazyrag.backend.plugin.requests import LazyRequest
from lazyrag.backend.plugin.scheduler import LazyAsyncScheduler
from lazyrag.errors import RequestError

COPIES = "lazyrag_bench_copies"
"""In `extra_args`, for the worker: [source block, own block, positions to turn by] of each block."""


class MaterializeScheduler(LazyAsyncScheduler):
    """The lazy scheduler, with blocks of a request's own for its segments. Set by `scheduler_cls`."""

    def _accept(self, lazy: LazyRequest) -> None:
        for segment in lazy.layout.segments:
            if segment.visible_from or segment.num_tokens % self.block_size:
                raise RequestError("The arm materialize serves documents of whole blocks in front of all literals.")
        super()._accept(lazy)
        # To the worker the request is an ordinary one.
        params = lazy.request.sampling_params
        params.extra_args = {key: value for key, value in params.extra_args.items() if key != wire.LAYOUT}

    def may_run(self, request: Any) -> bool:
        """The gate; what a child computes in this very step cannot be copied before it."""
        lazy = self._lazy.get(request.request_id)
        contents = lazy.contents if lazy is not None else ()
        # Whoever they are for: a request that was not admitted in this step has children of others only.
        children = [child for one in contents if (child := self._child_of.get(one.chain.hashes[-1])) is not None]
        begun = [self.requests[child.request_id] for child in children]
        if any(child.num_computed_tokens < child.num_prompt_tokens for child in begun):
            return False
        return bool(super().may_run(request))

    def _num_own_blocks(self, lazy: LazyRequest, num_blocks: int) -> int:
        """All of them. What will not fit beside those ahead must not be computed already: it would be evicted."""
        return num_blocks

    def _find(self, request: Any, *args: Any, **kwargs: Any) -> tuple[KVCacheBlocks, int, int]:
        found, num_hits, rest = super()._find(request, *args, **kwargs)
        lazy = self._lazy.get(request.request_id)
        if lazy is None or num_hits <= lazy.layout.suffix_start:
            return found, num_hits, rest
        blocks = found.blocks[0][: lazy.layout.suffix_block]
        return self.kv_cache_manager.create_kv_cache_blocks((blocks,)), lazy.layout.suffix_start, rest

    def _allocate(
        self,
        request: Any,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: KVCacheBlocks | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> KVCacheBlocks | None:
        lazy = self._lazy.get(request.request_id)
        whole = lazy is not None and num_new_computed_tokens == lazy.layout.suffix_start
        if lazy is None or request.num_computed_tokens or not whole or new_computed_blocks is None:
            return super()._allocate(
                request, num_new_tokens, num_new_computed_tokens, new_computed_blocks, *args, **kwargs
            )
        copies = self._copies(lazy, new_computed_blocks.blocks[0])
        blocks = None
        if copies is not None:
            own = self.kv_cache_manager.create_kv_cache_blocks((copies,))
            blocks = super()._allocate(request, num_new_tokens, num_new_computed_tokens, own, *args, **kwargs)
            self._pool.free_blocks(copies)  # the request has them now, or nobody
        else:
            self._refused_when_idle |= not self.running
        return blocks

    def _copies(self, lazy: LazyRequest, sources: Sequence[Any]) -> list[Any] | None:
        """Blocks for a request's segments; None if there are too few.

        Segment by segment: a source that has been copied may go, as far as its copy is concerned.
        """
        self._pool.touch(sources)
        copies: list[Any] = []
        table: list[list[int]] = []
        for segment in lazy.layout.segments:
            of_segment = sources[segment.first_block : segment.first_block + segment.num_blocks]
            if self._pool.get_num_free_blocks() < segment.num_blocks:
                self._pool.free_blocks([*copies, *sources[segment.first_block :]])
                return None
            own = self._pool.get_new_blocks(segment.num_blocks)
            table += [[s.block_id, o.block_id, segment.shift] for s, o in zip(of_segment, own, strict=True)]
            copies += own
            self._pool.free_blocks(reversed(of_segment))
        lazy.request.sampling_params.extra_args[COPIES] = table
        return copies


def groups(table: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """Runs of copies that may be made in any order: within one, nothing that is read is written.

    Args:
        table: (source, target, ...) of each copy.
    """
    found, start = [], 0
    read: set[int] = set()
    written: set[int] = set()
    for i, (source, target, *_) in enumerate(table):
        if target in read or source in written:
            found.append((start, i))
            start, read, written = i, set(), set()
        read.add(source)
        written.add(target)
    return [*found, (start, len(table))]
