"""What the workers of all platforms do: load the model with our attention, and refuse what cannot work."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

from lazyrag.backend.plugin.checks import CONFIG_CHECKS, refuse
from lazyrag.backend.plugin.rotary import Seen, check_rotation, find_rope
from lazyrag.backend.plugin.scheduler import LazyMixin
from lazyrag.kernels.rope import Rope


class LazyWorkerMixin:
    """Goes in front of a worker class of vLLM.

    Attributes:
        impl_class: of the attention layers; has `reasons`, `head_size` and `on_dry_run`.
    """

    impl_class: type[Any]
    vllm_config: Any
    model_config: Any
    model_runner: Any
    device: torch.device

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the model.

        Raises:
            UnsupportedError: the model or a setting is refused; with every reason.
        """
        refuse([*(check(self.vllm_config) for check in (*CONFIG_CHECKS, _scheduler)), *self.settings_refusals()])
        with self.attention_chosen():
            super().load_model(*args, **kwargs)  # type: ignore[misc]
        layers = self.layers()
        rope, no_rope = find_rope(self.model_runner.get_model())
        refuse([*(self._layer_refusal(name, layer) for name, layer in layers.items()), no_rope])
        assert rope is not None
        refuse([_head_sizes(layers, rope.head_size), *self.model_refusals(rope)])
        refuse([check_rotation(self._dry_run, rope, int(self.model_config.max_model_len) - 1)])
        self.bind(rope)

    def attention_chosen(self) -> AbstractContextManager[None]:
        """Attention layers that are built inside get `impl_class`."""
        raise TypeError("each platform's worker has its own")

    def settings_refusals(self) -> list[str | None]:
        """The platform's own reasons against the engine's settings."""
        return []

    def model_refusals(self, rope: Rope) -> list[str | None]:
        """The platform's own reasons against the model."""
        return []

    def bind(self, rope: Rope) -> None:
        """Join the attention layers to this worker."""
        raise TypeError("each platform's worker has its own")

    def layers(self) -> dict[str, Any]:
        """The model's attention layers."""
        context = self.vllm_config.compilation_config.static_forward_context
        return {name: layer for name, layer in context.items() if isinstance(layer, AttentionLayerBase)}

    def _layer_refusal(self, name: str, layer: Any) -> str | None:
        impl = getattr(layer, "impl", None)
        if not isinstance(impl, self.impl_class):
            kind = type(impl).__name__
            return f"Layer {name} is computed by {kind}. Use a model in which every layer has full attention."
        if impl.reasons:
            has = ", ".join(impl.reasons)
            return f"Layer {name} has {has}. Use a model in which every layer has plain full attention."
        return None

    @torch.inference_mode()
    def _dry_run(self, positions: Tensor) -> Mapping[str, Seen]:
        seen: dict[str, Seen] = {}
        impls = {name: layer.impl for name, layer in self.layers().items()}
        for name, impl in impls.items():
            impl.on_dry_run = lambda what, name=name: seen.__setitem__(name, what)
        try:
            with set_forward_context(None, self.vllm_config, num_tokens=positions.numel(), skip_compiled=True):
                self.model_runner.get_model()(
                    input_ids=torch.arange(positions.numel(), device=self.device) + 1,
                    positions=positions.to(self.device),
                    intermediate_tensors=None,
                )
        finally:
            for impl in impls.values():
                impl.on_dry_run = None
        return seen


class DryRuns:
    """Goes in front of an attention implementation: shows what the layer is given while the model is tried out.

    Attributes:
        reasons: why this layer cannot be computed; the worker refuses the model if there are any.
        on_dry_run: called with what the layer is given when the model runs without metadata.
    """

    reasons: tuple[str, ...] = ()
    on_dry_run: Callable[[Seen], None] | None = None

    def show(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Keep what a layer was given, if anybody looks."""
        if self.on_dry_run is not None:
            self.on_dry_run(Seen(*(x.detach().to("cpu", copy=True) for x in (query, key, value))))


# ---------------------------------------------------------------- checks (see checks.py)


def _scheduler(vllm_config: Any) -> str | None:
    scheduler = vllm_config.scheduler_config.get_scheduler_cls()
    if issubclass(scheduler, LazyMixin):
        return None
    return (
        f"The scheduler is {scheduler.__name__}, which computes chunks as ordinary text. "
        "Set scheduler_cls='lazyrag.backend.plugin.scheduler.LazyScheduler'."
    )


def _head_sizes(layers: Mapping[str, Any], rotary: int) -> str | None:
    sizes = {layer.impl.head_size for layer in layers.values()}
    if sizes == {rotary}:
        return None
    return (
        f"The model rotates heads of size {rotary}, its attention has {sorted(sizes)}. Use a model in which they agree."
    )
