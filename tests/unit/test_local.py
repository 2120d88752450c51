"""What the local engine decides without vLLM: errors in the user's terms, reuse from the report, settings."""

from __future__ import annotations

import json
import logging
import os
import threading
from importlib.util import find_spec
from logging.config import dictConfig
from multiprocessing import get_context, spawn
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from lazyrag.backend import local, wire
from lazyrag.backend.engine import Request
from lazyrag.backend.spawned import UNASKED
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


def test_a_failed_start_names_every_refusal_or_keeps_the_log_that_names_its_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local.tempfile, "tempdir", str(tmp_path))
    refusals = "LazyRAG cannot run:\n  - one\n  - two"
    with local.starting() as start:
        start.refusals.write_text(refusals)
        start.log.write_text("all of it")
        told = start.error(RuntimeError("engine core died"))
    assert (type(told), str(told), list(tmp_path.iterdir())) == (UnsupportedError, refusals, [])
    log = "ERROR: it failed\nTraceback:\n  File x\nValueError: no room. Do this.\nERROR\nRuntimeError: a child died\n"
    with local.starting() as start:
        start.log.write_text(log)
        told = start.error(RuntimeError("See above."))
    (kept,) = tmp_path.iterdir()
    assert type(told) is EngineStartError
    assert (told.why, told.fix) == ("ValueError: no room. Do this.", f"vLLM's whole log: {kept}")
    assert kept.read_text() == log
    with local.starting() as start:
        assert start.error(RuntimeError("out of memory")).why == "out of memory"


def test_errors_of_vllm_go_to_stderr_and_everything_to_the_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = local.logging_settings(tmp_path / "log")
    settings["loggers"] = {"test of vllm": settings["loggers"]["vllm"]}
    dictConfig(settings)
    logger = logging.getLogger("test of vllm")
    logger.info("starts")
    logger.error("failed")
    assert [line.rpartition(" ")[2] for line in (tmp_path / "log").read_text().splitlines()] == ["starts", "failed"]
    assert [line.rpartition(" ")[2] for line in capsys.readouterr().err.splitlines()] == ["failed"]
    for handler in logger.handlers:
        handler.close()
    logger.handlers.clear()


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
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
    before, stock = dict(os.environ), spawn.get_preparation_data
    with local.starting() as start:
        assert start.refusals.read_text() == ""
        assert os.environ[wire.REFUSALS] == str(start.refusals)
        assert json.loads(Path(os.environ["VLLM_LOGGING_CONFIG_PATH"]).read_text()) == local.logging_settings(start.log)
    assert dict(os.environ) == before
    assert spawn.get_preparation_data is stock
    assert not start.refusals.exists()


@pytest.mark.parametrize("name", ["VLLM_LOGGING_LEVEL", "VLLM_LOGGING_CONFIG_PATH"])
def test_who_tells_vllm_how_to_log_is_obeyed(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
    monkeypatch.setenv(name, "INFO")
    before = {name: value for name, value in os.environ.items() if name.startswith("VLLM_LOGGING")}
    with local.starting():
        assert {name: value for name, value in os.environ.items() if name.startswith("VLLM_LOGGING")} == before


def test_only_the_engines_children_do_without_the_main_script() -> None:
    found = {}

    def look() -> None:
        found[threading.current_thread().name] = spawn.get_preparation_data("child")

    with local.starting():
        for name in (local.THREAD, "another"):
            thread = threading.Thread(target=look, name=name)
            thread.start()
            thread.join()
    assert find_spec(local.SPAWNED)
    assert main_of(found[local.THREAD]) == {"init_main_from_name": local.SPAWNED}
    assert main_of(found["another"]) == main_of(spawn.get_preparation_data("child"))


def main_of(data: dict[str, Any]) -> dict[str, Any]:
    """What a child process would run as its main module."""
    return {key: value for key, value in data.items() if key.startswith("init_main_from_")}


def test_spawned_processes_and_theirs_say_nothing_that_concerns_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
    levels = "[logging.getLogger(name).level for name in UNASKED]"
    note = f"import logging; from lazyrag.backend.spawned import UNASKED; open({{}}, 'a').write(str({levels}))"
    child, grandchild = (note.format(repr(str(tmp_path / name))) for name in ("child", "grandchild"))
    spawning = (
        f"import multiprocessing as m; p = m.get_context('spawn').Process(target=exec, args=({grandchild!r}, {{}}))"
    )

    def start() -> None:
        process = get_context("spawn").Process(target=exec, args=(f"{child}\n{spawning}; p.start(); p.join()", {}))
        process.start()
        process.join()

    with local.starting():
        thread = threading.Thread(target=start, name=local.THREAD)
        thread.start()
        thread.join()
    wanted = str([logging.ERROR] * len(UNASKED))
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"child": wanted, "grandchild": wanted}


def test_a_prompt_that_fills_the_context_is_refused_with_both_lengths() -> None:
    local.check_length(Request([0] * 9), 10)
    with pytest.raises(RequestError, match=r"10 tokens.* 10\."):
        local.check_length(Request([0] * 10), 10)
