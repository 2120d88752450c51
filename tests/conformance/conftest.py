"""A small model folder, texts, and a client over the fake engine."""

from __future__ import annotations

import gc
import json
import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import uvicorn

from lazyrag.backend.fake import FakeEngine
from lazyrag.backend.server import app as server_app
from lazyrag.backend.server.app import bound, run
from lazyrag.backend.server.auth import Keys
from lazyrag.client import LazyRAG, close_engines
from lazyrag.ingest import Summary
from lazyrag.types import Document

CHATML = """\
{% if tools %}<|im_start|>system
Tools, one a line:
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls or [] %}
<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

NO_TOOLS = """\
{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

REAL_MODEL = Path(os.environ.get("LAZYRAG_TEST_MODEL", Path(__file__).parents[2] / ".models" / "smollm2-135m-fp32"))
CONTEXT = 4096
WORDS = str.split(
    "the of and a to in river bridge keeper letter stone market winter harbour under early light north "
    "seven copper window paper garden field between after before slowly always never carried opened "
    "measured wrote counted found water iron wheel lantern corner season village road answer question "
    "number green silver quiet narrow tall"
)


def passage(seed: int, num_sentences: int = 6) -> str:
    """A text of a few sentences, another one for each seed."""
    rng = random.Random(seed)
    sentences = [" ".join(rng.choices(WORDS, k=rng.randint(8, 16))).capitalize() + "." for _ in range(num_sentences)]
    return " ".join(sentences)


@pytest.fixture(scope="module", autouse=True)
def mode() -> Iterator[None]:
    """Models that were never calibrated run in mode exact, and these tests are of reuse."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LAZYRAG_MODE", "lazy")
        yield


@pytest.fixture
def llama_index_settings() -> Iterator[None]:
    """LlamaIndex's settings are global; a test gets them back as they were."""
    from llama_index.core import Settings

    before = dict(vars(Settings))
    yield
    vars(Settings).update(before)


@pytest.fixture(scope="module")
def real_model(mode: None) -> Iterator[None]:
    """Settings with a small real model, the same for all tests, so that one engine serves them."""
    if not (REAL_MODEL / "config.json").exists():
        pytest.skip(f"no model in {REAL_MODEL}: type make .models/{REAL_MODEL.name}/config.json")
    with pytest.MonkeyPatch.context() as patch:
        for variable in [name for name in os.environ if name.startswith("LAZYRAG_")]:
            patch.delenv(variable)
        patch.setenv("LAZYRAG_MODEL", str(REAL_MODEL))
        patch.setenv("LAZYRAG_MODE", "lazy")
        patch.setenv("LAZYRAG_EMBEDDER", "hash")
        patch.setenv("LAZYRAG_KV_DISK", "false")
        patch.setenv("LAZYRAG_KV_CACHE_BYTES", "256MiB")
        patch.setenv("LAZYRAG_MAX_MODEL_LEN", "2048")
        patch.setattr(LazyRAG, "_shared", {})
        yield
        close_engines()
    gc.collect()  # while the test's own filters of warnings hold


@pytest.fixture(scope="session")
def passages() -> list[str]:
    return [passage(seed) for seed in range(12)]


def save_model(folder: Path, texts: list[str], template: str | None, context: int = CONTEXT) -> Path:
    """Write what the text half reads of a model: tokenizer, chat template and context window."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": context}))
    return folder


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory, passages: list[str]) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), passages, CHATML)


@pytest.fixture(scope="session")
def folder_without_tools(tmp_path_factory: pytest.TempPathFactory, passages: list[str]) -> Path:
    return save_model(tmp_path_factory.mktemp("model-without-tools"), passages, NO_TOOLS)


@pytest.fixture(scope="session")
def base_folder(tmp_path_factory: pytest.TempPathFactory, passages: list[str]) -> Path:
    """A model without a chat template."""
    return save_model(tmp_path_factory.mktemp("base-model"), passages, None)


Connect = Callable[..., tuple[LazyRAG, FakeEngine]]


@pytest.fixture
def connect(model_folder: Path) -> Iterator[Connect]:
    """Make a client over a fake engine; arguments are the engine's, `config=` holds the client's settings."""
    engines = []

    def make(
        folder: Path = model_folder, *, config: dict[str, Any] | None = None, **engine: Any
    ) -> tuple[LazyRAG, FakeEngine]:
        engines.append(FakeEngine(folder, **{"max_model_len": CONTEXT, **engine}))
        return LazyRAG(model=str(folder), engine=engines[-1], **(config or {})), engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture
def shelved(connect: Connect, tmp_path: Path, passages: list[str]) -> LazyRAG:
    """A client whose store holds the passages, two to a document, on a page each."""
    client, _ = connect(config={"store": tmp_path / "store", "embedder": "hash", "chunk_size": 150})
    documents = [
        Document(
            f"doc{n}",
            "\n\n".join(pair),
            f"doc{n}.txt",
            title=f"Document {n}",
            metadata={"year": 1900 + n},
            pages=(0, len(pair[0]) + 1),
        )
        for n, pair in enumerate(zip(passages[::2], passages[1::2], strict=True))
    ]
    *_, summary = client.ingest(documents=documents, warm=False)
    assert isinstance(summary, Summary)
    assert summary.exit_code == 0
    return client


@contextmanager
def served(app: Any) -> Iterator[str]:
    """The app in a real server; yields its address."""
    ready = threading.Event()
    listener = bound("127.0.0.1", 0, Keys())
    host, port = listener.getsockname()
    servers: list[uvicorn.Server] = []

    class Kept(server_app._Server):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            servers.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server_app, "_Server", Kept)
        thread = threading.Thread(target=run, args=(app, listener), kwargs={"started": ready.set})
        thread.start()
        assert ready.wait(30)
    try:
        yield f"http://{host}:{port}"
    finally:
        servers[0].should_exit = True
        thread.join(60)
        listener.close()


@pytest.fixture(scope="session")
def serving() -> Callable[[Any], Any]:
    """`with serving(app) as url`: the app in a real server."""
    return served
