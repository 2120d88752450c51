"""Every setting, in one place: what it is, where it came from, and whether it can be.

    lazyrag.toml  <  LAZYRAG_* variables  <  arguments

The file is `./lazyrag.toml`, or else `<store>/lazyrag.toml`. Its keys are the field names of `Config`, `engine_args` is
a table, and relative paths in it start at its own folder. Field `name` has the variable `LAZYRAG_NAME`; an empty
variable counts as not set. Bytes may be written as text with a unit, "20GiB".
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import KW_ONLY, Field, dataclass, field, fields
from difflib import get_close_matches
from math import inf
from pathlib import Path
from typing import Any, TypeAlias

from lazyrag.backend.engine import TIER_POLICIES
from lazyrag.errors import ConfigError
from lazyrag.modes import AUTO, MODES_HELP, ReuseMode
from lazyrag.types import Quota

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib  # type: ignore[no-redef,import-not-found,unused-ignore]

FILE_NAME = "lazyrag.toml"
ENV_PREFIX = "LAZYRAG_"
LOG_LEVELS = ("debug", "info", "warning", "error")

OTHER_VARIABLES: Mapping[str, str] = {
    "LAZYRAG_ALLOW_UNTESTED_VLLM": "1: start on a vLLM version that LazyRAG was not tested with.",
    "LAZYRAG_API_KEY": "Key for the server of `lazyrag ingest --server`.",
    "LAZYRAG_REFUSALS": "File for the reasons of an engine that refuses to start; set by LazyRAG itself.",
    "LAZYRAG_TEST_DATA": "Folder of real passages; read by tests only.",
    "LAZYRAG_TEST_MODEL": "Folder of a small real model; read by tests only.",
}
"""Variables that are no settings. Any other `LAZYRAG_*` variable that names no setting is taken for a typing error."""

Bytes: TypeAlias = int


# ruff: noqa: RUF009  (a call as a default is right here: it gives a dataclass field)
def _setting(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of `lazyrag config show`."""

    name: str
    value: Any
    origin: str
    variable: str
    help: str


