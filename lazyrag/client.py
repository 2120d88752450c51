"""LazyRAG: the one object behind every façade. It finds known chunks in prompts, and has them answered by an engine."""

from __future__ import annotations

import asyncio
import atexit
import json
import logging
import re
import threading
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager, suppress
from dataclasses import MISSING, dataclass, fields, replace
from functools import cache, partial
from hashlib import blake2b
from itertools import islice
from math import isfinite, isnan
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, TypeVar

from lazyrag.anchors import MIN_CHARS
from lazyrag.backend import engine as engines
from lazyrag.backend.engine import Delta, Engine, EngineInfo, Request, Sampling
from lazyrag.calibration import choose
from lazyrag.chat import CONTENT, MIXED, TEMPLATE, Message, TextPiece, render
from lazyrag.config import Config
from lazyrag.deviation import PASSAGE, Scores, shared_deviations
from lazyrag.errors import ConfigError, EngineDeadError, InputError, RequestError, StoreError
from lazyrag.explain import EVICTED, FIRST_USE, OTHER_MODEL, Alterations, Watch, explain
from lazyrag.library import Library
from lazyrag.modes import ReuseMode, check_blocks, default_block_size
from lazyrag.plan import Planner
from lazyrag.recurring import AutoRegister
from lazyrag.tokens import Tokenizer
from lazyrag.types import Answer, Choice, Chunk, ChunkId, Citation, Document, Hit, Piece, PromptPlan, Reuse

if TYPE_CHECKING:
    from lazyrag.care import Deleted
    from lazyrag.explain import Row
    from lazyrag.ingest import IngestPlan, Progress, Summary
    from lazyrag.loaders import Source
    from lazyrag.records import Records
    from lazyrag.retrievers.embed import Embedder
    from lazyrag.retrievers.search import Searcher
    from lazyrag.retrievers.store import Store

logger = logging.getLogger(__name__)

T = TypeVar("T")

Prompt: TypeAlias = str | Sequence[Message] | Sequence[TextPiece] | PromptPlan

REMEMBERED = ("model", "mode", "preamble", "sink", "dtype", "embedder")
"""Settings that a store keeps from its last ingest, so that other commands need not repeat them."""

SYSTEM = "Answer the question from the passages. If they do not hold the answer, say that you do not know."
"""The system message of `LazyRAG.query`, unless a preamble is set."""


