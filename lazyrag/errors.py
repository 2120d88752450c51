"""Every error a user can meet, as one tree.

    LazyRAGError
    ├── ConfigError              a setting that cannot be (unknown name, wrong value, missing model)
    ├── MissingExtraError        an optional package is not installed
    ├── InputError               a document, prompt or argument that cannot be used
    │   ├── LoadError            one file could not be read; the rest of the ingest goes on
    │   └── QuotaError           the namespace may not hold more; what it holds stays
    ├── StoreError               the store is damaged, locked or made by something else
    │   └── MissingStoreError    there is none
    └── EngineError
        ├── EngineStartError     the engine could not start
        │   └── UnsupportedError  a model or engine setting that LazyRAG refuses, with every reason at once
        ├── EngineDeadError      the engine stopped while requests were in flight
        └── RequestError         this request failed; the engine goes on
            ├── ContextOverflowError  longer than the model's context
            ├── CapacityError         does not fit into the KV pool
            └── RequestTimeoutError   took longer than the caller allowed

A message says what happened, why, and what to type. It never holds document or prompt text.
"""

from __future__ import annotations


class LazyRAGError(Exception):
    """Base of all errors that LazyRAG raises on purpose.

    Args:
        what: what happened, one sentence.
        why: the cause, if it is not in `what`.
        fix: what the user can do or type.
    """

    def __init__(self, what: str, *, why: str = "", fix: str = "") -> None:
        super().__init__(what)
        self.what, self.why, self.fix = what, why, fix

    def __str__(self) -> str:
        return " ".join(part for part in (self.what, self.why, self.fix) if part)

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.what, self.why, self.fix))


def _rebuild(cls: type[LazyRAGError], what: str, why: str, fix: str) -> LazyRAGError:
    return cls(what, why=why, fix=fix)


class ConfigError(LazyRAGError, ValueError):
    """A setting that cannot be."""


class MissingExtraError(LazyRAGError, ImportError):
    """An optional package is not installed."""


class InputError(LazyRAGError, ValueError):
    """A document, prompt or argument that cannot be used."""


class LoadError(InputError):
    """One file could not be read."""


class QuotaError(InputError):
    """The namespace may not hold more."""


class StoreError(LazyRAGError):
    """The store is damaged, locked, or belongs to something else."""


class MissingStoreError(StoreError):
    """There is no store in that folder."""


class EngineError(LazyRAGError):
    """Base of the engine's errors."""


class EngineStartError(EngineError):
    """The engine could not start."""


class UnsupportedError(EngineStartError):
    """A model or engine setting that LazyRAG refuses."""


class EngineDeadError(EngineError):
    """The engine stopped while requests were in flight."""


class RequestError(EngineError):
    """This request failed; the engine goes on."""


class ContextOverflowError(RequestError):
    """The prompt and the tokens to generate are longer than the model's context."""


class UnknownContentError(RequestError):
    """The engine does not know (any more) the tokens that a request names; it is to be sent again with them."""


class CapacityError(RequestError):
    """The request does not fit into the KV pool, however long it waits."""


class RequestTimeoutError(RequestError, TimeoutError):
    """The request took longer than `Sampling.timeout_s` and was cancelled."""
