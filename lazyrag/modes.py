"""How much of a prompt is reused: one small setting, the same for an engine, a request and a command line.

    exact      nothing but prefixes: plain vLLM, full attention
    lazy       every chunk is computed alone
    sink       every chunk is computed behind a few fixed tokens that no prompt holds, so that it has something to
               rest its attention on, as in a prompt of its own (StreamingLLM, arXiv 2309.17453)
    prefix     every chunk is computed behind the prompt's own preamble

To each of the last three may be added what is computed in its place after all, seeing everything before it:

    first_k    the first k tokens of each chunk, as in LegoLink (EPIC, arXiv 2410.15332)
    recompute  that share of each chunk's blocks, where reused and recomputed KV differ most, as in CacheBlend
               (arXiv 2405.16444)

Written as text: "sink", "lazy+first_k=16", "prefix+recompute=0.1".
"""

from __future__ import annotations

from dataclasses import dataclass

from lazyrag.errors import ConfigError

EXACT = "exact"
KINDS = (EXACT, "lazy", "sink", "prefix")
AUTO = "auto"
"""As a setting: the mode that was found to be good enough for the model (`lazyrag.calibration`), or else `EXACT`."""
ALIASES = {"lazy-prefix": "prefix"}
"""Names of earlier versions."""

MODES_HELP = f"{', '.join(KINDS)}; also lazy+first_k=16, sink+recompute=0.1, ..."


@dataclass(frozen=True, slots=True)
class ReuseMode:
    """One way to reuse chunks; see the module docstring.

    Attributes:
        kind: one of `KINDS`.
        first_k: tokens at the head of each chunk that are computed in place; whole blocks of the engine.
        recompute: of a chunk's other blocks, the share that is computed in place, 0 <= recompute < 1.

    Raises:
        ConfigError: a mode that cannot be.
    """

    kind: str
    first_k: int = 0
    recompute: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"{self.kind!r} is no mode.", fix=f"Use one of {MODES_HELP}")
        if isinstance(self.first_k, bool) or not isinstance(self.first_k, int) or not 0 <= self.first_k < 1 << 24:
            raise ConfigError(f"first_k={self.first_k!r} cannot be used:", why="it must be a whole number, 0 or more.")
        if isinstance(self.recompute, bool) or not isinstance(self.recompute, (int, float)):
            raise ConfigError(f"recompute={self.recompute!r} cannot be used:", why="it must be a number.")
        if not 0 <= self.recompute < 1:
            raise ConfigError(
                f"recompute={self.recompute} cannot be used:",
                why="it is a share of a chunk's blocks, 0 or more and below 1.",
                fix="To compute all of them, use mode exact.",
            )
        if self.kind == "exact" and (self.first_k or self.recompute):
            raise ConfigError("Mode exact computes everything:", why="first_k and recompute add nothing to it.")

    @classmethod
    def parse(cls, text: str | ReuseMode) -> ReuseMode:
        """A mode from its text; one that is a mode already is returned as it is.

        Raises:
            ConfigError: a text that names no mode.
        """
        if isinstance(text, ReuseMode):
            return text
        if not isinstance(text, str):
            raise ConfigError(f"{text!r} is no mode.", fix=f"Use one of {MODES_HELP}")
        kind, *parts = text.split("+")
        given: dict[str, str] = {}
        for part in parts:
            name, _, value = part.partition("=")
            if name not in _CONVERT or name in given:
                raise ConfigError(f"{text!r} is no mode:", why=f"{part!r} is not understood.", fix=f"Use {MODES_HELP}")
            given[name] = value
        try:
            numbers = {name: _CONVERT[name](value) for name, value in given.items()}
        except ValueError:
            raise ConfigError(f"{text!r} is no mode:", why="a number is missing.", fix=f"Use {MODES_HELP}") from None
        return cls(ALIASES.get(kind, kind), **numbers)

    def __str__(self) -> str:
        first_k = f"+first_k={self.first_k}" if self.first_k else ""
        recompute = f"+recompute={self.recompute:g}" if self.recompute else ""
        return f"{self.kind}{first_k}{recompute}"

    @property
    def is_exact(self) -> bool:
        return self.kind == EXACT


def default_block_size(mode: ReuseMode) -> int:
    """Tokens of a KV block where nothing else decides: the smallest that vLLM's own CPU attention takes.

    So both sides of a comparison can use it. Where `first_k` is no multiple of it, 16, which only ours takes.
    """
    return 16 if mode.first_k % 32 else 32


def check_blocks(mode: ReuseMode, block_size: int) -> None:
    """Refuse a mode whose `first_k` is not whole KV blocks.

    Raises:
        ConfigError: it is not.
    """
    if mode.first_k % block_size:
        raise ConfigError(
            f"Mode {mode} cannot be had:",
            why=f"first_k counts whole KV blocks, and this engine's have {block_size} tokens.",
            fix=f"Use first_k={-(-mode.first_k // block_size) * block_size}, or set block_size.",
        )


_CONVERT = {"first_k": int, "recompute": float}
