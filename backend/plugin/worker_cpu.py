"""The worker of the CPU platform."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.worker.cpu_worker import CPUWorker

from lazyrag.backend.layout import Layout
from lazyrag.backend.plugin.attention_cpu import LazyCPUBackend, LazyCPUImpl
from lazyrag.backend.plugin.backends import chosen
from lazyrag.backend.plugin.rows import Rows
from lazyrag.backend.plugin.worker import LazyWorkerMixin
from lazyrag.kernels.rope import Rope


class LazyCPUWorker(LazyWorkerMixin, CPUWorker):
    """vLLM's CPU worker with attention over segments. Set by `worker_cls`."""

    impl_class = LazyCPUImpl
    _rows: Rows[Layout]
    """Set by `bind`."""

    def attention_chosen(self) -> AbstractContextManager[None]:
        """The CPU platform of vLLM offers no choice: it takes whatever is registered as CPU_ATTN."""
        return chosen(AttentionBackendEnum.CPU_ATTN, LazyCPUBackend)

    def settings_refusals(self) -> list[str | None]:
        """The V2 model runner."""
        if not self.use_v2_model_runner:
            return []
        return ["vLLM's V2 model runner is not supported on CPUs yet. Set VLLM_USE_V2_MODEL_RUNNER=0."]

    def bind(self, rope: Rope) -> None:
        """Join the attention layers to this worker."""
        block_size = self.vllm_config.cache_config.block_size
        self._rows = Rows(lambda: self.model_runner.input_batch.req_ids, block_size, lambda layout, blocks: layout)
        for layer in self.layers().values():
            layer.impl.bind(self._rows, rope)

    def execute_model(self, scheduler_output: Any) -> Any:
        """Run a step."""
        with self._rows.step(scheduler_output):
            return super().execute_model(scheduler_output)
