"""LangChain's own suite for chat models, unmodified, and the examples, on a real engine with a small model."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_tests.integration_tests import ChatModelIntegrationTests

from lazyrag.integrations.langchain import ChatLazyRAG

pytestmark = [
    pytest.mark.usefixtures("real_model"),
    pytest.mark.engine,
    # vLLM's own, while it starts and stops.
    pytest.mark.filterwarnings("ignore:`torch"),
    pytest.mark.filterwarnings("ignore:Unclosed context:ResourceWarning"),
]

REPO = Path(__file__).parents[2]
EXAMPLES = REPO / "examples"
REUSED = re.compile(r"(\d+) of (\d+) prompt tokens reused")


# ---------------------------------------------------------------- LangChain's suite


class TestChatModelIntegration(ChatModelIntegrationTests):
    """What is skipped is skipped by the suite's own switches; integrations/README.md names each."""

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatLazyRAG

    @property
    def chat_model_params(self) -> dict[str, Any]:
        # Greedy and without a penalty, so small a model repeats itself within a string until it has no tokens left.
        return {"max_tokens": 128, "temperature": 0.0, "frequency_penalty": 0.2}

    @property
    def supports_model_override(self) -> bool:
        return False

    @property
    def supports_json_mode(self) -> bool:
        return True


# ---------------------------------------------------------------- the examples

Run = Callable[[str], str]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run an example as a program, with a store of its own; what it printed."""

    def run(name: str) -> str:
        monkeypatch.setattr(sys, "argv", [name, "--store", str(tmp_path / "kb")])
        capsys.readouterr()
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return run


def shares(output: str) -> list[float]:
    """What share of each prompt was reused."""
    return [int(reused) / int(prompt) for reused, prompt in REUSED.findall(output)]


def test_a_chains_passages_are_reused_in_another_prompt_and_cited(run: Run) -> None:
    output = run("langchain_chain.py")
    (share,) = shares(output)
    assert share > 0.7
    assert output.count("of its piece") == 3


def test_an_agent_searches_and_another_one_reuses_what_it_found(run: Run) -> None:
    output = run("langchain_agent.py")
    assert output.count("search_documentation({'query': ") == 2
    assert shares(output)[1] > 0.4


def test_a_conversation_that_langgraph_keeps_reuses_the_passages_of_earlier_turns(run: Run) -> None:
    output = run("langgraph_chat.py")
    assert "['hbm', 'hbm'" in output
    assert shares(output)[1] > 0.3
