"""LazyRAG inside vLLM's processes: scheduler, worker and attention. See backend/README.md."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from typing import Any

from lazyrag.backend import wire


def register() -> None:
    """The `vllm.general_plugins` entry point; vLLM calls it in each of its processes, whatever engine runs there.

    An engine names LazyRAG's scheduler and worker classes, which bring the rest along. What is left to do here concerns
    engine cores that LazyRAG has started, in any mode. They must not outlive the process that they answer to. And they
    get a process group of their own: a terminal sends Ctrl-C to a whole group, and an engine core takes it for a fault.
    """
    ours = wire.REFUSALS in os.environ and multiprocessing.current_process().name.startswith("EngineCore")
    if ours and (parent := multiprocessing.parent_process()) is not None:
        os.setpgrp()
        threading.Thread(target=_end_with, args=(parent,), name="lazyrag-parent", daemon=True).start()


def _end_with(parent: Any) -> None:
    """End this process when its parent is gone, which vLLM does only for workers."""
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)
