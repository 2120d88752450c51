"""Where the milliseconds of one request go: timers around what an engine in this process does for it.

Times are the CPU's, by part; a part holds what it calls, except for `other parts of a step`, which is the rest of the
step: launching, and waiting for the device. Timers cost well below a microsecond a call, and each part is called once a
step.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from functools import wraps
from typing import Any

STEP, REST, TOTAL = "step", "step: the rest (waiting for the device)", "all"
INSIDE_STEP = ("step: schedule", "step: execute_model", "step: sample", "step: update")
PARTS = (
    ("front end: process_inputs", "llm_engine.input_processor", "process_inputs"),
    ("front end: process_outputs", "llm_engine.output_processor", "process_outputs"),
    ("request object (vLLM's block hashes)", "core", "preprocess_add_request"),
    ("scheduler.add_request", "core.scheduler", "add_request"),
    (STEP, "core", "step_fn"),
    (INSIDE_STEP[0], "core.scheduler", "schedule"),
    (INSIDE_STEP[1], "core.model_executor", "execute_model"),
    (INSIDE_STEP[2], "core.model_executor", "sample_tokens"),
    (INSIDE_STEP[3], "core.scheduler", "update_from_output"),
)
"""(name, object, method); `core` is the engine core."""


class Profile:
    """Timers in an engine; they stay.

    Args:
        llm: vLLM's `LLM`, its engine core in this process.
    """

    def __init__(self, llm: Any) -> None:
        self._seconds: dict[str, float] = defaultdict(float)
        roots = {"llm_engine": llm.llm_engine, "core": llm.llm_engine.engine_core.engine_core}
        for name, path, method in PARTS:
            root, *attributes = path.split(".")
            owner = roots[root]
            for attribute in attributes:
                owner = getattr(owner, attribute)
            setattr(owner, method, self._timed(name, getattr(owner, method)))

    def _timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self._seconds[name] += time.perf_counter() - start

        return timed

    def start(self) -> None:
        """Forget what was timed."""
        self._seconds.clear()

    def parts(self, total_ms: float) -> dict[str, float]:
        """Milliseconds by part since `start`.

        Args:
            total_ms: of the whole request.
        """
        ms = {name: self._seconds[name] * 1e3 for name, *_ in PARTS}
        ms[REST] = ms[STEP] - sum(ms[name] for name in INSIDE_STEP)
        outside = total_ms - sum(value for name, value in ms.items() if not name.startswith("step: "))
        return ms | {"the rest (generate's own loop)": outside, TOTAL: total_ms}