@dataclass(frozen=True, slots=True)
class Config:
    """All settings, checked when built; read-only afterwards.

    Attributes:
        origins: where the settings that are not defaults came from: a file's path, a variable's name, or "argument".

    Raises:
        ConfigError: a value that cannot be, with the place it came from.
    """

    model: str = _setting("", "Model folder or name; empty: the one that the store was made for.")
    _: KW_ONLY
    mode: str = _setting(AUTO, f"What is reused of chunks: auto (as `lazyrag calibrate` found); {MODES_HELP}")
    store: Path | None = _setting(None, "Folder of documents, vectors and KV.")
    preamble: str = _setting("", "Fixed beginning of every prompt, which chunks attend to (mode prefix).")
    sink: str = _setting("", "What chunks attend to in mode sink, never part of a prompt; empty: chosen for the model.")
    embedder: str = _setting("minilm", "Embedding model: minilm, hash, or a sentence-transformers folder or name.")
    namespace: str = _setting("", "Tenant; documents and KV are never shared between namespaces.")
    dtype: str = _setting("auto", "Number type of weights and KV, as vLLM names it.")
    max_model_len: int | None = _setting(None, "Tokens of prompt and answer together; unset: as the model allows.")
    block_size: int | None = _setting(None, "Tokens in a KV block; unset: as the engine chooses.")
    kv_cache_bytes: Bytes | None = _setting(None, "Memory for KV; unset: as the engine chooses.")
    kv_disk: bool = _setting(True, "Keep the chunks' KV on disk, in <store>/kv.")
    kv_disk_bytes: Bytes | None = _setting(None, "Disk space for KV, the oldest dropped first; unset: no limit.")
    kv_host_bytes: Bytes | None = _setting(None, "Host memory for the chunks' KV, between pool and disk; unset: none.")
    tier_policy: str = _setting("cost", f"Whose KV host memory gives up first: {', '.join(TIER_POLICIES)}.")
    min_tokens: int = _setting(16, "A chunk of fewer tokens is computed in place.")
    chunk_size: int = _setting(256, "Tokens in a chunk, at most.")
    chunk_overlap: int = _setting(0, "Tokens that neighbouring chunks share; computed and kept twice.")
    max_tokens: int = _setting(256, "Tokens to generate, at most.")
    temperature: float = _setting(0.0, "Randomness of the answer; 0 takes the likeliest token.")
    quota_documents: int | None = _setting(None, "Documents that a namespace may hold; unset: no limit.")
    quota_chunks: int | None = _setting(None, "Chunks that a namespace may hold; unset: no limit.")
    quota_kv_bytes: Bytes | None = _setting(None, "Disk space for a namespace's KV; unset: no limit.")
    auto_register: int = _setting(
        0, "Sightings after which a text that recurs in prompts becomes a chunk by itself, 2 or more; 0: never."
    )
    auto_register_bytes: Bytes = _setting(
        1 << 30, "KV of such chunks together; the longest unused are forgotten first."
    )
    serve_recompute: bool = _setting(
        False, "Let a server's clients ask for modes with recompute, which loads the model's first layers beside it."
    )
    calibrations: Path | None = _setting(
        None, "Folder of what `lazyrag calibrate` found for models; unset: one of the user's."
    )
    engine_args: Mapping[str, Any] = field(
        default_factory=dict,
        hash=False,
        metadata={"help": "Further arguments for vLLM by its own names; JSON in the variable."},
    )
    log_level: str = _setting("warning", f"What is logged to stderr: {', '.join(LOG_LEVELS)}.")
    origins: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        for setting in _settings():
            description, convert, optional = _kind(setting)
            value = getattr(self, setting.name)
            if value is None and optional:
                continue
            try:
                object.__setattr__(self, setting.name, convert(value))
            except (ValueError, OverflowError):
                raise self._cannot_be(setting.name, f"it must be {description}.") from None
        self._check_words()
        self._check_numbers()
        self._check_engine_args()

    @classmethod
    def load(
        cls, file: str | os.PathLike[str] | None = None, *, env: Mapping[str, str] | None = None, **arguments: Any
    ) -> Config:
        """Read all sources and check the result.

        Args:
            file: the file to read, which must exist; None looks for `lazyrag.toml` in the places named above.
            env: the environment; None is the process's own.
            **arguments: settings by name; None means not given.

        Raises:
            ConfigError: an unknown name, a value that cannot be, a file that cannot be read.
        """
        given = {name: value for name, value in arguments.items() if value is not None}
        _check_names(given, "argument")
        variables = _from_environment(os.environ if env is None else env)
        path = _find_file(file, given.get("store", variables.get("store")))
        in_file = _from_file(path) if path is not None else {}
        origins = {
            **dict.fromkeys(in_file, str(path)),
            **{name: _variable(name) for name in variables},
            **dict.fromkeys(given, "argument"),
        }
        return cls(**{**in_file, **variables, **given}, origins=origins)

    def origin(self, name: str) -> str:
        """Where the setting's value came from."""
        return self.origins.get(name, "default")

    def rows(self) -> list[Setting]:
        """Every setting with its value, origin, variable and meaning, in the order of the fields."""
        return [
            Setting(s.name, getattr(self, s.name), self.origin(s.name), _variable(s.name), s.metadata["help"])
            for s in _settings()
        ]

    @property
    def kv_dir(self) -> Path | None:
        """Folder of the chunks' KV, or None if KV is not kept on disk."""
        return self.store / "kv" if self.store is not None and self.kv_disk else None

    @property
    def quota(self) -> Quota:
        """What the namespace may hold."""
        return Quota(self.quota_documents, self.quota_chunks, self.quota_kv_bytes)

    def engine_key(self) -> tuple[Hashable, ...]:
        """Equal for configurations that one engine can serve."""
        return (
            self.model,
            self.mode,
            self.dtype,
            self.max_model_len,
            self.block_size,
            self.kv_cache_bytes,
            self.kv_dir,
            self.kv_disk_bytes,
            self.kv_host_bytes,
            self.tier_policy,
            json.dumps(self.engine_args, sort_keys=True, default=repr),
        )

    def _check_words(self) -> None:
        for name, known in (("log_level", LOG_LEVELS), ("tier_policy", TIER_POLICIES)):
            if getattr(self, name) not in known:
                raise self._cannot_be(name, f"it must be one of {', '.join(known)}.")
        if self.mode != AUTO:
            try:
                mode = ReuseMode.parse(self.mode)
            except ConfigError as error:
                raise self._cannot_be("mode", error.why or "there is no such mode.", error.fix) from None
            object.__setattr__(self, "mode", str(mode))
        for name in ("namespace", "preamble", "sink"):
            try:
                getattr(self, name).encode()
            except UnicodeEncodeError:
                raise self._cannot_be(name, "it holds a lone surrogate, which is not Unicode.") from None
        if self.mode != AUTO and mode.kind == "prefix" and not self.preamble:
            raise self._cannot_be(
                "mode", "chunks are computed behind the preamble, and there is none.", "Set preamble, or mode to sink."
            )

    def _check_numbers(self) -> None:
        for name, most in _AT_MOST.items():
            value = getattr(self, name)
            if value is not None and not 1 <= value <= most:
                raise self._cannot_be(name, f"it must be 1 or more, and {most} at most.")
        if not 0 <= self.chunk_overlap < self.chunk_size:
            raise self._cannot_be("chunk_overlap", f"it must be 0 or more and below chunk_size ({self.chunk_size}).")
        if self.auto_register != 0 and not 2 <= self.auto_register <= 1 << 24:
            raise self._cannot_be("auto_register", "it must be 0, or 2 or more: what recurs is seen twice.")
        if not 0 <= self.temperature < inf:
            raise self._cannot_be("temperature", "it must be 0 or more.")

    def _check_engine_args(self) -> None:
        for name, setting in _SETTING_OF_ENGINE_ARG.items():
            if name in self.engine_args:
                raise ConfigError(
                    f"engine_args cannot hold {name} ({self.origin('engine_args')}):",
                    why="it has a setting of its own, and the two could contradict each other.",
                    fix=f"Set {setting} instead.",
                )

    def _cannot_be(self, name: str, why: str, fix: str = "") -> ConfigError:
        value = getattr(self, name)
        shown = f"{name} = {value!r}" if name != "preamble" else name
        return ConfigError(f"{shown} ({self.origin(name)}) cannot be used:", why=why, fix=fix)


