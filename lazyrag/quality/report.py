"""A run's findings for people: a table, and a plot of quality against tokens recomputed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lazyrag.bench.report import facts_of, table
from lazyrag.errors import InputError
from lazyrag.plots import drawing
from lazyrag.quality.evaluate import FULL, NONE, Result, Score
from lazyrag.quality.scores import Estimate

HEAD = (
    "mode",
    "nats a token",
    "benefit kept",
    "F1",
    "exact match",
    "same answer",
    "recomputed",
    "computed tokens",
    "TTFT ms",
)


def lines(result: Result) -> list[str]:
    """Everything, as Markdown."""
    b, full = result.benefit, result.arms[FULL]
    hidden = ("digest", "ids", "asked", "settings")
    about = ", ".join(f"{name} {value}" for name, value in result.data.items() if name not in hidden)
    settings = ", ".join(f"{name} {value!r}" for name, value in result.data.get("settings", {}).items() if value)
    return [
        *facts_of(full.machine),
        f"model: {result.model['name']}, key {result.model['key'][:12]}",
        f"data: {len(full.replies)} questions; {about}",
        f"settings: {settings}",
        f"the passages add {b.value:.3f} [{b.low:.3f}, {b.high:.3f}] nats a token of the right answer",
        "",
        *table([cells(score) for score in result.scores], HEAD),
        "",
        "In brackets: 95% intervals (bootstrap over the questions, paired).",
    ]


def cells(score: Score) -> tuple[str, ...]:
    """A line of the table."""
    lost = score.benefit_lost
    kept = "-" if lost is None else spread(Estimate(1 - lost.value, 1 - lost.high, 1 - lost.low), percent=True)
    return (
        score.mode,
        f"{score.logprob.value:.3f}",
        kept if score.mode not in (FULL, NONE) else "100%" if score.mode == FULL else "0%",
        spread(score.f1, percent=True),
        spread(score.exact_match, percent=True),
        f"{score.same:.0%}",
        f"{score.recomputed:.0%}",
        f"{score.computed_tokens:.0f}",
        f"{score.ttft_ms:.0f}",
    )


def spread(found: Estimate, *, percent: bool = False) -> str:
    """A value and its interval."""
    if percent:
        return f"{found.value:.1%} [{found.low:.1%}, {found.high:.1%}]"
    return f"{found.value:.3f} [{found.low:.3f}, {found.high:.3f}]"


def plot(scores: Sequence[Score], path: Path) -> None:
    """Draw what each mode keeps of the passages' benefit against the tokens it recomputes, in the file's own format.

    Raises:
        MissingExtraError: matplotlib is not installed.
        InputError: the file's name ends in no format that can be drawn, or the passages have no benefit.
    """
    with drawing(path) as (axes,):
        for score in scores:
            if score.benefit_lost is None:
                raise InputError("There is nothing to draw:", why="the passages have no sure benefit.")
            lost = score.benefit_lost
            x, y = 100 * score.recomputed, 100 * (1 - lost.value)
            if score.mode == NONE:
                continue
            bars = [[100 * (lost.high - lost.value)], [100 * (lost.value - lost.low)]]
            axes.errorbar([x], [y], yerr=bars, fmt="o", capsize=3)
            axes.annotate(score.mode, (x, y), textcoords="offset points", xytext=(6, 4))
        axes.set_xlabel("passage tokens recomputed for every prompt (%)")
        axes.set_ylabel("kept of the passages' benefit in log-likelihood (%)")
        axes.grid(visible=True, alpha=0.3)
