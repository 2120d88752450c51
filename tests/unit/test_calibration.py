"""Mode auto runs what was found for this very model, and exact, with a reason, wherever nothing certain is known."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lazyrag import calibration, client
from lazyrag.backend.fake import FakeEngine
from lazyrag.calibration import Calibration
from lazyrag.client import LazyRAG
from lazyrag.config import Config
from lazyrag.doctor import Row, examine
from lazyrag.errors import ConfigError
from lazyrag.retrievers import embed
from lazyrag.types import Choice, Document

FOUND = Calibration("sink+first_k=16", "loses 0.4%", measured="2026-11-30")


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("LAZYRAG_MODE")
    monkeypatch.setenv("LAZYRAG_CALIBRATIONS", str(tmp_path / "calibrations"))
    monkeypatch.setattr(LazyRAG, "_told", set())


@pytest.fixture
def model(model_folder: Callable[..., Path]) -> Path:
    folder = model_folder("byte-level")
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 4096}))
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def config(model: Path, **settings: object) -> Config:
    return Config.load(model=str(model), **settings)


def save(found: Calibration, settings: Config, model: Path) -> Path:
    """Keep a finding as one that was measured with these settings."""
    return calibration.save(replace(found, settings=calibration.deciding(settings, model)), settings, model)


def chosen(model: Path, **settings: object) -> Choice:
    return LazyRAG(config(model, **settings)).choice


def test_a_model_that_was_never_calibrated_runs_exact_and_says_so_once(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            rag = LazyRAG(config(model))
            assert rag.choice == rag.choice
            assert (rag.choice.mode, rag.choice.why) == ("exact", "this model was never calibrated")
    (record,) = caplog.records
    assert f"lazyrag calibrate DATA.jsonl --model {model}" in record.message


def test_of_a_store_it_is_said_once_whatever_the_process_until_the_reason_changes(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = [Document("a", "A text that is long enough to be worth it.", "a.txt")]

    def told(**settings: object) -> int:
        monkeypatch.setattr(LazyRAG, "_told", set())  # as in another process
        caplog.clear()
        rag = LazyRAG(config(model, store=tmp_path / "kb", embedder="hash", **settings))
        list(rag.ingest(documents=documents, warm=False))
        assert rag.choice.mode == ("lazy" if settings.get("mode") == "lazy" else "exact")
        return len(caplog.records)

    with caplog.at_level(logging.WARNING):
        assert [told(), told(), told(mode="lazy")] == [1, 0, 0]
        save(replace(FOUND, behind="another"), config(model), model)
        assert [told(mode="auto") for _ in range(2)] == [1, 0]


def test_what_was_found_for_a_model_is_what_runs(model: Path) -> None:
    save(FOUND, config(model), model)
    assert chosen(model) == Choice("sink+first_k=16", "loses 0.4%")
    assert LazyRAG(config(model)).engine_config.mode == "sink+first_k=16"


def test_tenants_share_tokenizer_embedder_and_the_look_at_the_weights(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loaded once for all of them, also if they come at once; an error is not kept."""
    save(FOUND, config(model), model)
    loads: Counter[str] = Counter()

    def counted(name: str, load: Callable[..., Any]) -> Callable[..., Any]:
        def count(*args: Any, **kwargs: Any) -> Any:
            loads[name] += 1
            if loads[name] == 1:
                raise ConfigError("Not this time.")
            time.sleep(0.02)  # so that the others come meanwhile
            return load(*args, **kwargs)

        return count

    monkeypatch.setattr(client.Tokenizer, "from_folder", counted("tokenizer", client.Tokenizer.from_folder))
    monkeypatch.setattr(embed, "load_embedder", counted("embedder", embed.load_embedder))
    root = LazyRAG(config(model, store=tmp_path / "store", embedder="hash"))
    for load in (lambda: root.tokenizer, lambda: root.embedder):
        with pytest.raises(ConfigError, match="Not this time"):
            load()
    monkeypatch.setattr(calibration, "model_key", counted("weights", calibration.model_key))
    loads["weights"] = 1
    tenants = [root.for_namespace(f"tenant {n}", quota_chunks=n) for n in range(1, 9)]
    with ThreadPoolExecutor(8) as pool:
        choices = set(pool.map(lambda tenant: tenant.choice, tenants))
        tokenizers = set(pool.map(lambda tenant: id(tenant.tokenizer), tenants))
        embedders = set(pool.map(lambda tenant: id(tenant.embedder), tenants))
    assert choices == {root.choice} == {Choice(FOUND.mode, FOUND.why)}
    assert tokenizers == {id(root.tokenizer)}
    assert embedders == {id(root.embedder)}
    assert loads == {"tokenizer": 3, "embedder": 2, "weights": 2}, "failed ones, and a look at the template"
    assert len({id(tenant.library) for tenant in tenants}) == 8


