"""An agent that looks things up in a store: the passages that its tool returned are reused when it answers.

python examples/langchain_agent.py --model .models/smollm2-135m --store .demo-agent

SmolLM2 was not trained to call tools; it is told of them in words, and guided decoding makes its call a valid one.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from langchain.agents import create_agent
from langchain_core.tools import create_retriever_tool

from lazyrag.integrations.langchain import ChatLazyRAG, FaissVectorStore

ROOT = Path(__file__).resolve().parents[1]
QUESTION = "Search the documentation: why are engines always spawned?"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--store", default="kb")
    parser.add_argument("--mode", default="lazy")  # unmeasured, for speed; see `lazyrag calibrate`
    settings = vars(parser.parse_args())

    store = FaissVectorStore(**settings)
    decisions = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("## Decisions")[2]
    entries = [entry.strip() for entry in decisions.split("\n- ")[1:]]
    store.add_texts(entries, ids=[f"decision {n}" for n in range(len(entries))])

    search = create_retriever_tool(
        store.as_retriever(search_kwargs={"k": 3}),
        name="search_documentation",
        description="Searches the documentation and returns the passages that fit.",
    )
    # A second agent asks the same: its tool's result stands in another conversation, and nothing of it is computed.
    for name in ("You are brief.", "You explain things to beginners."):
        agent = create_agent(ChatLazyRAG(max_tokens=48, **settings), [search], system_prompt=name)
        *_, called, result, answer = agent.invoke({"messages": [("user", QUESTION)]})["messages"]
        for call in called.tool_calls:
            print(f"{call['name']}({call['args']}) -> {len(result.content)} characters")
        print(answer.text)
        used = answer.usage_metadata
        print(f"{used['input_token_details']['cache_read']} of {used['input_tokens']} prompt tokens reused\n")


if __name__ == "__main__":
    main()
