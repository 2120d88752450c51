"""Ask a running LazyRAG server through OpenAI's own client: documents in, a question, what was reused.

lazyrag serve --model .models/smollm2-135m --store .demo-served
python examples/openai_client.py --url http://127.0.0.1:8000
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from openai import OpenAI

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--key", default="none", help="an API key, if the server has some")
    arguments = parser.parse_args()
    client = OpenAI(base_url=f"{arguments.url}/v1", api_key=arguments.key)
    (model,) = client.models.list().data

    # Documents and search are LazyRAG's own routes; the client sends them as it does its own.
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")[:3000]
    documents = [{"id": "contributing", "text": text, "source": "CONTRIBUTING.md"}]
    print(client.post("/documents", cast_to=dict[str, Any], body={"documents": documents}))
    question = "Which commands does a contributor type every day?"
    hits = client.post("/search", cast_to=dict[str, Any], body={"query": question, "k": 2})["data"]

    # The prompt is yours. What was ingested is found in it by its text, in whatever order.
    for passages in ([hit["text"] for hit in hits], [hit["text"] for hit in reversed(hits)]):
        content = "\n\n".join([*passages, question])
        stream = client.chat.completions.create(
            model=model.id,
            messages=[{"role": "user", "content": content}],
            max_tokens=16,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        for chunk in stream:
            print("".join(choice.delta.content or "" for choice in chunk.choices), end="", flush=True)
            if chunk.usage is not None and chunk.usage.prompt_tokens_details is not None:
                reused = chunk.usage.prompt_tokens_details.cached_tokens
                print(f"\n{reused} of {chunk.usage.prompt_tokens} prompt tokens reused")


if __name__ == "__main__":
    main()
