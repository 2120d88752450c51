"""A conversation that LangGraph keeps: passages of earlier turns are reused in every later one.

python examples/langgraph_chat.py --model .models/smollm2-135m --store .demo-graph
"""

from __future__ import annotations

import argparse
from pathlib import Path

from langchain_core.messages import HumanMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph

from lazyrag.integrations.langchain import ChatLazyRAG, FaissVectorStore, format_docs

ROOT = Path(__file__).resolve().parents[1]
QUESTIONS = ["How is the disk read?", "What are token checksums?"]


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
    model = ChatLazyRAG(max_tokens=32, **settings)

    def answer(state: MessagesState) -> dict[str, list]:
        return {"messages": [model.invoke(state["messages"])]}

    graph = StateGraph(MessagesState).add_node("answer", answer).add_edge(START, "answer")
    app = graph.compile(checkpointer=InMemorySaver())
    thread = {"configurable": {"thread_id": "one"}}
    for question in QUESTIONS:
        passages = format_docs(store.similarity_search(question, k=2))
        state = app.invoke({"messages": [HumanMessage(f"{passages}\n\n{question}")]}, thread)
        last = state["messages"][-1]
        used, report = last.usage_metadata, last.response_metadata["lazyrag"]
        print(f"{question}\n{last.text}")
        print(
            f"{used['input_token_details']['cache_read']} of {used['input_tokens']} prompt tokens reused, from", end=" "
        )
        print(f"{report['sources']}\n")


if __name__ == "__main__":
    main()
