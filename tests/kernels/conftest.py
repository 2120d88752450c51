from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def interpreted() -> Iterator[Callable[..., object]]:
    """Call a function in a process where Triton interprets kernels: Triton decides that once, when it is imported."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("TRITON_INTERPRET", "1")
            environment.setenv("OMP_NUM_THREADS", "1")
            pool.submit(os.getpid).result()
        yield lambda function, *args: pool.submit(function, *args).result()
