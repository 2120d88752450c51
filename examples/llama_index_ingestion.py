"""Keep a LazyRAG store in step with changing documents by LlamaIndex's ingestion pipeline.

python examples/llama_index_ingestion.py --model .models/smollm2-135m --store .demo-ingestion
"""

from __future__ import annotations

import argparse
from pathlib import Path

from llama_index.core import Document
from llama_index.core.ingestion import DocstoreStrategy, IngestionPipeline
from llama_index.core.node_parser import TokenTextSplitter
from llama_index.core.storage.docstore import SimpleDocumentStore

from lazyrag.integrations.llama_index import LazyRAGEmbedding, LazyRAGLLM, LazyRAGVectorStore, configure

TEXT = (Path(__file__).resolve().parents[1] / "CONTRIBUTING.md").read_text(encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--store", default="kb")
    parser.add_argument("--mode", default="lazy")  # unmeasured, for speed; see `lazyrag calibrate`
    settings = vars(parser.parse_args())

    llm = configure(LazyRAGLLM(max_tokens=8, **settings))
    store = LazyRAGVectorStore(**settings)
    # With another vector store, end the transformations with LazyRAGRegister(store=...) instead.
    pipeline = IngestionPipeline(
        transformations=[TokenTextSplitter(chunk_size=200, chunk_overlap=0), LazyRAGEmbedding(**settings)],
        vector_store=store,
        docstore=SimpleDocumentStore(),  # persist it, and the next run knows what is new
        docstore_strategy=DocstoreStrategy.UPSERTS,
    )

    def ingest(*texts: str) -> None:
        documents = [Document(id_=f"part{n}", text=text) for n, text in enumerate(texts)]
        nodes = pipeline.run(documents=documents)
        print(f"{len(nodes)} nodes written, {len(store.get_nodes())} in the store")

    def ask(text: str) -> None:
        report = llm.complete(f"{text}\n\nWhat is this about?").raw["lazyrag"]
        print(f"  {len(report['citations'])} known chunks, {report['reused_tokens']} tokens reused")

    first, second = TEXT[:1500], TEXT[1500:3000]
    ingest(first, second)
    passage = next(node.get_content() for node in store.get_nodes() if "Correct first" in node.get_content())
    ask(passage)  # computes its KV
    ask(passage)  # reuses it
    ingest(first, second)  # nothing has changed
    ingest(first.replace("Correct first", "Correct above all"), second)
    ask(passage)  # what is not in the documents any more is not known any more, and its KV is gone


if __name__ == "__main__":
    main()
