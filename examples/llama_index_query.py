"""Ask this repository's documentation through a LlamaIndex query engine, and see what answers cite and reuse.

python examples/llama_index_query.py --model .models/smollm2-135m --store .demo-query
"""

from __future__ import annotations

import argparse
from pathlib import Path

from llama_index.core import Document, StorageContext, VectorStoreIndex
from llama_index.core.node_parser import TokenTextSplitter

from lazyrag.integrations.llama_index import LazyRAGLLM, LazyRAGVectorStore, configure

ROOT = Path(__file__).resolve().parents[1]
FILES = ["CONTRIBUTING.md", "kernels/README.md", "integrations/README.md"]
QUESTION = "How is a file type added?"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--store", default="kb")
    parser.add_argument("--mode", default="lazy")  # unmeasured, for speed; see `lazyrag calibrate`
    settings = vars(parser.parse_args())

    # The model, its tokenizer (for packing prompts) and the embedder become LlamaIndex's defaults.
    llm = configure(LazyRAGLLM(max_tokens=16, **settings))
    texts = {name: (ROOT / name).read_text(encoding="utf-8")[:3000] for name in FILES}
    documents = [Document(id_=name, text=text, metadata={"file_path": name}) for name, text in texts.items()]

    # What the vector store holds are chunks from now on, whose KV is computed once for whatever prompt holds them.
    index = VectorStoreIndex.from_documents(
        documents,
        transformations=[TokenTextSplitter(chunk_size=200, chunk_overlap=0)],
        storage_context=StorageContext.from_defaults(vector_store=LazyRAGVectorStore(**settings)),
    )
    response = index.as_query_engine(similarity_top_k=3, streaming=True).query(QUESTION)
    print(QUESTION)
    response.print_response_stream()

    # The same chunks in another order, in a prompt of your own: they are found by their text, and reused.
    passages = [hit.node.get_content() for hit in reversed(response.source_nodes)]
    report = llm.complete("\n---\n".join([*passages, "Name the topic of these passages."])).raw["lazyrag"]
    print(f"\n\n{report['reused_tokens']} of {report['prompt_tokens']} prompt tokens reused, from")
    for cited in report["citations"]:
        print(f"  {cited['document_id']}, characters {cited['start']}-{cited['end']}")


if __name__ == "__main__":
    main()
