"""The worker: loads the model with our attention, refuses what cannot work, and keeps the rows of each step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.worker.cpu_worker import CPUWorker

from lazyrag.backend.plugin import attention_cpu
from lazyrag.backend.plugin.attention_cpu import LazyCPUImpl
from lazyrag.backend.plugin.checks import CONFIG_CHECKS, refuse
from lazyrag.backend.plugin.rotary import Seen, check_rotation, find_rope
from lazyrag.backend.plugin.rows import Rows
from lazyrag.backend.plugin.scheduler import LazyMixin


class LazyCPUWorker(CPUWorker):
    """vLLM's CPU worker with attention over segments. Set by `worker_cls`."""

    _rows: Rows
    """Set by `load_model`."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the model.

        Raises:
            UnsupportedError: the model or a setting is refused; with every reason.
        """
        by_settings = [check(self.vllm_config) for check in (*CONFIG_CHECKS, _scheduler)]
        refuse([*by_settings, _runner(self.use_v2_model_runner)])
        with attention_cpu.chosen():
            super().load_model(*args, **kwargs)
        layers = self._layers()
        rope, no_rope = find_rope(self.model_runner.get_model())
        refuse([*(_layer(name, layer) for name, layer in layers.items()), no_rope])
        assert rope is not None
        refuse([_head_sizes(layers, rope.head_size), check_rotation(self._dry_run, rope, self._max_position())])
        self._rows = Rows(self.model_runner, self.vllm_config.cache_config.block_size)
        for layer in layers.values():
            layer.impl.bind(self._rows, rope)

    def execute_model(self, scheduler_output: Any) -> Any:
        """Run a step."""
        with self._rows.step(scheduler_output):
            return super().execute_model(scheduler_output)

    def _layers(self) -> dict[str, Any]:
        context = self.vllm_config.compilation_config.static_forward_context
        return {name: layer for name, layer in context.items() if isinstance(layer, AttentionLayerBase)}

    def _max_position(self) -> int:
        return int(self.model_config.max_model_len) - 1

    @torch.inference_mode()
    def _dry_run(self, positions: Tensor) -> Mapping[str, Seen]:
        seen: dict[str, Seen] = {}
        impls = {name: layer.impl for name, layer in self._layers().items()}
        for name, impl in impls.items():
            impl.on_dry_run = lambda what, name=name: seen.__setitem__(name, what)
        try:
            with set_forward_context(None, self.vllm_config, num_tokens=positions.numel(), skip_compiled=True):
                self.model_runner.get_model()(
                    input_ids=torch.arange(positions.numel()) + 1, positions=positions, intermediate_tensors=None
                )
        finally:
            for impl in impls.values():
                impl.on_dry_run = None
        return seen


# ---------------------------------------------------------------- checks (see checks.py)


def _scheduler(vllm_config: Any) -> str | None:
    scheduler = vllm_config.scheduler_config.get_scheduler_cls()
    if issubclass(scheduler, LazyMixin):
        return None
    return (
        f"The scheduler is {scheduler.__name__}, which computes chunks as ordinary text. "
        "Set scheduler_cls='lazyrag.backend.plugin.scheduler.LazyScheduler'."
    )


def _runner(is_v2: bool) -> str | None:
    if not is_v2:
        return None
    return "vLLM's V2 model runner is not supported on CPUs yet. Set VLLM_USE_V2_MODEL_RUNNER=0."


def _layer(name: str, layer: Any) -> str | None:
    impl = getattr(layer, "impl", None)
    if not isinstance(impl, LazyCPUImpl):
        return (
            f"Layer {name} is computed by {type(impl).__name__}. Use a model in which every layer has full attention."
        )
    if impl.reasons:
        return f"Layer {name} has {', '.join(impl.reasons)}. Use a model in which every layer has plain full attention."
    return None


def _head_sizes(layers: Mapping[str, Any], rotary: int) -> str | None:
    sizes = {layer.impl.head_size for layer in layers.values()}
    if sizes == {rotary}:
        return None
    return (
        f"The model rotates heads of size {rotary}, its attention has {sorted(sizes)}. Use a model in which they agree."
    )
