"""Chunks that one engine has computed are loaded by the next one, in a new process, and give the same answers."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
from engines import Result, Text, assert_agrees
from oracle import Oracle, Prompt, Use

from lazyrag.backend.engine import Delta, Request, Sampling, generate
from lazyrag.backend.local import LocalEngine
from lazyrag.types import Segment

pytestmark = [
    pytest.mark.engine,
    pytest.mark.filterwarnings("ignore:`torch"),
    pytest.mark.filterwarnings(
        "ignore:Unclosed context:ResourceWarning"
    ),  # vLLM leaves one behind when it is shut down
]

NUM_TOKENS = 12


@contextlib.contextmanager
def running(model: Path, root: Path) -> Iterator[LocalEngine]:
    """An engine whose core runs in a process of its own, with NaN wherever nothing may be read."""
    engine = LocalEngine(
        str(model),
        mode="lazy",
        dtype="float32",
        max_model_len=1024,
        block_size=16,
        kv_cache_bytes=1 << 26,
        kv_root=root,
        kv_host_bytes=1 << 24,
        debug=True,
        engine_args={
            "skip_tokenizer_init": True,
            "max_num_batched_tokens": 64,
            "max_num_seqs": 8,
            "worker_cls": "poison.PoisonedWorker",
        },
    )
    try:
        yield engine
    finally:
        engine.close()
        del engine
        gc.collect()


def ask(engine: LocalEngine, *prompts: Prompt, namespace: str = "") -> list[Delta]:
    """Run prompts together; none may fail."""
    requests = [
        Request(
            token_ids=prompt.token_ids,
            segments=[Segment("", s.start, s.num_tokens, s.offset, s.chunk_tokens) for s in prompt.spans],
            prefix_len=len(prompt.prefix),
            sampling=Sampling(max_tokens=NUM_TOKENS, logprobs=3, ignore_eos=True),
            namespace=namespace,
            sink=prompt.sink,
        )
        for prompt in prompts
    ]
    answers = generate(engine, requests)
    for answer in answers:
        assert isinstance(answer, Delta), answer
    return answers


def check(oracle: Oracle, prompt: Prompt, answer: Delta) -> None:
    assert len(answer.token_ids) == NUM_TOKENS
    assert_agrees(oracle, prompt, Result(list(answer.token_ids), list(answer.logprobs), 0, None, None))


def flip_last_bit(file: Path) -> bytes:
    """Damage a file; what it holds then."""
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    return bytes(data)


def test_a_new_engine_answers_from_the_disk(
    tiny_model: Path, tiny_oracle: Oracle, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    text = Text(7)
    # An engine takes long to start, and asks no mode: what chunks are computed behind is each request's.
    kinds: list[dict[str, list[int]]] = [{}, {"sink": text(19)}, {"prefix": text(19)}]
    chunks = [Use(text(n)) for n in (37, 64, 5, 90)]
    q, r = text(9), text(12)
    flipped: list[tuple[Path, bytes]] = []

    with running(tiny_model, tmp_path) as engine:
        for behind in kinds:
            earlier = set(tmp_path.rglob("*.safetensors"))
            prompt = Prompt([chunks[0], text(3), chunks[1], chunks[2], text(1), chunks[3], q], **behind)
            (answer,) = ask(engine, prompt)
            check(tiny_oracle, prompt, answer)
            assert answer.reuse.sources == ("computed",) * 4, "the same chunks behind something else are others"
            files = set(tmp_path.rglob("*.safetensors")) - earlier
            assert len(files) == 4 + bool(behind), "an answered request's chunks are on disk"
            smallest = min(files, key=lambda file: file.stat().st_size)  # chunk 2
            flipped.append((smallest, flip_last_bit(smallest)))
    capfd.readouterr()

    with running(tiny_model, tmp_path) as engine:
        for behind, (smallest, content) in zip(kinds, flipped, strict=True):
            prefix = behind.get("prefix", [])
            # The last chunk, whole on disk, with its first block and another one computed in their places.
            last = chunks[3].chunk
            in_part = [last[:16], Use(last, 16, 32, whole=True), last[48:64], Use(last, 64, whole=True)]
            # Not at the start, where its first block would be found as what it is: the beginning of a prompt.
            reordered = Prompt([text(2), *in_part, text(2), chunks[0], chunks[1], q], **behind)
            again = Prompt([text(4), chunks[1], r], **behind)
            answers = ask(engine, reordered, again)
            for prompt, answer in zip((reordered, again), answers, strict=True):
                check(tiny_oracle, prompt, answer)
                chunk_tokens = sum(span.num_tokens for span in prompt.spans)
                assert answer.reuse.reused_tokens == len(prefix) + chunk_tokens, "literals were computed, nothing else"
            # Each is loaded once; of two requests that come together either may be the first.
            assert sorted(source for answer in answers for source in answer.reuse.sources) == ["disk"] * 4 + ["hbm"]

            damaged = Prompt([chunks[0], text(2), chunks[2], chunks[3], r], **behind)
            (answer,) = ask(engine, damaged)
            check(tiny_oracle, damaged, answer)
            assert answer.reuse.sources == ("hbm", "computed", "hbm")
            assert smallest.read_bytes() != content, "what was computed is saved in its place"

            (answer,) = ask(engine, reordered, namespace="another tenant")
            check(tiny_oracle, reordered, answer)
            assert set(answer.reuse.sources) == {"computed"}

            elsewhere = Prompt([chunks[0], text(2), chunks[1], r], sink=text(3))
            (answer,) = ask(engine, elsewhere)
            check(tiny_oracle, elsewhere, answer)
            assert set(answer.reuse.sources) == {"computed"}, "behind another sink, a chunk is another one"
    said = capfd.readouterr().err
    assert said.count("its checksum does not match its content") == len(kinds)
