"""How much a chunk's reused KV differs from what it would be behind other text, token by token (`plan.Scores`).

A chunk's keys and values of the first layers are computed twice, by the first layers of the model alone: behind what
its KV is computed behind (nothing, or a sink), and behind a passage, as in a prompt. Both at the same true positions,
so that no rotation is between them. Of layers 1, 2, ... (those of layer 0 depend on the token alone) the score is

    score(t)  =  sum over layers of (|K'_t - K_t|^2 + |V'_t - V_t|^2) / (mean over t of |K_t|^2 + |V_t|^2)

Tokens that differ most in one layer are mostly those that differ most in the next ones (CacheBlend, arXiv 2405.16444),
so a few layers suffice. They run on the CPU, beside the engine: about `LAYERS` in as many of the work of computing the
chunk's KV there, twice.
"""

from __future__ import annotations

import logging
import threading
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lazyrag.errors import ConfigError, StoreError
from lazyrag.library import Library
from lazyrag.types import ChunkId

if TYPE_CHECKING:
    from torch import Tensor

    from lazyrag.retrievers.store import Store

logger = logging.getLogger(__name__)

LAYERS = 4
"""Of the model that are run; one more than those that are compared."""

PASSAGE = (
    "The harbour was built in 1847, after the old quay had been lost in a storm, and for sixty years most of the "
    "town's trade went through it: timber from the north, salt, wool and, in autumn, apples. When the railway came, "
    "the larger ships went elsewhere, and the warehouses stood empty until a museum moved into two of them.\n\n"
)
"""What a chunk stands behind, for comparison: a passage about something else, as in a prompt."""


MOST_CHUNKS = 4096
"""Whose scores are kept in memory."""


class Scores:
    """The scores of a namespace's chunks: measured once, kept in the store. Thread-safe; nobody waits for what another
    one has measured.

    Args:
        deviations: measures them.
        library: knows the chunks' tokens.
        store: None if there is none.
        namespace: whose chunks.
        model: names the model and the passage.
    """

    def __init__(
        self, deviations: Deviations, library: Library, store: Store | None, namespace: str, model: str
    ) -> None:
        self._deviations, self._library, self._store, self._namespace = deviations, library, store, namespace
        self._model = model
        self._known: OrderedDict[tuple[ChunkId, tuple[int, ...]], Future[Sequence[float]]] = OrderedDict()
        self._lock = threading.Lock()
        """Of the dictionary; nothing is measured or read under it."""

    def __call__(self, id: ChunkId, behind: Sequence[int]) -> Sequence[float]:
        """A chunk's scores; empty if it is unknown."""
        key = id, tuple(behind)
        with self._lock:
            found = self._known.get(key)
            is_new = found is None
            if found is None:
                found = self._known[key] = Future()
            self._known.move_to_end(key)
            if len(self._known) > MOST_CHUNKS:
                self._known.popitem(last=False)
        if is_new:
            try:
                found.set_result(self._find(id, behind))
            except BaseException as error:
                with self._lock:
                    self._known.pop(key, None)
                found.set_exception(error)
        return found.result()

    def _find(self, id: ChunkId, behind: Sequence[int]) -> Sequence[float]:
        name = blake2b(f"{self._model} {LAYERS} {list(behind)}".encode(), digest_size=16).hexdigest()
        kept = self._store.get_scores(id, name, self._namespace) if self._store is not None else None
        if kept is not None:
            return array("f", kept)
        tokens = self._library.tokens(id)
        scores = array("f", self._deviations.scores(tokens, behind) if tokens else ())
        if self._store is not None:
            try:
                self._store.put_scores(id, scores, name, self._namespace)
            except StoreError as error:  # one that is only read, or busy: they are measured again next time
                logger.warning("Scores of a chunk cannot be kept. %s", error)
        return scores


@lru_cache(maxsize=2)
def shared_deviations(model: Path, passage: tuple[int, ...], version: str) -> Deviations:
    """The process's `Deviations` of a model, for all tenants: what is loaded is the model's alone.

    Args:
        model: see `Deviations`.
        passage: see `Deviations`.
        version: another one once the model's files have changed.
    """
    return Deviations(model, passage)


class Deviations:
    """Scores the chunks of one model. The first use loads the model's first layers. Thread-safe: one after the other.

    Args:
        model: folder of a Hugging Face checkpoint.
        passage: tokens of what a chunk stands behind, for comparison.
    """

    def __init__(self, model: Path, passage: Sequence[int]) -> None:
        self._folder = model
        self._passage = list(passage)
        self._model: Any = None
        self._lock = threading.Lock()

    def scores(self, token_ids: Sequence[int], behind: Sequence[int] = ()) -> list[float]:
        """The score of each of a chunk's tokens.

        Args:
            token_ids: the chunk's.
            behind: tokens that its KV is computed behind (a sink, or a preamble); empty: it is computed alone.

        Raises:
            ConfigError: transformers cannot load the model.
        """
        import torch

        chunk, start = list(token_ids), max(len(self._passage), len(behind))
        with self._lock:
            reused = self._layers(list(behind), chunk, start)
            in_context = self._layers(self._passage, chunk, start)
        total = torch.zeros(len(chunk))
        for mine, theirs in zip(reused, in_context, strict=True):
            # [tokens, numbers of K and V]
            total += (mine - theirs).square().sum(-1) / mine.square().sum(-1).mean()
        return list(map(float, total))

    def _layers(self, before: list[int], chunk: list[int], start: int) -> list[Tensor]:
        """K and V of the chunk's tokens in all layers but the first, float32 [tokens, 2 * heads * size].

        Args:
            before: tokens in front of the chunk.
            chunk: its tokens.
            start: position of the first of them.
        """
        import torch

        model = self._loaded()
        first = start - len(before)
        ids = torch.tensor([[*before, *chunk]])
        with torch.inference_mode():
            cache = model(ids, position_ids=torch.arange(first, first + ids.shape[1])[None], use_cache=True)
        layers = cache.past_key_values.layers[1:]
        # [1, heads, tokens, size] each
        both = [torch.cat([layer.keys, layer.values], -1)[0, :, len(before) :].float() for layer in layers]
        return [x.transpose(0, 1).flatten(1) for x in both]

    def _loaded(self) -> Any:
        if self._model is None:
            from transformers import AutoConfig, AutoModel
            from transformers.utils import logging

            try:
                config = AutoConfig.from_pretrained(self._folder)
                config.num_hidden_layers = min(LAYERS, config.num_hidden_layers)
                verbosity = logging.get_verbosity()
                logging.set_verbosity_error()  # it would list the weights of the layers that are left out
                try:
                    self._model = AutoModel.from_pretrained(self._folder, config=config, dtype="auto").eval()
                finally:
                    logging.set_verbosity(verbosity)
            except (ImportError, OSError, ValueError, AttributeError) as error:
                raise ConfigError(
                    "Where the chunks' KV differs most cannot be measured:",
                    # Clients of a server may ask for this mode, and need not learn where its models are.
                    why=f"transformers cannot load the model's first layers ({type(error).__name__}).",
                    fix="Use a mode without recompute; first_k needs no measurement.",
                ) from error
        return self._model
