"""Graphs for steps with lazy rows, beside vLLM's own for all other steps.

Ours are FULL graphs, for decode and for small suffix prefills alike: attention is captured with everything else, and
reads what to do from the tables of the step (plans.py). Larger steps run without a graph.
"""

from __future__ import annotations

from typing import Any

from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, ModelCudaGraphManager


class LazyGraphs(ModelCudaGraphManager):
    """A manager of graphs as the model runner knows it.

    Attributes:
        is_open: the next step may run in a graph: its tables fit.

    Args:
        stock: the runner's own manager.
    """

    is_open = True

    def __init__(self, stock: ModelCudaGraphManager) -> None:
        super().__init__(
            stock.vllm_config,
            stock.device,
            CUDAGraphMode.FULL,
            stock.decode_query_len,
            lora_capture_cases=stock.lora_capture_cases,
        )

    def _init_candidates(self) -> None:
        sizes = sorted(self.compilation_config.cudagraph_capture_sizes or ())
        low = 0
        for size in sizes:
            for num_loras in self.lora_capture_cases:
                # A step with more than one token in some row has fewer rows than tokens.
                shapes: list[tuple[int, int | None]] = [(size, 1)] if size <= self.max_num_reqs else []
                shapes += [(min(size - 1, self.max_num_reqs), None)] if size > 1 else []
                found = [
                    BatchExecutionDescriptor(CUDAGraphMode.FULL, size, num_rows, uniform, num_loras)
                    for num_rows, uniform in shapes
                ]
                self._capture_descs.setdefault(CUDAGraphMode.FULL, []).extend(found)
                self._candidates |= {(tokens, num_loras): found for tokens in range(low, size + 1)}
            low = size + 1
        if sizes:
            # Large ones first: the others find their memory in the pool.
            self._capture_descs[CUDAGraphMode.FULL].sort(key=lambda found: found.num_tokens, reverse=True)

    def dispatch(self, num_reqs: int, num_tokens: int, *args: Any, **kwargs: Any) -> BatchExecutionDescriptor:
        """The graph for a step, or the order to run without one."""
        found: BatchExecutionDescriptor = super().dispatch(num_reqs, num_tokens, *args, **kwargs)
        if self.is_open:
            return found
        return BatchExecutionDescriptor(CUDAGraphMode.NONE, num_tokens, num_reqs, None, found.num_active_loras)