_AT_MOST = {
    **dict.fromkeys(("max_model_len", "block_size", "min_tokens", "chunk_size", "max_tokens"), 1 << 24),
    **dict.fromkeys(("kv_cache_bytes", "kv_disk_bytes", "kv_host_bytes"), 1 << 60),
    **dict.fromkeys(("quota_kv_bytes", "auto_register_bytes"), 1 << 60),
    **dict.fromkeys(("quota_documents", "quota_chunks"), 1 << 40),
}
"""Numbers of 1 or more, and what nobody can mean any more: beyond it, other libraries' integers overflow."""

_SETTING_OF_ENGINE_ARG = {
    "model": "model",
    "dtype": "dtype",
    "max_model_len": "max_model_len",
    "block_size": "block_size",
    "kv_cache_memory_bytes": "kv_cache_bytes",
}
"""vLLM's arguments that a setting decides."""


def _settings() -> Iterable[Field[Any]]:
    return (f for f in fields(Config) if "help" in f.metadata)


def _variable(name: str) -> str:
    return ENV_PREFIX + name.upper()


# ---------------------------------------------------------------- sources


def _from_environment(env: Mapping[str, str]) -> dict[str, Any]:
    settings = {_variable(s.name): s for s in _settings()}
    values = {}
    for variable, text in env.items():
        if not variable.startswith(ENV_PREFIX) or variable in OTHER_VARIABLES or not text:
            continue
        if variable not in settings:
            raise ConfigError(
                f"The environment variable {variable} names no setting.",
                fix=_nearest(variable, [*settings, *OTHER_VARIABLES]),
            )
        setting = settings[variable]
        values[setting.name] = _from_text(setting, text)
    return values


