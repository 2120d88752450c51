"""Answers batches of prompts with the product's engine, whose core runs in a process of its own.

A separate program, since vLLM fixes for a whole process whether engine cores get their own.

    python own_process.py MODEL < batches.json > answers.json

A batch is a list of {"token_ids", "spans": [[start, num_tokens, offset], ...], "namespace", "max_tokens"}.
"""

import json
import os
import sys


def main() -> None:
    model, batches = sys.argv[1], json.load(sys.stdin)
    # vLLM writes to the standard output; the answers must be all there is.
    answers_to = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    from lazyrag.backend.engine import Request, Sampling, generate
    from lazyrag.backend.local import LocalEngine
    from lazyrag.types import Segment

    engine = LocalEngine(model, mode="lazy", dtype="float32", max_model_len=2048, kv_cache_bytes=1 << 28, debug=True)

    def request(spec):
        segments = [Segment("", start, num_tokens, offset) for start, num_tokens, offset in spec["spans"]]
        sampling = Sampling(max_tokens=spec["max_tokens"], logprobs=3, ignore_eos=True)
        return Request(spec["token_ids"], segments, sampling=sampling, namespace=spec["namespace"])

    def answer(result):
        if isinstance(result, Exception):
            raise result
        return {
            "token_ids": result.token_ids,
            "logprobs": [list(step.items()) for step in result.logprobs],
            "sources": result.reuse.sources,
            "reused_tokens": result.reuse.reused_tokens,
        }

    try:
        json.dump([[answer(r) for r in generate(engine, list(map(request, batch)))] for batch in batches], answers_to)
        answers_to.flush()
    finally:
        engine.close()


if __name__ == "__main__":
    main()
