"""What doctor finds, and that every finding says what to do about it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path

import pytest

from lazyrag import doctor
from lazyrag.config import Config
from lazyrag.doctor import Row, examine
from lazyrag.retrievers.store import Store


def rows(config: Config | None = None, *, full: bool = False) -> dict[str, Row]:
    return {row.name: row for row in examine(config or Config(), full=full)}


@pytest.fixture
def model(model_folder: Callable[..., Path]) -> Path:
    """A folder that looks like a chat model's."""
    folder = model_folder("byte-level", chat_template="{% for message in messages %}{{ message.content }}{% endfor %}")
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    return folder


def installed(monkeypatch: pytest.MonkeyPatch, versions: dict[str, str]) -> None:
    """Let these be the packages that are installed."""

    def version(package: str) -> str:
        try:
            return versions[package]
        except KeyError:
            raise doctor.PackageNotFoundError(package) from None

    monkeypatch.setattr(doctor, "version", version)


def test_every_finding_that_is_not_fine_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    installed(monkeypatch, {})
    found = rows(Config(model=str(tmp_path / "absent"), store=tmp_path / "none"))
    assert {"python", "machine", "vllm", "plugin", "torch", "extras", "store", "model", "disk"} <= found.keys()
    assert {"vllm", "torch", "store", "model"} <= {row.name for row in found.values() if row.status == "fail"}
    assert all(row.fix for row in found.values() if row.status != "ok")
    assert all(row.found for row in found.values())


def test_quick_checks_import_neither_torch_nor_vllm(model: Path) -> None:
    code = (
        "import sys\nfrom lazyrag.config import Config\nfrom lazyrag.doctor import examine\n"
        f"assert list(examine(Config(model={str(model)!r})))\n"
        "assert not {'torch', 'vllm', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_plugin_that_is_switched_off_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    plugin = rows()["plugin"]
    assert (plugin.status, plugin.fix) == ("fail", "export VLLM_PLUGINS=other,lazyrag")
    monkeypatch.setenv("VLLM_PLUGINS", "other,lazyrag")
    assert rows()["plugin"].status == "ok"
    monkeypatch.setattr(doctor, "entry_points", lambda group: [])
    assert rows()["plugin"].status == "fail"


@pytest.mark.parametrize(
    ("torch", "vision", "conflict"),
    [("2.13.0+cpu", "0.28.0", True), ("2.13.0", "0.28.0", False), ("2.13.0+cpu", "0.28.0+cpu", False)],
)
def test_torchvision_of_another_build_is_a_conflict(
    torch: str, vision: str, conflict: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(monkeypatch, {"torch": torch, "torchvision": vision})
    assert ("torchvision" in rows()) is conflict


def test_a_file_that_hides_the_package_kernels_is_a_conflict(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    installed(monkeypatch, {})
    monkeypatch.delitem(sys.modules, "kernels", raising=False)
    (tmp_path / "kernels").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert "kernels" not in rows()  # a folder alone hides nothing
    (tmp_path / "kernels" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert rows()["kernels"].status == "fail"


def test_a_missing_embedder_is_a_warning_unless_none_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, {"pypdf": "5.0"})
    assert rows()["extras"].status == "warn"
    assert rows(Config(embedder="hash"))["extras"].status == "ok"
    assert "pdf (5.0)" in rows()["extras"].found


def test_low_disk_and_low_memory_are_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1, 1, 1 << 20))
    monkeypatch.setattr(doctor, "_free_memory", lambda: 1 << 20)
    found = rows()
    assert (found["disk"].status, found["machine"].status) == ("warn", "warn")


# ---------------------------------------------------------------- model and store


def test_a_complete_model_is_fine(model: Path) -> None:
    found = rows(Config(model=str(model)))
    assert "LlamaForCausalLM" in found["model"].found
    assert found["tokenizer"] == Row("tokenizer", "ok", "no document can write one of its 5 control tokens")


def test_a_model_without_chat_template_is_a_warning(model: Path) -> None:
    (model / "tokenizer_config.json").unlink()
    assert rows(Config(model=str(model)))["tokenizer"].status == "warn"


@pytest.mark.parametrize("content", [None, "", "{}", '{"model": 3}'])
def test_a_damaged_tokenizer_is_a_failure(content: str | None, model: Path) -> None:
    (model / "tokenizer.json").unlink()
    if content is not None:
        (model / "tokenizer.json").write_text(content)
    found = rows(Config(model=str(model)))["tokenizer"]
    assert found.status == "fail"


def test_a_store_is_counted_and_names_the_model(model: Path, tmp_path: Path) -> None:
    with Store.open(tmp_path / "store", create=True) as store:
        store.remember(model=str(model))
    found = rows(Config(store=tmp_path / "store"))
    assert (found["store"].status, found["model"].status) == ("ok", "ok")
    assert found["store"].found.startswith("0 documents")


def test_a_store_that_was_split_with_another_tokenizer_is_a_failure(model: Path, tmp_path: Path) -> None:
    with Store.open(tmp_path / "store", create=True) as store:
        store.require(model=str(model), tokenizer="another")
    assert rows(Config(store=tmp_path / "store"))["tokenizer"].status == "fail"


def test_a_damaged_store_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "store.sqlite3").write_bytes(b"no database" * 1000)
    assert rows(Config(store=tmp_path))["store"].status == "fail"


def test_the_tiers_are_shown_with_their_budgets(tmp_path: Path) -> None:
    found = rows(Config(store=tmp_path, kv_host_bytes=1 << 30, kv_disk_bytes=5 << 30, tier_policy="lru"))["tiers"]
    assert found.status == "ok"
    assert found.found == "pool as the engine chooses, host memory 1.0 GiB (lru), disk 5.0 GiB"
    assert rows(Config())["tiers"].found.endswith("host memory none (cost), disk none")
    assert "tiers" not in rows(Config(mode="exact"))
    assert rows(Config(kv_host_bytes=1 << 55))["tiers"].status == "warn"


# ---------------------------------------------------------------- full


SAID = {"version": "0.32.0", "tested": True, "known": "0.26.0, 0.32.0", "device": "cpu", "torch": "2.13.0"}


@pytest.mark.parametrize(
    ("script", "status", "found"),
    [
        (f"print({json.dumps(json.dumps(SAID))})", "ok", "vLLM 0.32.0 on cpu, torch 2.13.0, plugin loads"),
        (f"print({json.dumps(json.dumps({**SAID, 'tested': False}))})", "warn", "not a tested version"),
        ("raise ImportError('libfoo.so is missing')", "fail", "ImportError: libfoo.so is missing"),
        ("import sys; sys.exit(3)", "fail", "exit code 3"),
        ("import time; time.sleep(60)", "fail", "did not import within"),
    ],
)
def test_the_full_check_tells_how_importing_vllm_went(
    script: str, status: str, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_IMPORT_VLLM", script)
    monkeypatch.setattr(doctor, "FULL_CHECK_S", 1 if "sleep" in script else 60)
    row = rows(full=True)["import"]
    assert row.status == status
    assert found in row.found
    assert "import" not in rows()
