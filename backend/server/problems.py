"""Errors as HTTP answers, in the shape that OpenAI's clients read, with LazyRAG's own what, why and fix beside it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi.responses import JSONResponse

from lazyrag import errors
from lazyrag.errors import LazyRAGError

RETRY_S = 1
RESTART_S = 30

_STATUS: tuple[tuple[type[LazyRAGError], int, str], ...] = (
    (errors.ContextOverflowError, 400, "context_length_exceeded"),
    (errors.RequestTimeoutError, 408, "timeout"),
    (errors.RequestError, 400, "invalid_request"),
    (errors.EngineDeadError, 503, "engine_unavailable"),
    (errors.EngineError, 500, "engine_error"),
    (errors.QuotaError, 403, "quota_exceeded"),
    (errors.InputError, 400, "invalid_input"),
    (errors.ConfigError, 400, "not_configured"),
    (errors.StoreError, 503, "store_unavailable"),
    (LazyRAGError, 500, "server_error"),
)


class Problem(Exception):
    """An error with a status of its own."""

    def __init__(
        self, status: int, code: str, error: LazyRAGError, *, param: str | None = None, retry_s: int | None = None
    ) -> None:
        super().__init__(error.what)
        self.status, self.code, self.error, self.param, self.retry_s = status, code, error, param, retry_s


def problem_of(error: LazyRAGError) -> Problem:
    """The problem that an error is, where no route says more."""
    status, code = next((status, code) for kind, status, code in _STATUS if isinstance(error, kind))
    return Problem(status, code, error, retry_s=RESTART_S if status == 503 else None)


def not_found(code: str, what: str, fix: str = "", param: str | None = None) -> Problem:
    """Something that is asked for by name and is not there."""
    return Problem(404, code, errors.InputError(what, fix=fix), param=param)


def body_of(problem: Problem) -> dict[str, Any]:
    """`{"error": {...}}`."""
    error = problem.error
    kinds: Mapping[int, str] = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
    kind = kinds.get(problem.status, "server_error" if problem.status >= 500 else "invalid_request_error")
    own = {"class": type(error).__name__, "what": error.what, "why": error.why, "fix": error.fix}
    return {
        "error": {"message": str(error), "type": kind, "param": problem.param, "code": problem.code, "lazyrag": own}
    }


def response_of(problem: Problem) -> JSONResponse:
    """The whole answer."""
    headers = {} if problem.retry_s is None else {"Retry-After": str(problem.retry_s)}
    if problem.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(body_of(problem), problem.status, headers)