def test_a_mode_that_is_set_runs_whatever_was_found(model: Path) -> None:
    save(FOUND, config(model), model)
    assert chosen(model, mode="lazy") == Choice("lazy", "set by argument")


def test_a_finding_is_of_these_weights_settings_and_nothing_else(model: Path) -> None:
    save(FOUND, config(model), model)
    for other in (
        config(model, dtype="float32"),
        config(model, engine_args={"rope_theta": 1}),
    ):
        assert LazyRAG(other).choice.mode == "exact"
    assert chosen(model, max_model_len=100, engine_args={"max_num_seqs": 3}).mode == FOUND.mode
    (model / "model.safetensors").write_bytes(b"weights, tuned")
    assert chosen(model).why == "this model was never calibrated"


def test_what_chunks_are_computed_behind_belongs_to_the_finding(model: Path) -> None:
    with_preamble = config(model, preamble="Be brief.")
    save(Calibration("prefix", "good", calibration.behind("prefix", with_preamble)), with_preamble, model)
    assert LazyRAG(with_preamble).choice.mode == "prefix"
    assert chosen(model).why == "this model was calibrated with another prefix"
    save(FOUND, config(model), model)
    assert chosen(model, preamble="Another one.").mode == FOUND.mode, "chunks behind sinks see no preamble"
    assert chosen(model, sink="\n\n").why == "this model was calibrated with another sink"


@pytest.mark.parametrize("changed", [{"min_tokens": 500}, {"block_size": 32}])
def test_a_finding_is_not_used_under_other_settings_that_decide(model: Path, changed: dict[str, Any]) -> None:
    other = config(model, **changed)
    save(FOUND, other, model)
    assert LazyRAG(other).choice.mode == FOUND.mode
    choice = chosen(model)
    assert (choice.mode, choice.why) == ("exact", f"this model was calibrated with another {next(iter(changed))}")
    assert "lazyrag calibrate" in choice.fix


