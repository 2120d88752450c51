"""The examples do what they say, on a small real model that all of them share."""

from __future__ import annotations

import gc
import re
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lazyrag.backend.server.app import create_app
from lazyrag.client import LazyRAG
from lazyrag.ingest import Summary

pytestmark = [
    pytest.mark.usefixtures("real_model"),
    pytest.mark.engine,
    pytest.mark.filterwarnings("ignore:`torch"),
    # vLLM leaves one behind when it is shut down.
    pytest.mark.filterwarnings("ignore:Unclosed context:ResourceWarning"),
    # LlamaIndex's chat memory does not close its database.
    pytest.mark.filterwarnings("ignore:.*was deleted before being closed:ResourceWarning"),
]

REPO = Path(__file__).parents[2]
EXAMPLES = REPO / "examples"
REUSED = re.compile(r"(\d+) of (\d+) prompt tokens reused")
Run = Callable[..., str]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """Run an example as a program, in an empty folder; what it printed."""
    core = pytest.importorskip("llama_index.core")
    handlers = core.instrumentation.get_dispatcher().event_handlers
    before, num_handlers = dict(vars(core.Settings)), len(handlers)
    monkeypatch.chdir(tmp_path)

    def run(name: str, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        capsys.readouterr()
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    yield run
    del handlers[num_handlers:]
    vars(core.Settings).update(before)
    gc.collect()  # while the filters above hold


def shares(output: str) -> list[float]:
    """What share of each prompt was reused."""
    return [int(reused) / int(prompt) for reused, prompt in REUSED.findall(output)]


def ingest(rag: LazyRAG, *names: str) -> None:
    *_, summary = rag.ingest([REPO / name for name in names], warm=False)
    assert isinstance(summary, Summary)
    assert not summary.failed


def test_llama_index_query(run: Run) -> None:
    output = run("llama_index_query.py", "--store", "query")
    (share,) = shares(output)
    assert share > 0.8
    cited = re.findall(r"  (\S+\.md), characters (\d+)-(\d+)", output)
    assert len(cited) == 3
    for name, start, end in cited:
        text = (REPO / name).read_text(encoding="utf-8")[int(start) : int(end)]
        assert len(text) > 100
        assert text == text.strip()


def test_llama_index_chat(run: Run) -> None:
    ingest(LazyRAG.shared(store="chat"), "CONTRIBUTING.md")
    output = run("llama_index_chat.py", "--store", "chat")
    _, second = shares(output)
    assert second > 0.1, "the system prompt, at least, was there before"
    assert output.count("Sources: ") == 2
    assert "CONTRIBUTING.md" in output


def test_llama_index_ingestion(run: Run) -> None:
    lines = run("llama_index_ingestion.py", "--store", "ingestion").splitlines()
    written = [re.findall(r"\d+", line) for line in lines if "written" in line]
    assert written[0][0] == written[0][1]
    assert [int(count) for count, _ in written][1] == 0
    assert 0 < int(written[2][0]) < int(written[0][0])
    asked = [[int(n) for n in re.findall(r"\d+", line)] for line in lines if "known" in line]
    assert [known for known, _ in asked] == [1, 1, 0]
    assert [reused > 0 for _, reused in asked[1:]] == [True, False]


def test_openai_client(run: Run, serving: Callable[[Any], Any]) -> None:
    rag = LazyRAG.shared(store="served")
    with serving(create_app(rag)) as url:
        output = run("openai_client.py", "--url", url)
    _, second = shares(output)
    assert second > 0.7, "the same passages in another order"
    assert "'added': 1" in output
