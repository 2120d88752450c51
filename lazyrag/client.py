"""LazyRAG: the one object behind every façade. It finds known chunks in prompts, and has them answered by an engine."""

from __future__ import annotations

import asyncio
import atexit
import json
import threading
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import replace
from hashlib import blake2b
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from lazyrag.backend import engine as engines
from lazyrag.backend.engine import Delta, Engine, EngineInfo, Request, Sampling
from lazyrag.chat import Message, render
from lazyrag.config import Config
from lazyrag.errors import ConfigError
from lazyrag.library import Library
from lazyrag.plan import Planner
from lazyrag.tokens import Tokenizer
from lazyrag.types import Answer, ChunkId, Document, Hit, PromptPlan, Reuse

if TYPE_CHECKING:
    from lazyrag.explain import Row
    from lazyrag.ingest import IngestPlan, Progress, Summary
    from lazyrag.retrievers.search import Searcher
    from lazyrag.retrievers.store import Store

Prompt: TypeAlias = str | Sequence[Message] | PromptPlan

DEFAULT_BLOCK_SIZE = 32
"""For planning without an engine; a running engine says its own."""

REMEMBERED = ("model", "mode", "preamble", "dtype", "embedder")
"""Settings that a store keeps from its last ingest, so that other commands need not repeat them."""

SYSTEM = "Answer the question from the passages. If they do not hold the answer, say that you do not know."
"""The system message of `LazyRAG.query`, unless a preamble is set."""


