from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


TRITON_OF_VLLM = Path(__file__).parents[2] / ".triton-3.6.0"
"""What vLLM 0.26 brings to GPU machines; the torch for CPUs brings a later one."""


@contextmanager
def process(**environment: str | None) -> Iterator[Callable[..., object]]:
    """Call functions in another process, started with this environment (None: unset)."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in {"OMP_NUM_THREADS": "1", **environment}.items():
                patch.delenv(name, raising=False) if value is None else patch.setenv(name, value)
            pool.submit(os.getpid).result()
        yield lambda function, *args: pool.submit(function, *args).result()


@pytest.fixture(scope="session")
def interpreted() -> Iterator[Callable[..., object]]:
    """Call a function where Triton interprets kernels: Triton decides that once in a process, when it is imported."""
    with process(TRITON_INTERPRET="1") as call:
        yield call


@pytest.fixture(scope="session")
def compiled() -> Iterator[Callable[..., object]]:
    """Call a function where Triton compiles kernels."""
    with process(TRITON_INTERPRET=None) as call:
        yield call


@pytest.fixture(scope="session")
def compiled_as_on_gpus() -> Iterator[Callable[..., object]]:
    """Call a function where `TRITON_OF_VLLM` compiles kernels."""
    if not TRITON_OF_VLLM.is_dir():
        pytest.skip(f"Triton 3.6.0 is not here; run: make {TRITON_OF_VLLM.name}")
    with process(TRITON_INTERPRET=None) as call:
        call(exec, f"import sys; sys.path.insert(0, {str(TRITON_OF_VLLM)!r})")
        assert call(eval, "__import__('triton').__version__") == "3.6.0"
        yield call
