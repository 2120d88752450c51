"""A worker that fills with NaN whatever must not be read. 0 * NaN is NaN: what is masked must not be multiplied."""

import contextlib

import torch

from lazyrag.backend import wire
from lazyrag.backend.plugin.worker_cpu import LazyCPUWorker

NAN = float("nan")


class PoisonedWorker(LazyCPUWorker):
    """NaN in the whole cache at the start, in pads as soon as they are computed, in each `torch.empty`."""

    def initialize_from_config(self, *args, **kwargs):
        super().initialize_from_config(*args, **kwargs)
        self._children = {}
        self.poison_blocks(slice(None))

    @property
    def caches(self):
        return self.model_runner.kv_caches

    def poison_blocks(self, blocks):
        for cache in self.caches:
            cache[blocks] = NAN

    def execute_model(self, scheduler_output):
        for new in scheduler_output.scheduled_new_reqs:
            if wire.CHILD in (new.sampling_params.extra_args or {}):
                self._children[new.req_id] = new.sampling_params.extra_args[wire.CHILD]
        with poisoned_empty():
            output = super().execute_model(scheduler_output)
        for request_id, num_scheduled in scheduler_output.num_scheduled_tokens.items():
            state = self.model_runner.requests[request_id]
            computed = state.num_computed_tokens + num_scheduled
            self._poison_tokens(state, computed, len(state.block_ids[0]) * self.cache_config.block_size)
            child = self._children.get(request_id)
            if child is not None and computed >= state.num_prompt_tokens:
                self._poison_tokens(state, child["first_token"] + child["num_tokens"], state.num_prompt_tokens)
        return output

    def _poison_tokens(self, state, begin, end):
        size = self.cache_config.block_size
        for token in range(begin, end):
            for cache in self.caches:
                cache[state.block_ids[0][token // size], :, token % size] = NAN


@contextlib.contextmanager
def poisoned_empty():
    stock = torch.empty

    def empty(*args, **kwargs):
        out = stock(*args, **kwargs)
        return out.fill_(NAN) if out.is_floating_point() and out.device.type != "meta" else out

    torch.empty = empty
    try:
        yield
    finally:
        torch.empty = stock
