"""The worker of the arm `materialize` (materialize.py), apart from the scheduler: it needs vLLM's CUDA worker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lazyrag.backend.plugin.worker_cuda import LazyCUDAWorker
from lazyrag.bench.materialize import COPIES, groups
from lazyrag.kernels.copy import copy_turned


class MaterializeWorker(LazyCUDAWorker):
    """The lazy worker, which copies before a step what its new requests use. Set by `worker_cls`."""

    def execute_model(self, scheduler_output: Any) -> Any:
        """Copy, then run the step."""
        for new in scheduler_output.scheduled_new_reqs:
            table = ((new.sampling_params and new.sampling_params.extra_args) or {}).get(COPIES)
            if table:
                self._copy(table)
        return super().execute_model(scheduler_output)

    def _copy(self, table: Sequence[Sequence[int]]) -> None:
        columns = torch.tensor(table, dtype=torch.int32).T.contiguous().pin_memory()
        sources, targets, lines = columns.to(self.device, non_blocking=True)
        for start, end in groups(table):
            for layer in self.layers().values():
                copy_turned(
                    layer.kv_cache, sources[start:end], targets[start:end], lines[start:end], self._planner.turns
                )
