"""Which mode is good enough for a model, as `lazyrag calibrate` found it, and where that is kept.

One JSON file a model, named by what its answers depend on (`model_key`), in a folder of the user's: a finding belongs
to a model, not to a store. Files are replaced as a whole, so readers and writers need no lock.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any
from uuid import uuid4

import platformdirs

from lazyrag.backend.fingerprint import model_fingerprint
from lazyrag.config import Config
from lazyrag.errors import ConfigError
from lazyrag.modes import AUTO, EXACT, ReuseMode
from lazyrag.tokens import Tokenizer
from lazyrag.types import Choice

NEVER = "this model was never calibrated"
ELSE = ", or name a mode (such as lazy) to have it unmeasured."


@dataclass(frozen=True, slots=True)
class Calibration:
    """What was found for a model.

    Attributes:
        mode: the one to use; exact if no other was good enough.
        why: the finding, in words.
        behind: the preamble or the sink, as set, that chunks were computed behind, if `mode` does that.
        measured: the date.
        settings: what else it was measured with (`deciding`).
    """

    mode: str
    why: str
    behind: str = ""
    measured: str = ""
    settings: dict[str, Any] = field(default_factory=dict)


def model_key(config: Config, folder: Path) -> str:
    """Names what a model's answers depend on besides the mode. Reads all of the weights; needs no engine."""
    return model_fingerprint(folder, dtype=f"set to {config.dtype}", engine_args=config.engine_args)


def deciding(config: Config, folder: Path) -> dict[str, Any]:
    """Settings that answers depend on in every mode, beside what `model_key` covers.

    Raises:
        ConfigError: the model's tokenizer cannot be read.
    """
    template = Tokenizer.from_folder(folder).chat_template
    return {
        "min_tokens": config.min_tokens,
        "block_size": config.block_size,
        "chat_template": sha256(template.encode("utf-8", "surrogatepass")).hexdigest()
        if template is not None
        else None,
    }


def behind(mode: str, config: Config) -> str:
    """What a mode computes chunks behind, as set."""
    return {"prefix": config.preamble, "sink": config.sink}.get(ReuseMode.parse(mode).kind, "")


def folder_of(config: Config) -> Path:
    """Where findings are kept."""
    return config.calibrations or platformdirs.user_data_path("lazyrag") / "calibrations"


def save(found: Calibration, config: Config, folder: Path) -> Path:
    """Keep a finding for a model, in place of an earlier one. Returns its file.

    Raises:
        ConfigError: the folder cannot be written.
    """
    path = folder_of(config) / f"{model_key(config, folder)}.json"
    # Not by tempfile, whose files only their owner can read: a folder of findings may be shared.
    new = path.with_name(f"{path.stem}.{uuid4().hex}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        new.write_text(json.dumps(asdict(found), indent=1), encoding="utf-8")
        new.replace(path)
    except OSError as error:
        with suppress(OSError):
            new.unlink()
        raise ConfigError(
            f"{path.parent} cannot be written: {error.strerror}.",
            fix="Set calibrations (LAZYRAG_CALIBRATIONS) to a folder that can be.",
        ) from None
    return path


def load(config: Config, folder: Callable[[], Path]) -> Calibration | None:
    """What was found for a model, or None if nothing was.

    Args:
        config: how the model runs.
        folder: names the model's; asked only if there are findings at all.

    Raises:
        ConfigError: the finding, or the model, cannot be read.
    """
    kept = folder_of(config)
    if not any(kept.glob("*.json")):
        return None  # and no weights are read
    path = kept / f"{model_key(config, folder())}.json"
    try:
        found = Calibration(**json.loads(path.read_text(encoding="utf-8")))
        ReuseMode.parse(found.mode)
        dict(found.settings)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"the finding in {path} cannot be read ({type(error).__name__})") from None
    return found


def choose(config: Config, folder: Callable[[], Path]) -> Choice:
    """The mode that the settings and the findings for the model ask for. Arguments: see `load`."""
    if config.mode != AUTO:
        return _as_set(config)
    of = f"--store {config.store}" if config.store is not None else f"DATA.jsonl --model {config.model}"
    fix = f"Type: lazyrag calibrate {of}{ELSE}"
    try:
        found = load(config, folder)
        now = deciding(config, folder()) if found is not None else {}
    except ConfigError as error:
        return Choice(EXACT, "what was found for this model cannot be read", fix, detail=str(error))
    if found is None:
        return Choice(EXACT, NEVER, fix)
    if found.behind != behind(found.mode, config):
        return Choice(EXACT, f"this model was calibrated with another {ReuseMode.parse(found.mode).kind}", fix)
    if others := [name for name in now if name not in found.settings or found.settings[name] != now[name]]:
        return Choice(EXACT, f"this model was calibrated with another {', another '.join(others)}", fix)
    return Choice(found.mode, found.why)


def _as_set(config: Config) -> Choice:
    origin = config.origin("mode")
    if Path(origin) == config.store:
        return Choice(config.mode, "set by the store", detail=origin)
    if (name := Path(origin).name) != origin:
        return Choice(config.mode, f"set by {name}", detail=origin)
    return Choice(config.mode, f"set by {origin}")
