"""Why was a chunk not reused? The usual ways in which an application alters one, and what `explain` says of each.

python examples/why_no_hit.py --model .models/smollm2-135m

Nothing here starts an engine: prompts are planned, not sent.
"""

from __future__ import annotations

import argparse
import json
import textwrap

from langchain_core.documents import Document
from langchain_core.prompts import PromptTemplate

from lazyrag import LazyRAG
from lazyrag.integrations.langchain import format_docs

PASSAGE = """\
The keeper said "nobody crosses the old bridge in winter", and wrote it down for Tom & Ann.
In the spring of that year the first ferry was built, of oak and copper, at the southern landing.
It carried forty people, two carts & one cow, and was never late in nine years of service."""


def prompts() -> dict[str, str]:
    """The same question with the same passage, as applications write it."""
    docs = [Document(page_content=PASSAGE, metadata={"source": "chronicle.txt"})]
    fstring = PromptTemplate.from_template("{context}\n\nHow many people did the ferry carry?")
    mustache = PromptTemplate.from_template("{{context}}\n\nHow many people?", template_format="mustache")
    return {
        "format_docs": fstring.format(context=format_docs(docs)),
        "documents put into the template": fstring.format(context=docs),
        "a tool's result as JSON": fstring.format(context=json.dumps({"text": PASSAGE})),
        "a mustache template": mustache.format(context=PASSAGE),
        "indented": fstring.format(context=textwrap.indent(PASSAGE, "    ")),
        "line ends replaced": fstring.format(context=" ".join(PASSAGE.split())),
        "cut off": fstring.format(context=PASSAGE[:190]),
        "another text": fstring.format(context="Ferries are older than bridges."),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--mode", default="lazy")
    rag = LazyRAG(**vars(parser.parse_args()))
    rag.register([PASSAGE])
    for way, prompt in prompts().items():
        print(f"{way}:")
        for row in rag.explain(prompt):
            print(f"  {row.kind:8}{row.num_tokens:5} tokens  {row.reason or ('reusable' if row.piece.reuse else '')}")


if __name__ == "__main__":
    main()
