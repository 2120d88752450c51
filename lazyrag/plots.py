"""Drawings as files, by matplotlib (the extra `plot`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lazyrag.errors import InputError
from lazyrag.optional import need


@contextmanager
def drawing(path: Path, heights: tuple[float, ...] = (4.5,)) -> Iterator[list[Any]]:
    """Axes below each other, to be drawn on; then they are written to a file, in its own format.

    Args:
        path: its suffix names the format.
        heights: of each of the axes, in inches.

    Raises:
        MissingExtraError: matplotlib is not installed.
        InputError: the file's name ends in no format that can be drawn, or it cannot be written.
    """
    pyplot = need("matplotlib.pyplot", extra="plot")
    figure, axes = pyplot.subplots(
        len(heights),
        1,
        figsize=(7, sum(heights)),
        height_ratios=heights,
        squeeze=False,
        layout="constrained",
    )
    try:
        yield list(axes[:, 0])
        try:
            with pyplot.rc_context({"svg.fonttype": "none"}):  # text, not outlines of letters
                figure.savefig(path)
        except (ValueError, OSError) as error:
            raise InputError(f"{path} cannot be written:", why=f"{error}.") from None
    finally:
        pyplot.close(figure)