def test_a_finding_is_not_used_with_another_chat_template_nor_if_it_does_not_say(model: Path) -> None:
    save(FOUND, config(model), model)
    (model / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert chosen(model).why == "this model was calibrated with another chat_template"
    calibration.save(FOUND, config(model), model)
    assert "another min_tokens, another block_size" in chosen(model).why


@pytest.mark.parametrize(
    "damaged",
    ["", "[]", '{"mode": "lazy"}', '{"mode": "lzy", "why": ""}', '{"mode": "lazy", "why": "", "settings": 5}', "\0"],
)
def test_a_damaged_finding_is_none_and_says_so(model: Path, damaged: str) -> None:
    save(FOUND, config(model), model).write_text(damaged)
    choice = chosen(model)
    assert choice.mode == "exact"
    assert "cannot be read" in choice.why
    assert "lazyrag calibrate" in choice.fix


def test_no_weights_are_read_where_nothing_was_ever_found(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "model_fingerprint", None)
    assert chosen(model).mode == "exact"


def test_writers_and_readers_at_the_same_time_meet_whole_findings_only(model: Path, tmp_path: Path) -> None:
    settings = config(model)
    save(FOUND, settings, model)

    def write(number: int) -> None:
        for _ in range(20):
            save(Calibration("lazy", f"writer {number}" * 1000), settings, model)

    writers = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        assert calibration.load(settings, lambda: model) is not None
    assert len(list((tmp_path / "calibrations").iterdir())) == 1


def test_who_may_read_a_finding_is_the_umasks_matter(model: Path) -> None:
    before = os.umask(0o027)
    try:
        path = save(FOUND, config(model), model)
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o640


def test_a_folder_that_cannot_be_written_is_said_and_left_as_it_was(model: Path, tmp_path: Path) -> None:
    (tmp_path / "calibrations").write_text("no folder")
    with pytest.raises(ConfigError, match="LAZYRAG_CALIBRATIONS"):
        save(FOUND, config(model), model)


def test_a_reason_names_no_folder_but_its_detail_does(model: Path, tmp_path: Path) -> None:
    """The reason is told to clients of a server, the detail to who works on its machine."""
    settings = tmp_path / "lazyrag.toml"
    settings.write_text('mode = "lazy"')
    choice = LazyRAG(Config.load(settings, model=str(model))).choice
    assert choice == Choice("lazy", "set by lazyrag.toml", detail=str(settings))
    assert str(settings) in choice.reason
    store = tmp_path / "kb"
    of_store = Config(str(model), mode="lazy", store=store, origins={"mode": str(store)})
    assert calibration.choose(of_store, lambda: model) == Choice("lazy", "set by the store", detail=str(store))
    path = save(FOUND, config(model), model)
    path.write_text("")
    unreadable = chosen(model)
    assert str(tmp_path) not in unreadable.why
    assert str(path) in unreadable.detail


# ---------------------------------------------------------------- who says it


def test_clients_of_one_mode_share_an_engine_whoever_chose_it(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []

    def start(settings: Config, folder: Path) -> FakeEngine:
        started.append(settings.mode)
        return FakeEngine(folder, mode=settings.mode)

    monkeypatch.setattr(client, "start_engine", start)
    save(Calibration("lazy", "loses nothing"), config(model), model)
    try:
        auto, named = LazyRAG(config(model)), LazyRAG(config(model, mode="lazy"))
        assert auto.engine is named.engine
        assert started == ["lazy"]
    finally:
        client.close_engines()


def test_every_answer_says_which_mode_ran_and_why(model: Path) -> None:
    save(Calibration("lazy", "loses nothing"), config(model), model)
    rag = LazyRAG(config(model), engine=FakeEngine(model, mode="lazy"))
    (answer,) = rag.generate(["A prompt."])
    assert answer.mode == Choice("lazy", "loses nothing")
    (asked,) = rag.generate(["A prompt."], mode="exact")
    assert asked.mode == Choice("exact", "asked for by the request")
    assert list(rag.stream("A prompt."))[-1].mode == answer.mode


def test_of_an_engine_that_runs_already_its_own_mode_is_said(model: Path) -> None:
    rag = LazyRAG(config(model), engine=FakeEngine(model, mode="sink"))
    assert rag.choice == Choice("sink", "the running engine's")


def mode_row(settings: Config) -> Row:
    return next(row for row in examine(settings) if row.name == "mode")


def test_doctor_says_which_mode_runs_and_what_to_type(model: Path) -> None:
    row = mode_row(config(model))
    assert (row.status, row.found) == ("warn", "exact: this model was never calibrated")
    assert "lazyrag calibrate" in row.fix
    save(FOUND, config(model), model)
    assert mode_row(config(model)) == Row("mode", "ok", "sink+first_k=16: loses 0.4%")
    assert "lazyrag eval" in mode_row(config(model, mode="lazy")).found
