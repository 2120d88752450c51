"""The product's own engine on a GPU: its core in another process, chunks on disk, a second engine that loads them."""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from engines import Text
from oracle import Oracle, Prompt, Use

from lazyrag.backend.engine import Delta, Request, Sampling, generate
from lazyrag.backend.local import LocalEngine
from lazyrag.types import Segment

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.engine,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),  # vLLM's own
]
NUM_TOKENS, MAX_RMS = 12, 0.01


@contextlib.contextmanager
def running(model: Path, root: Path, mode: str) -> Iterator[LocalEngine]:
    engine = LocalEngine(
        str(model),
        mode=mode,
        dtype="float16",
        max_model_len=4096,
        kv_cache_bytes=1 << 28,
        kv_root=root,
        debug=True,
        engine_args={
            "skip_tokenizer_init": True,
            "max_num_seqs": 8,
            "gpu_memory_utilization": 0.1,
            "compilation_config": {"cudagraph_capture_sizes": [1, 8, 64]},
        },
    )
    try:
        yield engine
    finally:
        engine.close()
        del engine
        gc.collect()


def check(engine: LocalEngine, oracle: Oracle, prompt: Prompt, namespace: str = "") -> Delta:
    """The answer, which agrees with the oracle's log-probabilities."""
    request = Request(
        token_ids=prompt.token_ids,
        segments=[Segment(str(n), s.start, s.num_tokens, s.offset, s.chunk_tokens) for n, s in enumerate(prompt.spans)],
        prefix_len=len(prompt.prefix),
        sampling=Sampling(max_tokens=NUM_TOKENS, logprobs=3, ignore_eos=True),
        namespace=namespace,
        sink=prompt.sink,
    )
    (answer,) = generate(engine, [request])
    assert isinstance(answer, Delta), answer
    expected = oracle.logprobs(prompt, list(answer.token_ids))
    errors = [
        logprob - expected[step, token].item()
        for step, found in enumerate(answer.logprobs)
        for token, logprob in found.items()
    ]
    assert math.sqrt(sum(error**2 for error in errors) / len(errors)) <= MAX_RMS
    return answer


@pytest.mark.parametrize("mode", ["lazy", "sink", "prefix"])
def test_a_second_engine_answers_from_the_disk(mode: str, model: Path, oracle: Oracle, tmp_path: Path) -> None:
    text = Text(7)
    behind = {} if mode == "lazy" else {mode: text(19)}
    prefix = behind.get("prefix", [])
    chunks = [Use(text(n)) for n in (370, 64, 5, 900)]
    with running(model, tmp_path, mode) as engine:
        prompt = Prompt([chunks[0], text(3), chunks[1], chunks[2], text(1), chunks[3], text(9)], **behind)
        assert check(engine, oracle, prompt).reuse.sources == ("computed",) * 4
        assert check(engine, oracle, prompt).reuse.sources == ("hbm",) * 4
        assert len(list(tmp_path.rglob("*.safetensors"))) == 4 + bool(behind)
    with running(model, tmp_path, mode) as engine:
        reordered = Prompt([chunks[3], text(2), chunks[0], chunks[1], text(40)], **behind)
        answer = check(engine, oracle, reordered)
        assert answer.reuse.sources == ("disk",) * 3
        assert answer.reuse.reused_tokens == len(prefix) + sum(span.num_tokens for span in reordered.spans)
        check(engine, oracle, Prompt([text(300)]))
        assert set(check(engine, oracle, reordered, namespace="another tenant").reuse.sources) == {"computed"}