class LazyRAG:
    """Documents in, answers out, every known chunk's KV reused. Thread-safe; constructing it starts nothing.

    Args:
        config: the settings; None loads them (`Config.load`) with `settings` as arguments.
        engine: run requests on this one, which stays the caller's to close. None: the process's engine for these
            settings, started by the first request that needs it.
        **settings: fields of `Config`.

    Raises:
        ConfigError: a setting that cannot be.
    """

    _shared: ClassVar[dict[Config, LazyRAG]] = {}
    _shared_lock: ClassVar = threading.Lock()

    def __init__(self, config: Config | None = None, *, engine: Engine | None = None, **settings: Any) -> None:
        if config is not None and settings:
            raise ConfigError(
                "Give either a Config or settings, not both.", why=f"Both were given: {sorted(settings)}."
            )
        self._configured = config if config is not None else Config.load(**settings)
        self._config: Config | None = None
        self._engine = engine
        self._lock = threading.RLock()
        self._tokenizer: Tokenizer | None = None
        self._store: Store | None = None
        self._library: Library | None = None
        self._planner: Planner | None = None
        self._searcher: Searcher | None = None

    @classmethod
    def shared(cls, config: Config | None = None, **settings: Any) -> LazyRAG:
        """The process's client for these settings; the same object for the same settings."""
        config = config if config is not None else Config.load(**settings)
        with cls._shared_lock:
            if config not in cls._shared:
                cls._shared[config] = cls(config)
            return cls._shared[config]

    # ------------------------------------------------------------ what needs no engine

    @property
    def config(self) -> Config:
        """The settings; those of `REMEMBERED` that nobody set are the ones that the store was last filled with."""
        with self._lock:
            if self._config is None:
                self._config = self._remembered()
            return self._config

    def _remembered(self) -> Config:
        given = self._configured
        known = self.store.settings() if self.store is not None else {}
        unset = {name: known[name] for name in REMEMBERED if name in known and given.origin(name) == "default"}
        return replace(given, **unset, origins={**given.origins, **dict.fromkeys(unset, str(given.store))})

    @property
    def model(self) -> Path:
        """The model's folder."""
        return model_folder(self.config.model)

    @property
    def store(self) -> Store | None:
        """The store, opened; None if no store is configured, or nothing was ever ingested into it."""
        directory = self._configured.store
        with self._lock:
            if self._store is None and directory is not None:
                from lazyrag.retrievers.store import FILE_NAME, Store

                if (directory / FILE_NAME).is_file():
                    self._store = Store.open(directory)
            return self._store

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = Tokenizer.from_folder(self.model)
            return self._tokenizer

    @property
    def library(self) -> Library:
        """The chunks that this client's namespace knows."""
        with self._lock:
            if self._library is None:
                self._library = Library(self.tokenizer, self.store, self.config.namespace)
            return self._library

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and answer together. Starts no engine: an engine that runs says it, else the model."""
        if self._engine is not None:
            return self._engine.info.max_model_len
        return self.config.max_model_len or context_window(self.model)

    def register(self, texts: Iterable[str]) -> list[ChunkId]:
        """Make texts known as chunks, so that prompts which hold them reuse their KV. Returns their ids, in order.

        Nothing is computed yet: the first prompt that holds a chunk computes its KV, or `warm` does.
        """
        return self.library.register(texts)

    def plan(self, prompt: Prompt, *, hints: Sequence[str] = (), tools: Sequence[Any] | None = None) -> PromptPlan:
        """How a prompt will be sent: which parts are known chunks, in its own order.

        Args:
            prompt: a text as the model shall see it, or messages for the model's chat template.
            hints: texts that probably occur in it, for chunks that the index cannot find by itself.
            tools: passed to the chat template.
        """
        if isinstance(prompt, PromptPlan):
            return prompt
        self.library.refresh()
        planner = self._planner_for_engine()
        if isinstance(prompt, str):
            return planner.plan_text(prompt, hints=hints)
        return planner.plan_pieces(render(self.tokenizer, prompt, tools=tools).pieces, hints=hints)

    def _planner_for_engine(self) -> Planner:
        configured = self.config.block_size or DEFAULT_BLOCK_SIZE
        block_size = self._engine.info.block_size if self._engine is not None else configured
        mode = self._engine.info.mode if self._engine is not None else self.config.mode
        with self._lock:
            if self._planner is None or (self._planner.block_size, self._planner.mode) != (block_size, mode):
                self._planner = Planner(
                    self.tokenizer,
                    self.library.segmenter,
                    get_tokens=self.library.tokens,
                    mode=mode,
                    block_size=block_size,
                    preamble=self.config.preamble,
                    min_tokens=self.config.min_tokens,
                )
            return self._planner

    # ------------------------------------------------------------ what runs the model

    @property
    def engine(self) -> Engine:
        """The engine; the first access starts it, which takes tens of seconds."""
        with self._lock:
            if self._engine is None:
                self._engine = shared_engine(self.config, self.model)
            return self._engine

    @property
    def info(self) -> EngineInfo:
        """What the engine says of itself; starts it."""
        return self.engine.info

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling | None = None,
        *,
        hints: Sequence[str] = (),
        tools: Sequence[Any] | None = None,
    ) -> list[Answer]:
        """Answer prompts together, in order.

        Raises:
            EngineError: the first of the prompts' errors.
        """
        engine = self.engine
        plans = [self.plan(prompt, hints=hints, tools=tools) for prompt in prompts]
        results = engines.generate(engine, [self._request(plan, sampling) for plan in plans])
        return [_answer(plan, result) for plan, result in zip(plans, results, strict=True)]

    async def agenerate(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling | None = None,
        *,
        hints: Sequence[str] = (),
        tools: Sequence[Any] | None = None,
    ) -> list[Answer]:
        """As `generate`, without blocking the caller's event loop."""
        engine = await asyncio.to_thread(lambda: self.engine)
        plans = [self.plan(prompt, hints=hints, tools=tools) for prompt in prompts]
        results = await engines.agenerate(engine, [self._request(plan, sampling) for plan in plans])
        return [_answer(plan, result) for plan, result in zip(plans, results, strict=True)]

    def stream(
        self,
        prompt: Prompt,
        sampling: Sampling | None = None,
        *,
        hints: Sequence[str] = (),
        tools: Sequence[Any] | None = None,
    ) -> Iterator[Delta]:
        """Yield the answer as it is generated; the last delta has `reuse` and `ttft_s`. Closing it cancels."""
        engine = self.engine
        yield from engines.stream(engine, self._request(self.plan(prompt, hints=hints, tools=tools), sampling))

    async def astream(
        self,
        prompt: Prompt,
        sampling: Sampling | None = None,
        *,
        hints: Sequence[str] = (),
        tools: Sequence[Any] | None = None,
    ) -> AsyncIterator[Delta]:
        """As `stream`, without blocking the caller's event loop."""
        engine = await asyncio.to_thread(lambda: self.engine)
        request = self._request(self.plan(prompt, hints=hints, tools=tools), sampling)
        async for delta in engines.astream(engine, request):
            yield delta

    def warm(self, ids: Iterable[ChunkId]) -> Iterator[tuple[ChunkId, Reuse | Exception]]:
        """Compute the KV of known chunks now (or find it on disk); unknown and unusable ones are passed over."""
        tokens = ((id, self.library.tokens(id)) for id in ids)
        yield from self._warm_tokens((id, ids) for id, ids in tokens if ids)

    def _warm_tokens(
        self, chunks: Iterable[tuple[ChunkId, Sequence[int]]]
    ) -> Iterator[tuple[ChunkId, Reuse | Exception]]:
        prefix = self._prefix()
        tail = self.tokenizer.encode_plain("\n")[-1]
        yield from engines.warm(self.engine, chunks, tail=tail, prefix=prefix, namespace=self.config.namespace)

    def _prefix(self) -> tuple[int, ...]:
        """Tokens of the preamble as it begins a chat (or, of a model without chat template, a string prompt)."""
        if self.config.mode != "lazy-prefix":
            return ()
        preamble = self.config.preamble
        chat = [Message("system", preamble), Message("user", "?")]
        plan = self.plan(chat if self.tokenizer.chat_template is not None else f"{preamble}\n?")
        return plan.token_ids[: plan.prefix_len]

    # ------------------------------------------------------------ what needs a store

    def plan_ingest(
        self, paths: Iterable[str | PathLike[str]] = (), *, documents: Iterable[Document] = ()
    ) -> IngestPlan:
        """Compare files, folders and documents with the store, which is made if there is none; changes nothing else.

        Raises:
            ConfigError: no store is configured.
            StoreError: the store was made with another tokenizer or embedder.
        """
        from lazyrag import ingest
        from lazyrag.retrievers.embed import load_embedder
        from lazyrag.retrievers.store import Store
        from lazyrag.splitter import Splitter

        if self.store is None and self._configured.store is not None:
            self.tokenizer.fingerprint  # noqa: B018  (a wrong model is an error before there is a store)
            with self._lock:
                self._store = Store.open(self._configured.store, create=True)
                self._library = None
        return ingest.plan(
            self._needed_store(),
            paths,
            documents=documents,
            splitter=Splitter(self.tokenizer, self.config.chunk_size, self.config.chunk_overlap),
            embedder=load_embedder(self.config.embedder),
            namespace=self.config.namespace,
        )

    def ingest(
        self,
        paths: Iterable[str | PathLike[str]] = (),
        *,
        documents: Iterable[Document] = (),
        plan: IngestPlan | None = None,
        sync: bool = False,
        warm: bool = True,
    ) -> Iterator[Progress | Summary]:
        """Take files, folders and documents into the store; the last event is the Summary. Run it again to resume.

        Args:
            paths: files, folders or globs; "-" reads standard input.
            documents: from elsewhere than files.
            plan: do this one (`plan_ingest`), not a new one.
            sync: delete stored documents whose files are gone from the given folders.
            warm: compute the KV of every chunk now. Else the first prompt that holds a chunk pays for it.

        Raises:
            ConfigError, StoreError: as `plan_ingest`.
            EngineError: the engine cannot start, or stopped.
        """
        from lazyrag import ingest

        plan = plan or self.plan_ingest(paths, documents=documents)
        warm = warm and self.config.mode != "exact"
        if warm:
            fingerprint = self._kv_fingerprint()
        settings = {name: getattr(self.config, name) for name in REMEMBERED} | {"model": str(self.model)}
        plan.store.remember(**settings)
        yield from ingest.run(
            plan, sync=sync, warm=self._warm_tokens if warm else None, fingerprint=fingerprint if warm else None
        )

    def _kv_fingerprint(self) -> str | None:
        """Names what the chunks' KV on disk depends on; None if it is not kept."""
        if self.config.kv_dir is None:
            return None
        prefix = blake2b(repr(self._prefix()).encode(), digest_size=8).hexdigest()
        return f"{self.info.fingerprint}-{prefix}"

    def search(self, query: str, k: int = 4) -> list[Hit]:
        """The k stored chunks nearest to a query, each with the place it came from.

        Raises:
            ConfigError: no store is configured, or it was embedded with another model.
        """
        return self._search().search(query, k, namespace=self.config.namespace)

    async def asearch(self, query: str, k: int = 4) -> list[Hit]:
        """As `search`, without blocking the caller's event loop."""
        return await asyncio.to_thread(self.search, query, k)

    def _search(self) -> Searcher:
        with self._lock:
            if self._searcher is None:
                from lazyrag.retrievers.embed import load_embedder
                from lazyrag.retrievers.search import Searcher

                self._searcher = Searcher(self._needed_store(), load_embedder(self.config.embedder))
            return self._searcher

    def _needed_store(self) -> Store:
        directory = self._configured.store
        if directory is None:
            raise ConfigError("No store is named.", fix="Pass store=..., --store or LAZYRAG_STORE: a folder.")
        if self.store is None:
            raise ConfigError(
                f"There is no store in {directory}.", fix=f"Make one: lazyrag ingest PATH --store {directory}"
            )
        return self.store

    def question(self, question: str, k: int = 4) -> tuple[Prompt, list[Hit]]:
        """The prompt that `query` sends for a question, and the stored chunks it holds."""
        hits = self.search(question, k)
        passages = "\n\n".join(f"[{i}] {hit.chunk.source}\n{hit.chunk.text}" for i, hit in enumerate(hits, 1))
        content = f"{passages}\n\nQuestion: {question}"
        system = self.config.preamble or SYSTEM
        if self.tokenizer.chat_template is None:
            return f"{system}\n\n{content}\nAnswer:", hits
        return [Message("system", system), Message("user", content)], hits

    def query(self, question: str, k: int = 4, sampling: Sampling | None = None) -> Answer:
        """Answer a question from the store: retrieve, build an ordinary chat prompt, generate. `Answer.hits` cites."""
        prompt, hits = self.question(question, k)
        (answer,) = self.generate([prompt], sampling)
        return replace(answer, hits=tuple(hits))

    def explain(self, prompt: Prompt, *, run: bool = False) -> list[Row]:
        """What of a prompt is reused, and why the rest is not: one row for each of its pieces, in order.

        Args:
            prompt: as for `plan`.
            run: send it to the engine, to learn where each chunk's KV comes from.
        """
        from lazyrag.explain import Alterations, explain

        reuse = None
        if run:
            (answer,) = self.generate([prompt], Sampling(max_tokens=1))
            reuse = answer.reuse
        return explain(self.plan(prompt), reuse, nearest=Alterations(self.library.segmenter).find)

    def stats(self) -> dict[str, Any]:
        """Counts of the store, of its KV on disk, and of the engine if it runs."""
        out: dict[str, Any] = {}
        if self.store is not None:
            out["store"] = self.store.stats(self.config.namespace)
        if self.config.kv_dir is not None:
            files = [path for path in self.config.kv_dir.rglob("*.safetensors") if path.is_file()]
            out["kv"] = {"chunks": len(files), "bytes": sum(path.stat().st_size for path in files)}
        if self._engine is not None:
            out["engine"] = self._engine.stats()
        return out

    def _request(self, plan: PromptPlan, sampling: Sampling | None) -> Request:
        default = Sampling(max_tokens=self.config.max_tokens, temperature=self.config.temperature)
        return Request(plan.token_ids, plan.segments, plan.prefix_len, sampling or default, self.config.namespace)


