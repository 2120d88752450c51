"""What LazyRAG refuses at start-up: each unsupported setting with its reason and its fix, all of them at once."""

from __future__ import annotations

from collections.abc import Iterable

from lazyrag.errors import UnsupportedError


def refuse(reasons: Iterable[str | None]) -> None:
    """Raise one `UnsupportedError` that lists every reason; `None` entries are passed checks.

    Raises:
        UnsupportedError: at least one reason is given.
    """
    found = [reason for reason in reasons if reason is not None]
    if found:
        lines = "".join(f"\n  - {reason}" for reason in found)
        raise UnsupportedError(f"LazyRAG cannot run with this model or these engine settings:{lines}")