@dataclass(frozen=True, slots=True)
class KVState:
    """How much of a namespace's KV is on disk.

    Attributes:
        chunks: that could have some.
        kept: of these, for the running model and settings.
        of_another: whether the rest was computed by another model, or with other settings.
    """

    chunks: int
    kept: int
    of_another: bool


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

    _shared: ClassVar[dict[tuple[Config, frozenset[str]], LazyRAG]] = {}
    _shared_lock: ClassVar = threading.Lock()
    _told: ClassVar[set[Choice]] = set()

    def __init__(self, config: Config | None = None, *, engine: Engine | None = None, **settings: Any) -> None:
        if config is not None and settings:
            raise ConfigError(
                "Give either a Config or settings, not both.", why=f"Both were given: {sorted(settings)}."
            )
        self._config = config if config is not None else Config.load(**settings)
        self._engine = engine
        self._choice: tuple[Config, Choice] | None = None
        self._tokenizer: Tokenizer | None = None
        self._store: Store | None = None
        self._store_file: tuple[int, int] | None = None
        self._library: Library | None = None
        self._planner: Planner | None = None
        self._loaded = _Loaded()
        self._searcher: Searcher | None = None
        self._records: Records | None = None
        self._watch = Watch()
        self._has_looked_at_kv = False
        self._names: dict[str, ChunkId] = {}
        self._nameless: set[ChunkId] = set()  # registered without a name: never forgotten
        config = self._config
        self._auto = AutoRegister(config.auto_register, config.auto_register_bytes) if config.auto_register else None
        self._lock = threading.RLock()
        # Starting an engine and loading an embedder take long, and nobody else shall wait for them.
        self._engine_lock = threading.Lock()
        self._searcher_lock = threading.Lock()

    @classmethod
    def shared(cls, config: Config | None = None, **settings: Any) -> LazyRAG:
        """The process's client for these settings; the same object for the same settings."""
        config = config if config is not None else Config.load(**settings)
        key = config, unset(config)
        with cls._shared_lock:
            if key not in cls._shared:
                cls._shared[key] = cls(config)
            return cls._shared[key]

    def for_namespace(self, namespace: str, **settings: Any) -> LazyRAG:
        """A client of another tenant, on the same engine, store, tokenizer and embedder.

        It does not know what was registered here.

        Args:
            namespace: the tenant's.
            **settings: that differ for this tenant: its quota.
        """
        client = LazyRAG(replace(self.config, namespace=namespace, **settings), engine=self._engine)
        client._loaded = self._loaded
        return client

    # ------------------------------------------------------------ what needs no engine

    @property
    def config(self) -> Config:
        """The settings; those of `REMEMBERED` that nobody set are the ones that the store was last filled with."""
        with self._lock:
            self._look_for_store()
            return self._config

    @property
    def model(self) -> Path:
        """The model's folder."""
        if not self.config.model and self.config.store is not None:
            self._needed_store()  # it would name the model
        return model_folder(self.config.model)

    @property
    def store(self) -> Store | None:
        """The store, opened; None if no store is configured, or nothing was ever ingested into it."""
        with self._lock:
            self._look_for_store()
            return self._store

    def _look_for_store(self) -> None:
        directory = self._config.store
        if directory is None:
            return
        from lazyrag.retrievers.store import FILE_NAME, Store

        file = directory / FILE_NAME
        if self._store is None:
            if file.is_file():
                self._take_store(Store.open(directory))
        elif _identity(file) != self._store_file:
            raise StoreError(
                f"The store {directory} was removed or replaced since this client opened it.", fix="Make a new client."
            )

    def _take_store(self, store: Store) -> None:
        """Use a store from now on; this client may have worked without it before."""
        from lazyrag.retrievers.store import FILE_NAME

        known = store.settings()
        remembered: dict[str, Any] = {name: known[name] for name in unset(self._config) & known.keys()}
        origins = {**self._config.origins, **dict.fromkeys(remembered, str(store.directory))}
        self._config = replace(self._config, **remembered, origins=origins)
        self._store = store
        self._store_file = _identity(store.directory / FILE_NAME)
        self._planner = None
        if (before := self._library) is not None:
            self._library = Library(self.tokenizer, store, self._config.namespace)
            self._library.register(before.registered)

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        with self._lock:
            if self._tokenizer is None:
                folder = self.model
                self._tokenizer = self._loaded.once(("tokenizer", folder), lambda: Tokenizer.from_folder(folder))
            return self._tokenizer

    @property
    def library(self) -> Library:
        """The chunks that this client's namespace knows."""
        with self._lock:
            self._look_for_store()
            if self._library is None:
                if self._store is not None:
                    self._store.expect(tokenizer=self.tokenizer.fingerprint)
                self._library = Library(self.tokenizer, self._store, self._config.namespace)
            return self._library

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and answer together. Starts no engine: an engine that runs says it, else the model."""
        if self._engine is not None:
            return self._engine.info.max_model_len
        return self.config.max_model_len or context_window(self.model)

    @property
    def choice(self) -> Choice:
        """The mode of requests that ask for no other, and why it is that one. Starts no engine."""
        with self._lock:
            config = self.config
            if self._choice is None or self._choice[0] is not config:
                self._choice = config, self._choose(config)
            return self._choice[1]

    def _choose(self, config: Config) -> Choice:
        anybodys = replace(config, namespace="", quota_documents=None, quota_chunks=None, quota_kv_bytes=None)
        chosen = self._loaded.once(("choice", anybodys), lambda: choose(config, lambda: self.model))
        if self._engine is not None and self._engine.info.mode != chosen.mode:
            return Choice(self._engine.info.mode, "the running engine's")
        if chosen.fix:
            self._tell(chosen)
        return chosen

    def _tell(self, chosen: Choice) -> None:
        """Say, once a process and once a store, that a mode runs that nobody has chosen or found."""
        store, words = self._store, f"{chosen.mode}: {chosen.why}"
        is_noted = store is not None and store.settings().get("told") == words
        if chosen not in self._told and not is_noted:
            logger.warning("Mode %s, for %s. %s", chosen.mode, chosen.reason.rstrip("."), chosen.fix)
        self._told.add(chosen)
        if store is not None and not is_noted:
            with suppress(StoreError):  # one that cannot be written, or not now
                store.remember(told=words)

    @property
    def engine_config(self) -> Config:
        """The settings with the mode that was chosen, as an engine takes them.

        Raises:
            ConfigError: the mode cannot be had with the engine's KV blocks.
        """
        if self._engine is None:
            check_blocks(self._mode, self._block_size)
        return replace(self.config, mode=self.choice.mode)

    @property
    def _mode(self) -> ReuseMode:
        return ReuseMode.parse(self.choice.mode)

    @property
    def _block_size(self) -> int:
        """Tokens of a KV block of an engine that this client starts."""
        return self.config.block_size or default_block_size(self._mode)

    def register(self, texts: Iterable[str] | Mapping[str, str]) -> list[ChunkId]:
        """Make texts known as chunks, so that prompts which hold them reuse their KV. Returns their ids, in order.

        Nothing is computed yet: the first prompt that holds a chunk computes its KV, or `warm` does.

        Args:
            texts: a list; or texts by names of yours, such as {"system": ...}: a text takes the place of the one that
                had its name before, which is forgotten.
        """
        names = list(texts) if isinstance(texts, Mapping) else []
        given = _texts(texts.values() if isinstance(texts, Mapping) else texts, "texts")
        with self._lock:
            ids = self.library.register(given)
            if self._auto is not None:
                self._auto.disown(ids)
            if not isinstance(texts, Mapping):
                self._nameless.update(ids)
            self._rename({**self._names, **dict(zip(names, ids, strict=False))})
        return ids

    def unregister(self, names: Iterable[str]) -> None:
        """Forget texts that were registered by these names, and their KV on disk if no document holds them.

        Names that are not known are passed over.

        Raises:
            StoreError: the store fails, and nothing is forgotten: call it again. Or KV cannot be removed from disk: the
                texts are forgotten, and the message says what to do.
        """
        names = set(_texts(names, "names"))
        with self._lock:
            self._rename({name: id for name, id in self._names.items() if name not in names})

    def _rename(self, names: dict[str, ChunkId]) -> None:
        """From now on these are the names; forget those of the texts that none of them stands for any more."""
        gone = set(self._names.values()) - set(names.values()) - self._nameless
        kv = self.library.forget(gone) if gone else {}
        self._names = names
        if kv:
            self._remove_forgotten_kv()

    def _forget(self, ids: Iterable[ChunkId]) -> None:
        """Forget registered texts, and remove the KV on disk of those that no document holds."""
        if self.library.forget(ids):
            self._remove_forgotten_kv()

    def _remove_forgotten_kv(self) -> None:
        if self._store is not None:
            from lazyrag import care

            care.remove_doomed_kv(self._store, self._forget_kv)

    def plan(
        self,
        prompt: Prompt,
        *,
        hints: Sequence[str] = (),
        tools: Sequence[Any] | None = None,
        special: str = "allow",
        mode: str | ReuseMode | None = None,
    ) -> PromptPlan:
        """How a prompt will be sent: which parts are known chunks, in its own order.

        Args:
            prompt: a text as the model shall see it, messages for the model's chat template, or a text whose parts are
                told apart.
            hints: texts that probably occur in it, for chunks that the index cannot find by itself.
            tools: passed to the chat template.
            special: of a prompt that is one text: "allow": control tokens in it are meant, except in what is known to
                be documents' text; "plain": they are text, wherever they stand.
            mode: what is reused of its chunks, such as "sink" or "lazy+first_k=32"; None: as the settings say.

        Raises:
            InputError: a prompt of another kind, hints that are no list of texts, text that is not Unicode.
            ConfigError: a mode that cannot be had with these settings.
        """
        if isinstance(prompt, PromptPlan):
            return prompt
        hints = _texts(hints, "hints")
        self.library.refresh()
        plan = self._plan(prompt, hints, tools, special, mode)
        if self._auto is not None and not self._mode.is_exact:
            self._register_what_recurs(self._auto, prompt, tools, plan)
        if len(self.library) and len(plan.text) >= MIN_CHARS:
            for fix in self._watch.look(plan, self.library.segmenter):
                logger.warning("A prompt holds known chunks in changed form, which reuse no KV, or less. %s", fix)
        return plan

    def _plan(
        self,
        prompt: Prompt,
        hints: Sequence[str] = (),
        tools: Sequence[Any] | None = None,
        special: str = "allow",
        mode: str | ReuseMode | None = None,
    ) -> PromptPlan:
        planner = self._planner_for_engine()
        if mode is not None and planner.mode.is_exact and not ReuseMode.parse(mode).is_exact:
            raise ConfigError(
                f"Mode {mode} cannot be had:",
                why="the engine runs in mode exact, as plain vLLM without what reuses chunks.",
                fix="Start it in another mode; single requests may then be exact.",
            )
        if isinstance(prompt, str):
            return planner.plan_text(prompt, hints=hints, special=special, mode=mode)
        parts: list[Any] = list(prompt) if isinstance(prompt, Sequence) else [prompt]
        if parts and all(isinstance(part, TextPiece) for part in parts):
            return planner.plan_pieces(parts, hints=hints, may_add_bos=True, mode=mode)
        is_chat = isinstance(prompt, Sequence) and all(isinstance(part, Message) for part in parts)
        if is_chat and all(isinstance(part.content, str) for part in parts):
            pieces: Sequence[TextPiece] = render(self.tokenizer, parts, tools=tools).pieces
            pieces = list(self._told_apart(pieces)) if tools else pieces
            return planner.plan_pieces(pieces, hints=hints, mode=mode)
        raise InputError(
            f"A {type(prompt).__name__} is no prompt.",
            fix="A prompt is a string, or a list of lazyrag.Message whose contents are strings.",
        )

    def _told_apart(self, pieces: Iterable[TextPiece]) -> Iterator[TextPiece]:
        """The pieces, with registered texts that the template wrote (tools and their schemas) as contents.

        Those only that spell no control token, so that they mean the same as what the template wrote.
        """
        for piece in pieces:
            at = 0
            for found in self.library.segmenter.find(piece.text) if piece.kind == TEMPLATE else ():
                text = piece.text[found.start : found.end]
                if found.whole and not self.tokenizer.spells_control(text):
                    yield TextPiece(piece.text[at : found.start], TEMPLATE)
                    yield TextPiece(text, CONTENT)
                    at = found.end
            yield TextPiece(piece.text[at:], piece.kind)

    def _register_what_recurs(
        self, auto: AutoRegister, prompt: Prompt, tools: Sequence[Any] | None, plan: PromptPlan
    ) -> None:
        parts: list[Any] = [prompt] if isinstance(prompt, str) else list(prompt) if isinstance(prompt, Sequence) else []
        texts = [
            part if isinstance(part, str) else part.content if isinstance(part, Message) else part.text
            for part in parts
            if not (isinstance(part, TextPiece) and part.kind == TEMPLATE)
        ]
        if tools and parts and isinstance(parts[0], Message):
            written = (p.text for p in render(self.tokenizer, parts, tools=tools).pieces if p.kind == TEMPLATE)
            longest_first = sorted(filter(None, self.tokenizer.control_tokens), key=len, reverse=True)
            control = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
            texts = [*(part for text in written for part in control.split(text)), *texts]
        per_token = self._engine.info.kv_bytes_per_token if self._engine is not None else 0
        self._forget(auto.look(texts, plan.chunk_ids, self.library, self.tokenizer, per_token))

    def _planner_for_engine(self) -> Planner:
        mode = self._mode
        block_size = self._engine.info.block_size if self._engine is not None else self._block_size
        with self._lock:
            if self._planner is None or (self._planner.block_size, self._planner.mode) != (block_size, mode):
                self._planner = Planner(
                    self.tokenizer,
                    self.library.segmenter,
                    get_tokens=self.library.tokens,
                    get_short=self.library.short_texts,
                    mode=mode,
                    block_size=block_size,
                    preamble=self.config.preamble,
                    sink=self.tokenizer.encode_template(self.config.sink),
                    scores=self._scores(),
                    min_tokens=self.config.min_tokens,
                )
            return self._planner

    # ------------------------------------------------------------ what runs the model

    @property
    def engine(self) -> Engine:
        """The engine; the first access starts it, which takes tens of seconds."""
        if self._engine is None:
            with self._engine_lock:
                if self._engine is None:
                    self._engine = shared_engine(self.engine_config, self.model)
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
        special: str = "allow",
        mode: str | ReuseMode | None = None,
    ) -> list[Answer]:
        """Answer prompts together, in order. The arguments are those of `plan`.

        Raises:
            EngineError: the first of the prompts' errors.
            InputError: see `plan`.
        """
        engine, plans, requests = self._prepare(prompts, sampling, hints, tools, special, mode)
        return self._answers(plans, engines.generate(engine, requests))

    async def agenerate(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling | None = None,
        *,
        hints: Sequence[str] = (),
        tools: Sequence[Any] | None = None,
        special: str = "allow",
        mode: str | ReuseMode | None = None,
    ) -> list[Answer]:
        """As `generate`, without blocking the caller's event loop."""
        engine, plans, requests = await asyncio.to_thread(self._prepare, prompts, sampling, hints, tools, special, mode)
        return await asyncio.to_thread(self._answers, plans, await engines.agenerate(engine, requests))

    def stream(
        self,
        prompt: Prompt,
        sampling: Sampling | None = None,
        *,
        hints: Sequence[str] = (),
        tools: Sequence[Any] | None = None,
        special: str = "allow",
        mode: str | ReuseMode | None = None,
    ) -> Iterator[Delta]:
        """Yield the answer as it is generated; the last delta has `reuse` and `ttft_s`. Closing it cancels."""
        engine, (plan,), (request,) = self._prepare([prompt], sampling, hints, tools, special, mode)
        for delta in engines.stream(engine, request):
            yield self._finished(plan, delta) if delta.finish_reason is not None else delta

    async def astream(
        self,
        prompt: Prompt,
        sampling: Sampling | None = None,
        *,
        hints: Sequence[str] = (),
        tools: Sequence[Any] | None = None,
        special: str = "allow",
        mode: str | ReuseMode | None = None,
    ) -> AsyncGenerator[Delta, None]:
        """As `stream`, without blocking the caller's event loop."""
        prepared = await asyncio.to_thread(self._prepare, [prompt], sampling, hints, tools, special, mode)
        engine, (plan,), (request,) = prepared
        async with aclosing(engines.astream(engine, request)) as deltas:
            async for delta in deltas:
                is_last = delta.finish_reason is not None
                yield await asyncio.to_thread(self._finished, plan, delta) if is_last else delta

    def logprobs(
        self,
        prompt: Prompt,
        continuation: str,
        *,
        hints: Sequence[str] = (),
        tools: Sequence[Any] | None = None,
        special: str = "allow",
        mode: str | ReuseMode | None = None,
    ) -> tuple[float, ...]:
        """The log-probability of each token of a text, if it were the answer to a prompt. Arguments: see `plan`.

        Each token is a request of its own, in which the ones before it are part of the prompt; what they have in common
        is computed once.

        Raises:
            EngineError: the first of the requests' errors.
            InputError: see `plan`, or a continuation without a token.
        """
        engine, _, (request,) = self._prepare([prompt], None, hints, tools, special, mode)
        ids = tuple(self.tokenizer.encode_plain(continuation))
        if not ids:
            raise InputError("The continuation is empty.")
        requests = [
            replace(
                request,
                token_ids=(*request.token_ids, *ids[:number]),
                sampling=Sampling(max_tokens=1, logprobs=0, allowed_token_ids=(id,)),
            )
            for number, id in enumerate(ids)
        ]
        found = []
        for id, result in zip(ids, engines.generate(engine, requests), strict=True):
            if isinstance(result, Exception):
                raise result
            found.append(result.logprobs[0][id])
        return tuple(found)

    def _prepare(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling | None,
        hints: Sequence[str],
        tools: Sequence[Any] | None,
        special: str,
        mode: str | ReuseMode | None,
    ) -> tuple[Engine, list[PromptPlan], list[Request]]:
        if isinstance(prompts, (str, bytes)) or not isinstance(prompts, Iterable):
            raise InputError("prompts is one prompt where a list is meant.", fix="Pass a list: [prompt].")
        if sampling is None:
            sampling = Sampling(max_tokens=self.config.max_tokens, temperature=self.config.temperature)
        sampling = _checked(sampling)
        hints = _texts(hints, "hints")
        engine = self.engine  # first: it says the block size and the mode that are planned for
        self._look_at_kv()
        plans = [self.plan(prompt, hints=hints, tools=tools, special=special, mode=mode) for prompt in prompts]
        space = self.config.namespace
        quota = self.config.quota_kv_bytes
        requests = [Request(p.token_ids, p.segments, p.prefix_len, sampling, space, p.sink, quota) for p in plans]
        return engine, plans, requests

    def _answers(self, plans: Sequence[PromptPlan], results: Sequence[Delta | Exception]) -> list[Answer]:
        answers = []
        for plan, result in zip(plans, results, strict=True):
            if isinstance(result, Exception):
                raise result
            last = self._finished(plan, result)
            assert last.finish_reason is not None
            reuse = last.reuse or Reuse(len(plan.token_ids), 0)
            answers.append(
                Answer(
                    last.text,
                    last.token_ids,
                    last.finish_reason,
                    reuse,
                    plan,
                    last.ttft_s,
                    citations=last.citations,
                    mode=last.mode,
                )
            )
        return answers

    def _finished(self, plan: PromptPlan, last: Delta) -> Delta:
        """The last delta of an answer, with the mode that ran, and the places that the prompt's chunks come from."""
        chosen = self.choice
        asked = plan.mode not in ("", chosen.mode)
        last = replace(last, mode=Choice(plan.mode, "asked for by the request") if asked else chosen)
        sources = plan.sources(last.reuse)
        chunks = [
            (piece.chunk_id, piece, source)
            for piece, source in zip(plan.pieces, sources, strict=True)
            if piece.chunk_id is not None
        ]
        if not chunks:
            return last
        store = self.store
        places = store.spans_of([id for id, *_ in chunks], self.config.namespace) if store is not None else {}
        citations = (
            Citation(id, source, tuple(_shown(piece, p) for p in places.get(id, ()))) for id, piece, source in chunks
        )
        return replace(last, citations=tuple(citations))

    def warm(self, ids: Iterable[ChunkId]) -> Iterator[tuple[ChunkId, Reuse | Exception]]:
        """Compute the KV of known chunks now (or find it on disk); unknown and unusable ones are passed over."""
        tokens = ((id, self.library.tokens(id)) for id in ids)
        chunks = ((id, ids) for id, ids in tokens if ids)
        yield from self._warm_tokens(chunks, kv_quota=self.config.quota_kv_bytes)

    def _warm_tokens(
        self,
        chunks: Iterable[tuple[ChunkId, Sequence[int]]],
        *,
        kv_quota: int | None = None,
        batch: int = engines.WARMED_AT_ONCE,
    ) -> Iterator[tuple[ChunkId, Reuse | Exception]]:
        engine = self.engine
        prefix, sink, namespace = self._prefix(), self._sink(), self.config.namespace
        scores = self._planner_for_engine().scores if self._mode.recompute else None
        warmed = engines.warm(
            engine,
            chunks,
            prefix=prefix,
            sink=sink,
            namespace=namespace,
            kv_quota=kv_quota,
            batch=batch,
        )
        for id, result in warmed:
            if scores is not None:
                scores(id, prefix or sink)
            yield id, result

    def _scores(self) -> Scores:
        """Where the chunks' reused KV differs most; nothing is loaded before it is asked."""
        passage = self.tokenizer.encode_template(PASSAGE, add_bos=True)
        measured = blake2b(repr((self._model_files(), passage)).encode(), digest_size=16).hexdigest()
        deviations = shared_deviations(self.model, tuple(passage), measured)
        return Scores(deviations, self.library, self.store, self.config.namespace, measured)

    def _sink(self) -> tuple[int, ...]:
        """Tokens that chunks are computed behind in mode `sink`; in another one none."""
        return self._planner_for_engine().sink if self._mode.kind == "sink" else ()

    def _prefix(self) -> tuple[int, ...]:
        """Tokens of the preamble as it begins a chat (or, of a model without chat template, a string prompt)."""
        if self._mode.kind != "prefix":
            return ()
        preamble = self.config.preamble
        chat = [Message("system", preamble), Message("user", "?")]
        plan = self._plan(chat if self.tokenizer.chat_template is not None else f"{preamble}\n?")
        if not plan.prefix_len:
            raise ConfigError(
                "Chunks cannot be computed behind the preamble:",
                why="with this model's chat template, a chat does not begin with its system message.",
                fix="Use mode lazy, or a model whose template does.",
            )
        return plan.token_ids[: plan.prefix_len]

    # ------------------------------------------------------------ what needs a store

    def plan_ingest(
        self, paths: Iterable[str | PathLike[str]] = (), *, documents: Iterable[Document | Source] = ()
    ) -> IngestPlan:
        """Compare files, folders and documents with the store, which is made if there is none; changes nothing else.

        Raises:
            ConfigError: no store is configured.
            InputError: there is nothing in the paths, and no store yet.
            StoreError: the store was made with another tokenizer or embedder.
        """
        from lazyrag import ingest
        from lazyrag.loaders import scan
        from lazyrag.splitter import Splitter

        if self.config.store is None:
            self._needed_store()  # says so
        self.tokenizer  # noqa: B018  (a wrong model is an error before files are read)
        found = scan(paths)  # before anything is made or loaded for it
        if self.store is None and found.is_empty and not documents:
            raise found.nothing()
        plan = ingest.plan(
            self._made_store(),
            found,
            documents=documents,
            splitter=Splitter(self.tokenizer, self.config.chunk_size, self.config.chunk_overlap),
            embedder=self._named_embedder,
            namespace=self.config.namespace,
            quota=self.config.quota,
        )
        if plan.added or plan.changed:
            self.embedder  # noqa: B018  (one that is not there is an error before an engine starts)
        return plan

    @property
    def _named_embedder(self) -> Embedder:
        """The embedder, loaded by whoever wants a vector: many a question is answered by its name alone."""
        from lazyrag.retrievers.embed import DeferredEmbedder, embedder_name

        name = embedder_name(self.config.embedder)
        return self.embedder if name is None else DeferredEmbedder(name, lambda: self.embedder)

    def _made_store(self) -> Store:
        """The store, made if there is none."""
        from lazyrag.retrievers.store import Store

        directory = self.config.store
        if self.store is None and directory is not None:
            self.tokenizer.fingerprint  # noqa: B018  (a wrong model is an error before there is a store)
            with self._lock:
                if self._store is None:  # another thread may have made it by now
                    self._take_store(Store.open(directory, create=True))
        return self._needed_store()

    @property
    def records(self) -> Records:
        """The store by record: what a framework's vector store is made of. The store is made if there is none."""
        store = self._made_store()
        with self._lock:
            if self._records is None:
                from lazyrag.records import Records

                store.remember(**self._remembered())
                self._records = Records(
                    store,
                    self.tokenizer,
                    self.config.namespace,
                    self.config.quota,
                    forget=self._forget_kv,
                    pinning=partial(self._pinning, store),
                )
            return self._records

    def _remembered(self) -> dict[str, str]:
        """What a store keeps of the settings that it is filled with."""
        return {name: getattr(self.config, name) for name in REMEMBERED} | {"model": str(self.model)}

    def ingest(
        self,
        paths: Iterable[str | PathLike[str]] = (),
        *,
        documents: Iterable[Document | Source] = (),
        plan: IngestPlan | None = None,
        sync: bool = False,
        warm: bool = True,
        rest: bool = True,
        batch: int = engines.WARMED_AT_ONCE,
    ) -> Generator[Progress | Summary, None, None]:
        """Take files, folders and documents into the store; the last event is the Summary. Run it again to resume.

        Args:
            paths: files, folders or globs; "-" reads standard input.
            documents: from elsewhere than files.
            plan: do this one (`plan_ingest`), not a new one.
            sync: delete stored documents whose files are gone from the given folders.
            warm: compute the KV of every chunk now. Else the first prompt that holds a chunk pays for it.
            rest: of every chunk of the store, that is; False: of those in the given documents.
            batch: chunks that are computed at a time.

        Raises:
            ConfigError, StoreError: as `plan_ingest`.
            EngineError: the engine cannot start, or stopped.
        """
        from lazyrag import ingest

        plan = plan or self.plan_ingest(paths, documents=documents)
        warm = warm and self.needs_warming(plan)
        fingerprint = self._kv_fingerprint(plan.store) if warm else None
        plan.store.remember(**self._remembered())
        info = self.info if warm else None
        with self._pinning(plan.store):
            yield from ingest.run(
                plan,
                sync=sync,
                warm=partial(self._warm_tokens, batch=batch) if warm else None,  # within the quota by itself
                rest=rest,
                fingerprint=fingerprint,
                bytes_per_token=info.kv_bytes_per_token if info is not None else 0,
                bytes_per_chunk=info.kv_bytes_per_chunk if info is not None else 0,
                forget=self._forget_kv,
            )
        if fingerprint is not None:
            plan.store.remember(kv=fingerprint, kv_of=self._kv_identity())

    def delete(self, ids: Iterable[str]) -> Deleted:
        """Delete documents by id, the chunks that only they held, and the KV of these in every tier, of whatever model.

        Every tier of this process's engine, that is, and the store's folder. Another process's engine may hold some in
        its memory until it needs the room; no prompt of this namespace can ask for it.

        Raises:
            InputError: one id where a list is meant.
            ConfigError: there is no store.
            StoreError: the documents are deleted, their KV on disk is not (the message says what to do).
        """
        from lazyrag import care

        store = self._needed_store()
        with self._pinning(store):
            return care.delete(store, _texts(ids, "ids"), self.config.namespace, self._forget_kv)

    def _forget_kv(self, chunks: Iterable[Sequence[int]], namespace: str) -> None:
        """Have the engine, if it runs, forget KV of chunks, but not which are pinned. A dead one has forgotten all."""
        engine = self._running_engine()
        if engine is not None:
            forgotten = [("", tuple(tokens)) for tokens in chunks]
            pinned = {tokens for _, tokens in self._needed_store().pinned(namespace)}
            with suppress(EngineDeadError):
                engine.forget(forgotten, namespace=namespace)
                engine.pin([chunk for chunk in forgotten if chunk[1] in pinned], namespace=namespace)

    def pin(self, ids: Iterable[str], *, pinned: bool = True) -> int:
        """Have the KV of documents' chunks, those of later versions included, stay in every tier; survives restarts.

        Args:
            ids: of documents; unknown ones are ignored.
            pinned: False: they need not stay any more.

        Returns:
            how many documents this has changed.

        Raises:
            InputError: one id where a list is meant.
            ConfigError: there is no store.
        """
        store = self._needed_store()
        with self._pinning(store):
            return store.pin(_texts(ids, "ids"), self.config.namespace, pinned=pinned)

    @contextmanager
    def _pinning(self, store: Store) -> Iterator[None]:
        """Tell the engine, if it runs, which chunks are pinned afterwards that were not before, and the other way."""
        namespace = self.config.namespace
        before = set(store.pinned(namespace))
        try:
            yield
        finally:
            after, engine = set(store.pinned(namespace)), self._running_engine()
            if engine is not None and before != after:
                with suppress(EngineDeadError):
                    engine.pin(after - before, namespace=namespace)
                    engine.unpin(before - after, namespace=namespace)

    def rebuild_kv(
        self, *, everything: bool = False, batch: int = engines.WARMED_AT_ONCE
    ) -> Generator[Progress | Summary, None, None]:
        """Compute the KV of the stored chunks that is not on disk; the last event is the Summary.

        A store that was made with another tokenizer is taken over first: its chunks keep their texts.

        Args:
            everything: remove all KV of the namespace first, of other models, too.
            batch: chunks that are computed at a time.

        Raises:
            ConfigError: there is no store, or no chunk's KV is kept with these settings.
            EngineError: the engine cannot start, or stopped.
        """
        from lazyrag import care

        store, namespace = self._needed_store(), self.config.namespace
        if not self.keeps_kv:
            raise ConfigError("No chunk's KV is kept on disk with these settings.", fix="Set mode lazy and kv_disk.")
        if everything:
            care.drop_kv(store, namespace)
        if store.settings().get("tokenizer", self.tokenizer.fingerprint) != self.tokenizer.fingerprint:
            with self._pinning(store):
                care.change_tokenizer(store, self.tokenizer)
        care.forget_missing_kv(store, namespace, self._forget_kv)
        yield from self.ingest(plan=self.plan_ingest(), batch=batch)

    def _look_at_kv(self) -> None:
        """Say, once, that the KV on disk cannot be used."""
        if self._has_looked_at_kv or self.store is None:
            return
        self._has_looked_at_kv = True
        with suppress(ConfigError):
            state = self.kv_state()
            if state.of_another:
                logger.warning(
                    "The KV on disk of %d of %d chunks is of another model or of other settings, and is not used; it is"
                    " computed when it is needed. All of it now: lazyrag kv rebuild --store %s",
                    state.chunks - state.kept,
                    state.chunks,
                    self.config.store,
                )

    def kv_state(self) -> KVState:
        """How much of the namespace's KV is on disk for this model; starts the engine.

        Raises:
            ConfigError: there is no store.
        """
        store, namespace = self._needed_store(), self.config.namespace
        chunks = store.stats(namespace)["reusable"]
        if not self.keeps_kv:
            return KVState(chunks, 0, False)
        name = self._kv_name()
        missing = store.num_unwarmed(name, namespace)
        return KVState(chunks, chunks - missing, missing > 0 and store.settings().get("kv", name) != name)

    @property
    def keeps_kv(self) -> bool:
        """Whether chunks' KV is kept on disk with these settings."""
        return not self._mode.is_exact and self.config.kv_dir is not None

    def needs_warming(self, plan: IngestPlan) -> bool:
        """Whether `ingest` has chunks to compute for this plan, and so starts the engine. Starts none to find out."""
        if self._mode.is_exact:
            return False
        if plan.added or plan.changed:
            return True
        known = plan.store.settings()
        if self._engine is not None and self.config.kv_dir is not None:
            fingerprint = self._kv_name()
        else:
            fingerprint = known.get("kv", "") if known.get("kv_of") == self._kv_identity() else ""
        if not self._is_kv_kept(plan.store, fingerprint):
            fingerprint = ""  # under which nothing is noted
        return plan.store.num_unwarmed(fingerprint, plan.namespace) > 0

    def _kv_identity(self) -> str:
        """Changes with whatever the KV's fingerprint depends on; made without reading the weights."""
        files, config = self._model_files(), self.config
        behind = (self._mode.kind, config.preamble, config.sink)
        settings = (str(self.model), behind, config.dtype, sorted(config.engine_args.items()))
        return blake2b(repr((files, settings)).encode(), digest_size=16).hexdigest()

    def _model_files(self) -> list[tuple[str, int, int]]:
        return sorted((p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in self.model.iterdir() if p.is_file())

    def _kv_fingerprint(self, store: Store) -> str | None:
        """Names what the chunks' KV on disk depends on; None if it is not kept."""
        folder = self.config.kv_dir
        if folder is None:
            return None
        fingerprint = self._kv_name()
        if not self._is_kv_kept(store, fingerprint):
            store.forget_warm(fingerprint)
        return fingerprint

    def _kv_name(self) -> str:
        """Of what chunks' KV depends on: the model's fingerprint, and a digest of what they are computed behind."""
        behind = blake2b(repr(self._prefix() or self._sink()).encode(), digest_size=8).hexdigest()
        return f"{self.info.fingerprint}-{behind}"

    def _is_kv_kept(self, store: Store, fingerprint: str) -> bool:
        """Whether the store's notes of warm chunks can be believed: for at least half of them there is a file.

        Not for each: a file may have been found damaged, and a chunk that begins another one has none if it was warmed
        while that one was resident. With a disk budget, under which files come and go, one file is enough.
        """
        folder = self.config.kv_dir
        if folder is None:
            return False
        needed = (store.num_warm(fingerprint) + 1) // 2
        if self.config.kv_disk_bytes is not None:
            needed = min(needed, 1)
        return sum(1 for _ in islice(_kv_files(folder), needed)) == needed

    def search(self, query: str, k: int = 4) -> list[Hit]:
        """The k stored chunks nearest to a query, each with the place it came from.

        An engine that runs begins to bring their KV nearer: a prompt that holds them will probably follow.

        Raises:
            ConfigError: no store is configured, or it was embedded with another model.
        """
        hits = self._search().search(query, k, namespace=self.config.namespace)
        self.prefetch(hit.chunk.id for hit in hits)
        return hits

    def prefetch(self, ids: Iterable[ChunkId]) -> None:
        """Have the engine bring the KV of chunks nearer, before the prompt is built that holds them. Returns at once.

        Starts no engine, and computes nothing; ids of chunks that are not known, or not reusable, are left out.
        """
        engine = self._running_engine()
        if engine is not None and engine.info.mode != "exact":
            chunks = [(id, tokens) for id in dict.fromkeys(ids) if (tokens := self.library.tokens(id))]
            chunks = [(id, tokens) for id, tokens in chunks if len(tokens) >= self.config.min_tokens]
            if chunks:
                with suppress(ConfigError):  # no preamble can be had: the prompt itself will say so
                    prefix, sink = self._prefix(), self._sink()
                    engine.prefetch(chunks, prefix=prefix, sink=sink, namespace=self.config.namespace)

    def _running_engine(self) -> Engine | None:
        """The engine, if it has been started, by whichever client."""
        if self._engine is not None:
            return self._engine
        with suppress(ConfigError):  # without a model nothing can be running
            return _engines.get(_engine_key(self.engine_config, self.model))
        return None

    async def asearch(self, query: str, k: int = 4) -> list[Hit]:
        """As `search`, without blocking the caller's event loop."""
        return await asyncio.to_thread(self.search, query, k)

    def _search(self) -> Searcher:
        store, embedder = self._needed_store(), self._named_embedder
        with self._searcher_lock:
            if self._searcher is None:
                from lazyrag.retrievers.search import Searcher

                self._searcher = Searcher(store, embedder)
            return self._searcher

    @property
    def embedder(self) -> Embedder:
        """Makes the vectors of texts and queries; loaded when it is first needed."""
        from lazyrag.retrievers.embed import load_embedder

        name = self.config.embedder
        return self._loaded.once(("embedder", name), lambda: load_embedder(name))

    def _needed_store(self) -> Store:
        directory, store = self.config.store, self.store
        if directory is None:
            raise ConfigError("No store is named.", fix="Pass store=..., --store or LAZYRAG_STORE: a folder.")
        if store is None:
            raise ConfigError(
                f"There is no store in {directory}{'' if self.config.model else ', and no model is named'}.",
                fix=f"Make one: lazyrag ingest PATH --store {directory} --model MODEL",
            )
        return store

    def question(self, question: str, k: int = 4) -> tuple[Prompt, list[Hit]]:
        """The prompt that `query` sends for a question, and the stored chunks it holds.

        Raises:
            InputError: a question that is empty or not Unicode, or nothing to answer it from.
        """
        if not isinstance(question, str):
            raise InputError(f"A question is text, not a {type(question).__name__}.")
        if not question.strip():
            raise InputError("The question is empty.")
        if not _is_unicode(question):
            raise InputError("The question holds a lone surrogate, which is no character.")
        store = self._needed_store()
        self.model  # noqa: B018  (a wrong model is an error before the embedder is loaded)
        hits = self.search(question, k) if any(True for _ in store.documents(self.config.namespace)) else []
        if not hits:
            namespace = f"namespace {self.config.namespace!r}" if self.config.namespace else "default namespace"
            raise InputError(
                "The store holds nothing to answer from:",
                why=f"there are no documents in its {namespace}.",
                fix="Ingest some: lazyrag ingest PATH, with the same store and namespace.",
            )
        return self.question_from(question, [(hit.chunk.source, hit.chunk.text) for hit in hits]), hits

    def question_from(self, question: str, passages: Iterable[tuple[str, str]], *, chat: bool = True) -> Prompt:
        """The prompt that asks a question about passages.

        Args:
            question: the question.
            passages: (source, text) pairs.
            chat: as a chat, if the model has a chat template; else as one text that ends in "Answer:".
        """
        numbered = "".join(f"[{i}] {source}\n{text}\n\n" for i, (source, text) in enumerate(passages, 1))
        content = f"{numbered}Question: {question}"
        system = self.config.preamble or SYSTEM
        if chat and self.tokenizer.chat_template is not None:
            return [Message("system", system), Message("user", content)]
        # The passages and their sources are documents' text; the preamble is the application's own.
        return [TextPiece(f"{system}\n\n", MIXED), TextPiece(f"{content}\nAnswer:", CONTENT)]

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
        plan, reuse = None, None
        if run:
            (answer,) = self.generate([prompt], Sampling(max_tokens=1))
            plan, reuse = answer.plan, answer.reuse
        return self.explain_plan(plan or self.plan(prompt), reuse, all_namespaces=True)

    def explain_plan(self, plan: PromptPlan, reuse: Reuse | None = None, *, all_namespaces: bool = False) -> list[Row]:
        """As `explain`, of a prompt that was planned and may have run.

        Args:
            plan: see `plan`.
            reuse: the engine's report.
            all_namespaces: say so if a text is another namespace's: for those only who may know.
        """

        @cache
        def others() -> list[Library]:
            namespaces = self.store.namespaces() if all_namespaces and self.store is not None else []
            found = [Library(self.tokenizer, self.store, n) for n in namespaces if n != self.config.namespace]
            for library in found:
                library.refresh()
            return found

        return explain(
            plan,
            reuse,
            altered_in=Alterations(self.library.segmenter).in_pieces,
            why_computed=self._why_computed,
            holds_short=self.library.is_short_one_in,
            is_anothers=lambda text: any(library.segmenter.find(text) for library in others()),
        )

    def _why_computed(self, id: ChunkId) -> str:
        from lazyrag import care

        store, namespace = self.store, self.config.namespace
        if store is None or self.config.kv_dir is None:
            return FIRST_USE
        own = self._kv_name()
        noted = store.warm_for(id, namespace)
        others = noted - {own} or care.models_of(store, id, namespace) - {own[:16]}
        return EVICTED if own in noted else OTHER_MODEL if others else FIRST_USE

    def stats(self) -> dict[str, Any]:
        """Counts of the store, of its KV on disk, and of the engine if it runs.

        Raises:
            ConfigError: a store is named that does not exist.
        """
        out: dict[str, Any] = {}
        config = self.config
        if config.store is not None:
            out["store"] = self._needed_store().stats(config.namespace)
        if config.kv_dir is not None:
            sizes = []
            for path in _kv_files(config.kv_dir):
                with suppress(FileNotFoundError):  # an engine has dropped it since
                    sizes.append(path.stat().st_size)
            out["kv"] = {"chunks": len(sizes), "bytes": sum(sizes)}
        if self._engine is not None:
            out["engine"] = self._engine.stats()
        return out


class _Loaded:
    """What the clients of all tenants share, because it takes long to load, or much memory. Thread-safe."""

    def __init__(self) -> None:
        self._values: dict[object, Any] = {}
        self._locks: dict[object, threading.Lock] = {}
        self._lock = threading.Lock()

    def once(self, key: object, load: Callable[[], T]) -> T:
        """The value of a key, loaded by whoever asks first; who asks for another key does not wait for that."""
        with self._lock:
            lock = self._locks.setdefault(key, threading.Lock())
        with lock:
            if key not in self._values:
                self._values[key] = load()
            found: T = self._values[key]
            return found


def unset(config: Config) -> frozenset[str]:
    """Those of `REMEMBERED` that nobody set."""
    defaults = {field.name: field.default for field in fields(config) if field.default is not MISSING}
    return frozenset(
        name for name in REMEMBERED if config.origin(name) == "default" and getattr(config, name) == defaults[name]
    )


def _texts(values: Iterable[str], name: str) -> list[str]:
    """An argument that is several texts; one text alone would be taken for its letters.

    Raises:
        InputError: it is something else.
    """
    if not isinstance(values, (str, bytes)) and isinstance(values, Iterable):
        texts = list(values)
        if all(isinstance(text, str) for text in texts):
            return texts
    raise InputError(f"{name} is not a list of strings.", fix=f"Pass a list: {name}=[...].")


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _identity(file: Path) -> tuple[int, int] | None:
    """Of a file, whatever its name; None if there is none."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _checked(sampling: Sampling) -> Sampling:
    """The settings of a request, if an engine can read them; a single text to stop at as a list of one.

    Raises:
        RequestError: one of a wrong type, or a number that does not fit into 64 bits.
    """
    if not isinstance(sampling, Sampling):
        raise RequestError(f"Sampling settings are a Sampling, not a {type(sampling).__name__}.")
    stop: Any = sampling.stop
    if isinstance(stop, str):
        stop = (stop,)
    wanted: dict[str, Callable[[Any], bool]] = {
        **dict.fromkeys(("max_tokens", "top_k"), _is_int64),
        **dict.fromkeys(("seed", "logprobs"), lambda value: value is None or _is_int64(value)),
        **dict.fromkeys(
            ("temperature", "top_p", "frequency_penalty", "presence_penalty"),
            lambda value: _is_number(value) and isfinite(value),
        ),
        "timeout_s": lambda value: value is None or (_is_number(value) and not isnan(value)),
        **dict.fromkeys(("json_schema", "structural_tag"), lambda value: value is None or isinstance(value, Mapping)),
    }
    wrong = [name for name, fits in wanted.items() if not fits(getattr(sampling, name))]
    if not isinstance(stop, Iterable) or not all(isinstance(text, str) and text for text in stop):
        wrong.append("stop")
    if not isinstance(sampling.allowed_token_ids, Sequence) or not all(map(_is_int64, sampling.allowed_token_ids)):
        wrong.append("allowed_token_ids")
    if wrong:
        raise RequestError(
            f"The request's {' and '.join(wrong)} cannot be used:",
            why="the value is of a wrong type, or beyond all bounds.",
        )
    return replace(sampling, stop=tuple(stop))


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or _is_int64(value)


def _is_int64(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -(1 << 63) <= value < 1 << 63


def _kv_files(folder: Path) -> Iterator[Path]:
    from lazyrag.backend.tiers.disk import FOLDERS

    return folder.glob(f"{FOLDERS}/*.safetensors")


def _shown(piece: Piece, place: Chunk) -> Chunk:
    """What a piece shows of the chunk at a place: all of it, or its beginning."""
    return replace(place, text=piece.text, end=place.start + len(piece.text))


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
        raise ConfigError(
            f"{name} is no model folder:",
            why="it holds no config.json." if path.exists() else "there is nothing of that name.",
            fix="Name the folder of a Hugging Face checkpoint, or a model that `hf download` has fetched.",
        )
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
    """The model's context in tokens, as its config.json says.

    Raises:
        ConfigError: it does not say so.
    """
    found = None
    with suppress(OSError, ValueError, AttributeError):
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
        found = config.get("text_config", config).get("max_position_embeddings")
    if not isinstance(found, int):
        raise ConfigError(f"{model}/config.json names no max_position_embeddings.", fix="Set max_model_len.")
    return found


_engines: dict[tuple[Any, ...], Engine] = {}
_engines_lock = threading.Lock()


def shared_engine(config: Config, model: Path) -> Engine:
    """The process's engine for these settings; started if there is none. Closed when the process ends."""
    key = _engine_key(config, model)
    with _engines_lock:
        if key not in _engines:
            _engines[key] = with_pins(start_engine(config, model), config)
            # Now, not when this module is imported: at exit the last one goes first, and vLLM, which the start has
            # imported, would end the engine's process while it is in use.
            atexit.register(close_engines)
        return _engines[key]


def _engine_key(config: Config, model: Path) -> tuple[Any, ...]:
    return replace(config, model=str(model)).engine_key()


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
        kv_host_bytes=config.kv_host_bytes,
        tier_policy=config.tier_policy,
        engine_args=config.engine_args,
    )


def with_pins(engine: Engine, config: Config) -> Engine:
    """An engine that has just been started, told of the chunks of pinned documents."""
    from lazyrag.retrievers.store import FILE_NAME, Store

    if config.store is not None and (config.store / FILE_NAME).is_file():
        with Store.open(config.store) as store:
            for namespace in store.namespaces():
                engine.pin(store.pinned(namespace), namespace=namespace)
    return engine


def close_engines() -> None:
    """Close every shared engine of this process."""
    with _engines_lock:
        while _engines:
            _engines.popitem()[1].close()
