"""Talk about documents through a LlamaIndex chat engine; its system prompt is registered by name.

lazyrag ingest CONTRIBUTING.md kernels/README.md --model .models/smollm2-135m --store .demo-chat
python examples/llama_index_chat.py --store .demo-chat
"""

from __future__ import annotations

import argparse
from typing import Any

from llama_index.core.chat_engine import ContextChatEngine
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events import BaseEvent
from llama_index.core.instrumentation.events.llm import LLMChatEndEvent

from lazyrag.integrations.llama_index import LazyRAGLLM, LazyRAGRetriever, configure

SYSTEM = """\
You answer questions about the software whose documentation you are shown. Answer in one short sentence, in plain words,
from what the documentation says and from nothing else. If it does not say, say that the documentation does not say it.
Never make up names of files, settings or commands: whoever reads your answer is going to type them."""
REPORTS: list[dict[str, Any]] = []  # what each of LlamaIndex's requests to the model reused
QUESTIONS = ["Which principles does the project have?", "And how does one add an embedder?"]


class KeepReports(BaseEventHandler):
    def handle(self, event: BaseEvent, **kwargs: Any) -> None:
        if isinstance(event, LLMChatEndEvent) and event.response is not None:
            REPORTS.append(event.response.raw["lazyrag"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--store", default="kb")
    parser.add_argument("--mode", default="lazy")  # unmeasured, for speed; see `lazyrag calibrate`
    settings = vars(parser.parse_args())

    get_dispatcher().add_event_handler(KeepReports())
    llm = configure(LazyRAGLLM(max_tokens=16, **settings))
    llm.register("system", SYSTEM)
    retriever = LazyRAGRetriever(similarity_top_k=2, **settings)
    engine = ContextChatEngine.from_defaults(retriever, llm=llm, system_prompt=SYSTEM)
    for question in QUESTIONS:
        print(f"\n{question}")
        answer = engine.stream_chat(question)
        for token in answer.response_gen:
            print(token, end="", flush=True)
        print(f"\n{REPORTS[-1]['reused_tokens']} of {REPORTS[-1]['prompt_tokens']} prompt tokens reused")
        print("Sources:", ", ".join(dict.fromkeys(node.metadata["source"] for node in answer.source_nodes)))


if __name__ == "__main__":
    main()