def _answer(plan: PromptPlan, result: Delta | Exception) -> Answer:
    if isinstance(result, Exception):
        raise result
    assert result.finish_reason is not None
    reuse = result.reuse or Reuse(len(plan.token_ids), 0)
    return Answer(result.text, result.token_ids, result.finish_reason, reuse, plan, result.ttft_s)


# ---------------------------------------------------------------- models and engines of this process


def model_folder(name: str) -> Path:
    """The folder of a model: a path, or a name that Hugging Face's cache on this machine holds. Downloads nothing.

    Raises:
        ConfigError: no model is named, or it is not on this machine.
    """
    if not name:
        raise ConfigError("No model is named.", fix="Pass model=..., --model or LAZYRAG_MODEL: a folder or a name.")
    path = Path(name).expanduser()
    if (path / "config.json").is_file():
        return path.resolve()
    if path.exists() or name.startswith((".", "/", "~")):
        raise ConfigError(f"{name} is no model folder:", why="it holds no config.json.")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        raise ConfigError(
            f"The model {name} is not on this machine:",
            why="it is no folder, and Hugging Face's cache does not hold it.",
            fix=f"Type: hf download {name}",
        ) from None


def context_window(model: Path) -> int:
    """The model's context in tokens, as its config.json says."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    config = config.get("text_config", config)
    found = config.get("max_position_embeddings")
    if not isinstance(found, int):
        raise ConfigError(f"{model}/config.json names no max_position_embeddings.", fix="Set max_model_len.")
    return found


_engines: dict[tuple[Any, ...], Engine] = {}
_engines_lock = threading.Lock()


def shared_engine(config: Config, model: Path) -> Engine:
    """The process's engine for these settings; started if there is none. Closed when the process ends."""
    key = (*config.engine_key(), str(model))
    with _engines_lock:
        if key not in _engines:
            _engines[key] = start_engine(config, model)
        return _engines[key]


def start_engine(config: Config, model: Path) -> Engine:
    """A new engine, the caller's to close."""
    from lazyrag.backend.local import LocalEngine

    return LocalEngine(
        str(model),
        mode=config.mode,
        dtype=config.dtype,
        max_model_len=config.max_model_len,
        block_size=config.block_size,
        kv_cache_bytes=config.kv_cache_bytes,
        kv_root=config.kv_dir,
        kv_disk_bytes=config.kv_disk_bytes,
        engine_args=config.engine_args,
    )


@atexit.register
def close_engines() -> None:
    """Close every shared engine of this process."""
    with _engines_lock:
        while _engines:
            _engines.popitem()[1].close()
