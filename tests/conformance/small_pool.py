"""A lazy scheduler that believes in a small KV pool. vLLM starts no engine whose pool is smaller than its context."""

from lazyrag.backend.plugin.scheduler import LazyScheduler

NUM_BLOCKS = 63


class SmallPoolScheduler(LazyScheduler):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._requests._num_blocks = NUM_BLOCKS
