"""A real model on real documents, with the engine core in its own process, as the product runs it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from engines import Result, assert_agrees
from oracle import Oracle, Prompt, Use

pytestmark = [pytest.mark.engine]

REPO = Path(__file__).parents[2]
MODEL = Path(os.environ.get("LAZYRAG_TEST_MODEL", REPO / ".models" / "smollm2-135m-fp32"))
DATA = Path(os.environ.get("LAZYRAG_TEST_DATA", REPO.parent / "shared" / "data")) / "2wiki_lazyattn_demo_20.jsonl"


@pytest.fixture(scope="module")
def batches():
    """Two questions over real passages: cold; reordered, one twice, beside an ordinary prompt; for another tenant."""
    if not (MODEL / "config.json").exists():
        pytest.skip(f"no model in {MODEL}: type make .models/smollm2-135m-fp32/config.json")
    if not DATA.exists():
        pytest.skip(f"no questions in {DATA}: set LAZYRAG_TEST_DATA")
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))

    def tokens(text):
        return tokenizer.encode(text, add_special_tokens=False).ids

    first, second = (json.loads(line) for line in DATA.read_text(encoding="utf-8").splitlines()[:2])
    docs = [Use(tokens(doc["text"].strip())) for doc in first["docs"][:5]]
    opening, between = tokens("Answer the question from these passages.\n\n"), tokens("\n\nPassage:\n")

    def prompt(documents, question, **how):
        parts = [part for doc in documents for part in (between, doc)]
        return Prompt([opening, *parts, tokens(f"\n\nQuestion: {question}\nAnswer:")], **how)

    a, b, c, d, e = docs
    ordinary = Prompt([opening + a.chunk + tokens(f"\n\n{second['question']}")])
    return [
        [prompt([a, b, c, d, e], first["question"])],
        [prompt([e, c, a, c], second["question"]), ordinary],
        [prompt([b, a], first["question"], salt="tenant")],
    ]


def run(batches, max_tokens):
    specs = [
        [
            {
                "token_ids": p.token_ids,
                "spans": [[s.start, s.num_tokens, s.offset] for s in p.spans],
                "namespace": p.salt,
                "max_tokens": max_tokens,
            }
            for p in batch
        ]
        for batch in batches
    ]
    environment = {k: v for k, v in os.environ.items() if k != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("own_process.py"), MODEL],
        input=json.dumps(specs),
        capture_output=True,
        text=True,
        env=environment,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stderr == "", "nothing is wrong, so nobody needs to be told"
    return json.loads(done.stdout)


def test_real_documents_through_the_products_engine(batches):
    oracle = Oracle(MODEL)
    answers = run(batches, max_tokens=8)
    for batch, given in zip(batches, answers, strict=True):
        for prompt, answer in zip(batch, given, strict=True):
            logprobs = [dict(map(tuple, step)) for step in answer["logprobs"]]
            assert_agrees(oracle, prompt, Result(answer["token_ids"], logprobs, 0, None, None))
    sources = [[answer["sources"] for answer in given] for given in answers]
    assert sources == [[["computed"] * 5], [["hbm"] * 4, []], [["computed"] * 2]]
