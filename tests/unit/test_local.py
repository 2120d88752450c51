"""What the local engine decides without vLLM: errors in the user's terms, reuse from the report, settings."""

from __future__ import annotations

import os
import threading
from multiprocessing import spawn

import pytest
from pydantic import BaseModel, ValidationError

from lazyrag.backend import local, wire
from lazyrag.backend.engine import Request
from lazyrag.errors import (
    CapacityError,
    EngineDeadError,
    EngineError,
    EngineStartError,
    InputError,
    RequestError,
    UnsupportedError,
)
from lazyrag.types import COMPUTED, DISK, HBM, Reuse, Segment


def vllm_error(name: str, text: str = "", cause: Exception | None = None) -> Exception:
    """An exception class of vLLM's, which is known by its name only."""
    error: Exception = type(name, (Exception,), {})(text)
    error.__cause__ = cause
    return error


class Sized(BaseModel):
    size: int


def refused_by_pydantic() -> ValidationError:
    try:
        Sized(size="a secret passage")  # type: ignore[arg-type]
    except ValidationError as error:
        return error
    raise AssertionError


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("error", "kind", "says"),
    [
        (CapacityError("No room."), CapacityError, "No room."),
        (InputError("Overlap.", why="Two."), RequestError, "Overlap. Two."),
        (vllm_error("EngineDeadError", "core died"), EngineDeadError, "core died"),
        (vllm_error("VLLMValidationError", "no such option"), RequestError, "no such option"),
        (ValueError("no such grammar"), RequestError, "no such grammar"),
        (vllm_error("EngineGenerateError", cause=ValueError("bad schema")), RequestError, "bad schema"),
        (vllm_error("EngineGenerateError", cause=KeyError("lost")), EngineError, "KeyError: 'lost'"),
        (OSError("broken pipe"), EngineError, "OSError: broken pipe"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_whatever_ends_a_request_is_an_engine_error(error: Exception, kind: type[EngineError], says: str) -> None:
    told = local.request_error(error)
    assert type(told) is kind
    assert says in str(told)


def test_a_failed_start_names_every_refusal_or_its_cause() -> None:
    refusals = "LazyRAG cannot run:\n  - one\n  - two"
    told = local.start_error(RuntimeError("engine core died"), refusals)
    assert (type(told), str(told)) == (UnsupportedError, refusals)
    told = local.start_error(RuntimeError("out of memory"), "")
    assert type(told) is EngineStartError
    assert "out of memory" in str(told)


def test_a_validation_error_is_told_without_what_was_given() -> None:
    told = local.explanation(refused_by_pydantic())
    assert "integer" in told
    assert "secret" not in told
    assert "\n" not in told


# ---------------------------------------------------------------- reuse


@pytest.mark.parametrize(("preamble", "counted"), [("", 0), (COMPUTED, 0), (HBM, 7), (DISK, 7)])
def test_reuse_counts_resident_and_loaded_segments_and_cached_literals(preamble: str, counted: int) -> None:
    segments = [Segment("a", 7, 10), Segment("b", 19, 20), Segment("c", 39, 30)]
    request = Request([0] * 77, segments, prefix_len=7 if preamble else 0)
    report = wire.WireReport(
        sources=[HBM, COMPUTED, DISK],
        preamble=preamble,
        cached_suffix_tokens=3,
        children_computed=1,
        children_loaded=1,
    )
    assert local.reuse_of(request, report, 999) == Reuse(77, counted + 10 + 30 + 3, (HBM, COMPUTED, DISK))


def test_reuse_of_an_ordinary_request_is_vllms_own_count() -> None:
    assert local.reuse_of(Request([0] * 70), None, 48) == Reuse(70, 48)


# ---------------------------------------------------------------- starting


def test_a_users_additional_config_keeps_lazyrags() -> None:
    ours = {"additional_config": {"lazyrag": {"mode": "lazy"}}}
    given = {"max_num_seqs": 3, "additional_config": {"theirs": 1, "lazyrag": {"mode": "exact"}}}
    assert local.with_own_config(given, ours) == {
        "max_num_seqs": 3,
        "additional_config": {"theirs": 1, "lazyrag": {"mode": "lazy"}},
    }
    assert local.with_own_config({"max_num_seqs": 3}, ours) == {"max_num_seqs": 3}


def test_the_environment_is_as_it_was_once_an_engine_has_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONWARNINGS", raising=False)
    before, stock = dict(os.environ), spawn.get_preparation_data
    with local.starting() as refusals:
        assert refusals.read_text() == ""
        assert os.environ[wire.REFUSALS] == str(refusals)
    assert dict(os.environ) == before
    assert spawn.get_preparation_data is stock
    assert not refusals.exists()


def test_only_the_engines_children_do_without_the_main_script() -> None:
    found = {}

    def look() -> None:
        found[threading.current_thread().name] = spawn.get_preparation_data("child")

    with local.starting():
        for name in (local.THREAD, "another"):
            thread = threading.Thread(target=look, name=name)
            thread.start()
            thread.join()
    main = {"init_main_from_name", "init_main_from_path"}
    assert not found[local.THREAD].keys() & main
    assert found["another"].keys() & main


def test_a_prompt_that_fills_the_context_is_refused_with_both_lengths() -> None:
    local.check_length(Request([0] * 9), 10)
    with pytest.raises(RequestError, match=r"10 tokens.* 10\."):
        local.check_length(Request([0] * 10), 10)
