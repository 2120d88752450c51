"""Which request each row of the batch is, and where its segments lie.

The scheduler announces a request's layout once, with the request; it stays valid until the request is finished, over
preemption and resumption. Which row the request has changes from step to step and is known only inside a real step:
vLLM also builds attention metadata for dummy runs, while the batch still names the requests of the last real step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Generic, TypeVar

from lazyrag.backend import wire
from lazyrag.backend.layout import LaidSegment, Layout

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


T = TypeVar("T")


class Rows(Generic[T]):
    """The layouts of a worker's requests, each as what the worker makes of it.

    Args:
        request_ids: of the batch that the model runner has put together last, row by row.
        block_size: tokens a block.
        prepare: makes what the worker needs of a layout and the request's block table, once for each request (and again
            when the request gets other blocks).
    """

    def __init__(
        self,
        request_ids: Callable[[], Sequence[str]],
        block_size: int,
        prepare: Callable[[Layout, Sequence[int]], T],
    ) -> None:
        self._request_ids = request_ids
        self._block_size = block_size
        self._prepare = prepare
        self._layouts: dict[str, T] = {}
        self._scheduled: set[str] | None = None

    @contextmanager
    def step(self, scheduler_output: SchedulerOutput) -> Iterator[None]:
        """A real step: takes note of new and finished requests; `of_batch` knows the rows until it ends."""
        for request_id in scheduler_output.finished_req_ids:
            self._layouts.pop(request_id, None)
        for new in scheduler_output.scheduled_new_reqs:
            args = (new.sampling_params and new.sampling_params.extra_args) or {}
            self._layouts.pop(new.req_id, None)
            if wire.LAYOUT in args:
                self._layouts[new.req_id] = self._prepare(self._read(args[wire.LAYOUT]), new.block_ids[0])
        self._scheduled = self._layouts.keys() & scheduler_output.num_scheduled_tokens.keys()
        try:
            yield
        finally:
            self._scheduled = None

    @property
    def scheduled(self) -> Collection[T]:
        """What was made of the layouts of this step's lazy requests."""
        return [self._layouts[request_id] for request_id in self._scheduled or ()]

    def of_request(self, request_id: str) -> T | None:
        """What was made of a request's layout; None for an ordinary one."""
        return self._layouts.get(request_id)

    def of_batch(self, num_rows: int) -> Sequence[T | None]:
        """The layout of each row, None for ordinary requests.

        Raises:
            RuntimeError: a lazy request that the scheduler announced for this step has no row. Its chunks would be
                attended to as if they were one text: better no answer than a wrong one.
        """
        if self._scheduled is None:
            return [None] * num_rows
        ids = self._request_ids()[:num_rows]
        if not self._scheduled.issubset(ids):
            missing = ", ".join(sorted(self._scheduled.difference(ids)))
            raise RuntimeError(f"The model runner's batch lacks requests that were scheduled with a layout: {missing}")
        layouts = [self._layouts.get(request_id) for request_id in ids]
        return layouts + [None] * (num_rows - len(ids))

    def _read(self, announced: wire.WireLayout) -> Layout:
        segments = tuple(
            LaidSegment(first_block, num_blocks, num_tokens, visible_from, shift)
            for first_block, num_blocks, num_tokens, visible_from, shift in announced["segments"]
        )
        return Layout(self._block_size, segments, announced["suffix_block"])
