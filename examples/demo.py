"""Documents in, answers out, every chunk's KV reused: LangChain and LlamaIndex over one store, on a CPU.

    python examples/demo.py --model .models/smollm2-135m --store .demo

The corpus is what this environment's packages say of themselves (their long descriptions). Three questions go through a
LangChain chain and one through a LlamaIndex query engine. Then each prompt is asked once more with its passages in
another order, of LazyRAG and of stock vLLM with prefix caching, which has seen the same prompt in the first order.
"""

import argparse
import random
import re
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, metadata, requires
from pathlib import Path

from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import PromptTemplate
from langchain_core.runnables import RunnablePassthrough
from llama_index.core.query_engine import RetrieverQueryEngine
from rich.console import Console
from rich.table import Table

from lazyrag import Document, LazyRAG, Sampling
from lazyrag.ingest import Summary
from lazyrag.integrations import langchain, llama_index

QUESTIONS = [
    "How do I install faiss and what is it good for?",
    "How can I validate data with pydantic?",
    "What does hypothesis do, and how does it differ from an ordinary test?",
]
LAST_QUESTION = "Which formats can rich render in a terminal?"
MAX_CHARS = 8000  # of each description: pydantic's holds its whole changelog
PROMPT = PromptTemplate.from_template(
    "Use the passages to answer the question in one or two sentences.\n\n{context}\n\nQuestion: {question}\nAnswer:"
)

console = Console()


def corpus() -> Iterator[Document]:
    """The long description of every package that lazyrag names as a requirement and that is installed here."""
    names = {re.match(r"[\w.-]+", requirement)[0] for requirement in requires("lazyrag")}
    for name in sorted(names):
        try:
            package = metadata(name)
        except PackageNotFoundError:
            continue
        text = (package.get_payload() or package["Description"] or "")[:MAX_CHARS]
        if text.strip():
            yield Document(
                f"pypi:{name}", text, source=f"{package['Name']} {package['Version']}", title=package["Name"]
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--k", type=int, default=6, help="passages a question")
    arguments = parser.parse_args()
    # By name, whatever it costs in answers: by itself a model reuses what `lazyrag calibrate` has found to cost none.
    settings = {"model": str(arguments.model), "store": arguments.store, "mode": "lazy"}

    console.rule("Ingest: split, embed, compute every chunk's KV once")
    rag = LazyRAG.shared(**settings)
    ingest(rag)

    console.rule("Ask, through LangChain")
    retriever = langchain.LazyRAGRetriever(k=arguments.k, **settings)
    inputs = {"context": retriever | langchain.format_docs, "question": RunnablePassthrough()}
    chain = inputs | PROMPT | langchain.LazyRAGLLM(max_tokens=48, **settings) | StrOutputParser()
    for question in QUESTIONS:
        show(question, chain.invoke(question), [d.metadata["source"] for d in retriever.invoke(question)])

    console.rule("Ask, through LlamaIndex")
    engine = RetrieverQueryEngine.from_args(
        llama_index.LazyRAGRetriever(similarity_top_k=arguments.k, **settings),
        llm=llama_index.LazyRAGLLM(max_tokens=48, **settings),
    )
    response = engine.query(LAST_QUESTION)
    show(LAST_QUESTION, str(response), [node.metadata["source"] for node in response.source_nodes])

    console.rule("The same passages in another order: time to the first token")
    stock = LazyRAG(model=str(arguments.model), store=arguments.store, mode="exact")
    compare(rag, stock, arguments.k)


def ingest(rag: LazyRAG) -> None:
    with console.status("Starting the engine") as status:
        for event in rag.ingest(documents=corpus()):
            if isinstance(event, Summary):
                console.print(
                    f"{event.added} documents added, {event.changed} changed, {event.unchanged} unchanged; "
                    f"{event.embedded} chunks embedded, the KV of {event.warmed} computed."
                )
            else:
                status.update(f"{event.stage} {event.done} of {event.total}")


def show(question: str, answer: str, sources: list[str]) -> None:
    console.print(f"[bold]{question}[/]\n{answer.strip()}\n[dim]Sources: {', '.join(dict.fromkeys(sources))}[/]\n")


def compare(rag: LazyRAG, stock: LazyRAG, k: int) -> None:
    one, shuffle = Sampling(max_tokens=1), random.Random(0).shuffle
    table = Table("question", "prompt", "reused", "computed", "LazyRAG", "prefix caching", "ratio", box=None)
    for question in [*QUESTIONS, LAST_QUESTION]:
        passages = [hit.chunk.text for hit in rag.search(question, k)]
        orders = [passages[:], passages[:]]
        shuffle(orders[1])
        first, again = (PROMPT.format(context="\n\n".join(order), question=question) for order in orders)
        answers = []
        for arm in (rag, stock):
            arm.generate([first], one)
            answers += arm.generate([again], one)
        reuse, (lazy, plain) = answers[0].reuse, (1000 * answer.ttft_s for answer in answers)
        cells = (reuse.prompt_tokens, reuse.reused_tokens, reuse.computed_tokens)
        table.add_row(question, *map(str, cells), f"{lazy:.0f} ms", f"{plain:.0f} ms", f"{plain / lazy:.1f}x")
    console.print(table)


if __name__ == "__main__":
    main()
