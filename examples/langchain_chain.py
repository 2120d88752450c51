"""Ask this repository's documentation through a LangChain chain, and see what the answer cites and reuses.

python examples/langchain_chain.py --model .models/smollm2-135m --store .demo-chain
"""

from __future__ import annotations

import argparse
from pathlib import Path

from langchain_core.documents import Document
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnablePassthrough
from langchain_text_splitters import RecursiveCharacterTextSplitter

from lazyrag.integrations.langchain import ChatLazyRAG, FaissVectorStore, format_docs

ROOT = Path(__file__).resolve().parents[1]
FILES = ["CONTRIBUTING.md", "kernels/README.md", "integrations/README.md"]
QUESTION = "How is a file type added?"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--store", default="kb")
    parser.add_argument("--mode", default="lazy")  # unmeasured, for speed; see `lazyrag calibrate`
    settings = vars(parser.parse_args())

    # What the vector store holds are chunks from now on, whose KV is computed once for whatever prompt holds them.
    texts = {name: (ROOT / name).read_text(encoding="utf-8")[:3000] for name in FILES}
    documents = [Document(page_content=text, metadata={"source": name}) for name, text in texts.items()]
    pieces = RecursiveCharacterTextSplitter(chunk_size=600, chunk_overlap=0).split_documents(documents)
    store = FaissVectorStore(**settings)
    store.add_documents(pieces, ids=[f"{piece.metadata['source']} {n}" for n, piece in enumerate(pieces)])

    prompt = ChatPromptTemplate.from_template("{context}\n\nQuestion: {question}")
    model = ChatLazyRAG(max_tokens=32, **settings)
    retriever = store.as_retriever(search_kwargs={"k": 3})
    chain = {"context": retriever | format_docs, "question": RunnablePassthrough()} | prompt | model

    print(QUESTION)
    for chunk in chain.stream(QUESTION):
        print(chunk.text, end="", flush=True)

    # The same chunks in another order, in a prompt of your own: they are found by their text, and reused.
    passages = format_docs(reversed(retriever.invoke(QUESTION)))
    answer = model.invoke(f"Name the topic of these passages.\n\n{passages}\n\nThe topic is:")
    used = answer.usage_metadata
    print(f"\n\n{used['input_token_details']['cache_read']} of {used['input_tokens']} prompt tokens reused, from")
    for cited in answer.response_metadata["lazyrag"]["citations"]:
        print(f"  {cited['source']}, characters {cited['start']}-{cited['end']} of its piece")


if __name__ == "__main__":
    main()
