"""LangChain's own suite for chat models, unmodified, on a real engine with a small model."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_tests.integration_tests import ChatModelIntegrationTests

from lazyrag.client import LazyRAG, start_engine
from lazyrag.config import Config
from lazyrag.integrations.langchain import ChatLazyRAG

pytestmark = [
    pytest.mark.engine,
    # vLLM's own, while it starts.
    pytest.mark.filterwarnings("ignore:`torch:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`torch:FutureWarning"),
]

REPO = Path(__file__).parents[2]
MODEL = Path(os.environ.get("LAZYRAG_TEST_MODEL", REPO / ".models" / "smollm2-135m-fp32"))


@pytest.fixture(scope="session")
def client() -> Iterator[LazyRAG]:
    """A client on a real engine."""
    if not (MODEL / "config.json").exists():
        pytest.skip(f"no model in {MODEL}: type make .models/smollm2-135m-fp32/config.json")
    config = Config.load(model=str(MODEL), max_model_len=1024, kv_cache_bytes=1 << 28)
    engine = start_engine(config, MODEL)
    yield LazyRAG(config, engine=engine)
    engine.close()


class TestChatModelIntegration(ChatModelIntegrationTests):
    """What is skipped is skipped by the suite's own switches; integrations/README.md names each."""

    @pytest.fixture(autouse=True)
    def _client(self, client: LazyRAG) -> None:
        self.client = client

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatLazyRAG

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"lazyrag": self.client, "max_tokens": 64, "temperature": 0.0}

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def supports_model_override(self) -> bool:
        return False