def _from_text(setting: Field[Any], text: str) -> Any:
    """A variable's value: text as it is, true or false in the usual spellings, everything else as JSON."""
    description, convert, _ = _kind(setting)
    try:
        if convert in (_text, _path, _bytes):
            return convert(text)
        if convert is _flag:
            return _FLAGS[text.lower()]
        return convert(json.loads(text))
    except (KeyError, ValueError, OverflowError, RecursionError):
        raise ConfigError(
            f"{_variable(setting.name)}={text!r} cannot be used:", why=f"it must be {description}."
        ) from None


def _find_file(file: str | os.PathLike[str] | None, store: str | os.PathLike[str] | None) -> Path | None:
    if file is not None and not isinstance(file, (str, os.PathLike)):
        raise ConfigError("The settings file cannot be read:", why="its path is not text.")
    if file is not None:
        return Path(file)
    # A store that is no path is refused when the settings are checked.
    folders = [Path(), *([Path(store)] if isinstance(store, (str, os.PathLike)) else [])]
    return next((folder / FILE_NAME for folder in folders if (folder / FILE_NAME).is_file()), None)


def _from_file(path: Path) -> dict[str, Any]:
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read:", why=f"{error.strerror}.") from None
    except ValueError as error:  # not TOML, or not UTF-8
        raise ConfigError(f"{path} is not a TOML file:", why=f"{error}.") from None
    except RecursionError:
        raise ConfigError(f"{path} cannot be read:", why="its values are nested too deeply.") from None
    _check_names(values, str(path))
    for name in ("store", "model", "embedder", "calibrations"):
        # A bare name may be a model's; what begins with "." or "~" can only be a path.
        value = values.get(name)
        if isinstance(value, str) and (value if name in ("store", "calibrations") else value.startswith((".", "~"))):
            values[name] = str(path.parent / Path(value).expanduser())
    return values


def _check_names(values: Mapping[str, Any], origin: str) -> None:
    known = [s.name for s in _settings()]
    for name in values:
        if name not in known:
            raise ConfigError(f"There is no setting {name!r} ({origin}).", fix=_nearest(name, known))


def _nearest(name: str, known: Iterable[str]) -> str:
    near = get_close_matches(name, list(known), n=1)
    return f"Did you mean {near[0]}?" if near else "`lazyrag config show` lists all of them."


# ---------------------------------------------------------------- kinds of values


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError
    return value


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError
    return value


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError
    return float(value)


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError
    return value


def _path(value: Any) -> Path:
    if not isinstance(value, (str, os.PathLike)) or not value:  # an empty one would be the current folder
        raise ValueError
    return Path(value).expanduser()


def _bytes(value: Any) -> int:
    if not isinstance(value, str):
        return _whole(value)
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([KMGT]i?B)?", value.strip(), re.IGNORECASE)
    if match is None:
        raise ValueError
    number, unit = match.groups()
    return int(float(number) * _UNITS[unit.upper()]) if unit else _whole(int(number))


def _table(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ValueError
    return dict(value)


_FLAGS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
_UNITS = {f"{p}{i}B": b**n for n, p in enumerate("KMGT", start=1) for i, b in (("", 1000), ("I", 1024))}

_KINDS: Mapping[str, tuple[str, Callable[[Any], Any]]] = {
    "str": ("text", _text),
    "int": ("a whole number", _whole),
    "float": ("a number", _number),
    "bool": ("true or false", _flag),
    "Path": ("a path, and not an empty one", _path),
    "Bytes": ('a number of bytes, such as 1073741824 or "1GiB"', _bytes),
    "Mapping[str, Any]": ("a table of names and values", _table),
}


def _kind(setting: Field[Any]) -> tuple[str, Callable[[Any], Any], bool]:
    """What a setting's value must be, how it is brought into form, and whether it may be None."""
    annotation = str(setting.type)
    description, convert = _KINDS[annotation.removesuffix(" | None")]
    return description, convert, annotation.endswith(" | None")
