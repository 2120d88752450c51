"""One run: engines, the gate, then metric by metric until all is measured or time is up."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from lazyrag.bench import gate, hits, report, tiers
from lazyrag.bench.arms import ARMS
from lazyrag.bench.child import Spec
from lazyrag.bench.engines import EngineProcess, engines
from lazyrag.bench.measure import WARM_UP, Batch, Bench, NotMeasuredError
from lazyrag.bench.metrics import CASES, METRICS, TIERS, Case, Metric, metrics
from lazyrag.bench.report import Result
from lazyrag.bench.samples import Deadline, Summary
from lazyrag.bench.shapes import LLAMA_8B_KV_BYTES, Model, kv_bytes_per_token, make_model, read_model
from lazyrag.bench.workload import Workload
from lazyrag.errors import ConfigError, EngineError, InputError

ROUNDS, QUICK_ROUNDS = 13, 3
CAPTURE_SIZES = (1, 2, 4, 8, 16, 32, 64, 72, 80, 96, 128, 160, 176, 192, 224, 256)
QUICK_METRICS = tuple(name for name in METRICS if name not in ("rate_at_slo", TIERS))
GATE_KV_BYTES = 256 << 20
"""Of an engine that only the gate asks."""
MAX_LEN = 49152
"""Of prompt and answer: what the longest workload needs."""
MARGIN = 1.05
"""An engine's pool is used up to 1/MARGIN of it: what else is cached must not drive out what is measured."""


class GateError(EngineError):
    """The answers were wrong, so there are no figures."""


@dataclass(frozen=True, slots=True)
class Options:
    """What to run.

    Attributes:
        shape: a name of `shapes.SHAPES`; also chooses the workloads.
        model: folder of a model to take instead of the shape's.
        metrics: names of `metrics.METRICS`, in order of weight.
        only: workloads with this in their name; of those that metrics.py lists.
        rounds: of an interleaved measurement.
        limit_s: seconds after which nothing new is begun, start-up included; None for no limit.
        kv_bytes: KV pool of each engine; None for the device's default. A workload that names its own has that.
        memory_share: of the GPU's memory that vLLM checks for at start; engines share the GPU.
        capture_sizes: batch sizes (tokens) with CUDA graphs.
        eager: no compilation and no graphs.
        engine_args: of vLLM's `LLM`, for every engine; they win.
        out: file for the JSON, written after every workload.
        command: noted in the result.
    """

    shape: str = "llama-8b"
    model: Path | None = None
    metrics: tuple[str, ...] = tuple(METRICS)
    only: str = ""
    rounds: int = ROUNDS
    limit_s: float | None = None
    kv_bytes: int | None = None
    memory_share: float = 0.2
    capture_sizes: tuple[int, ...] = CAPTURE_SIZES
    eager: bool = False
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    out: Path | None = None
    command: str = ""


def options(
    *,
    shape: str | None = None,
    model: Path | None = None,
    metrics: str | None = None,
    only: str | None = None,
    quick: bool = False,
    rounds: int | None = None,
    limit_s: float | None = None,
    kv_gb: float | None = None,
    memory_share: float = 0.2,
    capture_sizes: str | None = None,
    eager: bool = False,
    engine_args: str | None = None,
    out: Path | None = None,
    command: str = "",
) -> Options:
    """`Options` from what is typed: names and numbers with commas, gigabytes, JSON; no shape: what the machine can run.

    Raises:
        ConfigError: there is no such model.
        InputError: something that cannot be read.
    """
    names = QUICK_METRICS if quick else tuple(METRICS)
    try:
        sizes = tuple(int(size) for size in capture_sizes.split(",")) if capture_sizes else CAPTURE_SIZES
        arguments = json.loads(engine_args or "{}")
    except ValueError as error:
        raise InputError("An option cannot be read:", why=str(error)) from None
    if not isinstance(arguments, dict):
        raise InputError("--engine-args must be a JSON object.", fix="Type: --engine-args '{\"max_num_seqs\": 32}'")
    if kv_gb is not None and not 0 < kv_gb < 1e6:
        raise InputError(f"--kv-gb is {kv_gb}: it must be a number of gigabytes.")
    if out is not None and (out.is_dir() or not out.parent.is_dir()):
        raise InputError(f"{out} cannot be written:", why="it is a folder, or its folder does not exist.")
    if model is not None:
        read_model(model, dummy=False)  # which says what is wrong with it
    return Options(
        shape=shape or ("llama-8b" if report.gpus() else "tiny"),
        model=model,
        metrics=tuple(name.strip() for name in metrics.split(",")) if metrics else names,
        only=only or "",
        rounds=rounds or (QUICK_ROUNDS if quick else ROUNDS),
        limit_s=limit_s,
        kv_bytes=None if kv_gb is None else int(kv_gb * 1e9),
        memory_share=memory_share,
        capture_sizes=sizes,
        eager=eager,
        engine_args=arguments,
        out=out,
        command=command,
    )


def bench(options: Options, tell: Callable[[str], None]) -> Result:
    """Measure.

    Args:
        options: what.
        tell: is given lines about what happens.

    Raises:
        InputError, ConfigError: there is no such metric, shape or model.
        GateError: an engine's answers were wrong.
        LazyRAGError: an engine did not start, or failed.
    """
    wanted = metrics(options.metrics)
    deadline = Deadline(options.limit_s)
    result = Result(report.machine(), options.command)
    for kv_bytes, tasks in _by_pool(options, wanted).items():
        arms = {name for metric, _ in tasks for name in metric.arms}
        with _running(options, arms, kv_bytes or options.kv_bytes, result, tell) as (model, running):
            _measure(Bench(running, model.vocabulary, options.rounds, deadline), tasks, model, options, result, tell)
    if any(metric.name == TIERS for metric in wanted):
        _measure_tiers(options, result, deadline, tell)
    if any(metric.name == "hit_ratio" for metric in wanted):
        simulate(result)
        _save(result, options)
    return result


def _measure_tiers(options: Options, result: Result, deadline: Deadline, tell: Callable[[str], None]) -> None:
    """With an engine of their own, that has tiers."""
    if not deadline.allows():
        result.skipped.append((TIERS, tiers.WORKLOADS[options.shape].name, "time was up"))
        return
    with TemporaryDirectory(prefix="lazyrag-bench-") as folder:
        model = make_model(options.shape, Path(folder) / "model")
        exact = options.shape == "tiny"
        workload = tiers.WORKLOADS[options.shape]
        spec = replace(
            _spec(options, model, "lazy", options.kv_bytes, exact),
            host_bytes=tiers.host_bytes(workload, kv_bytes_per_token(model.folder, 4 if exact else 2)),
            kv_root=Path(folder) / "kv",
        )
        tell("Starting an engine with tiers ...")
        with engines({"tiers": spec}) as running:
            result.engines["tiers"] = running["tiers"].ready()
            try:
                tiers.measure(
                    running["tiers"],
                    workload,
                    model.vocabulary,
                    result,
                    tell,
                    rounds=options.rounds,
                    deadline=deadline,
                )
            except NotMeasuredError as error:
                result.skipped.append((TIERS, workload.name, str(error)))
                tell(f"{TIERS}: {workload.name}: not measured: {error}")
    _check_gate(result, options, tell)


def profile(options: Options, tell: Callable[[str], None]) -> Result:
    """Where the milliseconds of a hot request go, for each hot workload, plain vLLM and LazyRAG side by side."""
    result = Result(report.machine(), options.command)
    with _running(options, {"perfect", "lazy"}, options.kv_bytes, result, tell) as (model, running):
        for _, workload in CASES[options.shape]["ttft_hot"]:
            batch = Batch(workload, model.vocabulary)
            found: dict[str, list[dict[str, float]]] = {"perfect": [], "lazy": []}
            for _ in range(WARM_UP + options.rounds):
                batch.draw()
                for name, parts in found.items():
                    (prompt,) = batch.prompts(ARMS[name])
                    parts.append(running[ARMS[name].engine].call("profile", prompt=prompt))
            for name, parts in found.items():
                hot = parts[WARM_UP:]
                medians = {part: median(of_one[part] for of_one in hot) for part in hot[0]}
                result.profile[f"{name} {workload.name}"] = medians
            _save(result, options)
    return result


def simulate(result: Result) -> None:
    """Add the simulated hit ratios, for KV as large as Llama-3.1-8B's."""
    for skew in hits.SKEWS:
        for budget in hits.BUDGETS_BYTES:
            trace = hits.Trace(skew=skew)
            ratios = hits.hit_ratios(trace, budget, LLAMA_8B_KV_BYTES)
            summaries = {name: Summary(ratio, ratio, ratio, trace.requests) for name, ratio in ratios.items()}
            name = f"{trace.name}, KV {budget / hits.GB:g} GB"
            result.rows += report.rows("hit_ratio", name, "1", METRICS["hit_ratio"].compare, summaries)


# ---------------------------------------------------------------- parts of a run


def _by_pool(options: Options, wanted: Sequence[Metric]) -> dict[int, list[tuple[Metric, Case]]]:
    """Metrics and workloads by the KV pool that they need; engines have one size for all their life."""
    if options.shape not in CASES:
        raise ConfigError(f"There is no shape {options.shape!r}.", fix=f"Known: {', '.join(CASES)}.")
    cases = [(metric, case) for metric in wanted for case in CASES[options.shape].get(metric.name, ())]
    tasks: dict[int, list[tuple[Metric, Case]]] = defaultdict(list)
    for metric, case in cases:
        if options.only in case[1].name:
            tasks[case[1].kv_bytes].append((metric, case))
    if cases and not tasks:
        names = dict.fromkeys(case[1].name for _, case in cases)
        raise InputError(f"No workload has {options.only!r} in its name.", fix=f"There are: {'; '.join(names)}.")
    return tasks


@contextmanager
def _running(
    options: Options, arms: Collection[str], kv_bytes: int | None, result: Result, tell: Callable[[str], None]
) -> Iterator[tuple[Model, dict[str, EngineProcess]]]:
    """The engines, started and past the gate."""
    with TemporaryDirectory(prefix="lazyrag-bench-") as folder:
        tiny = make_model("tiny", Path(folder) / "tiny")
        if options.model is not None:
            model = read_model(options.model, dummy=False)
        elif options.shape == "tiny":
            model = tiny
        else:
            model = make_model(options.shape, Path(folder) / options.shape)
        names = _engines(arms)
        specs = {name: _spec(options, model, name, kv_bytes, model is tiny) for name in names}
        if model is not tiny:
            specs |= {f"gate {name}": _spec(options, tiny, name, GATE_KV_BYTES, True) for name in names}
        tell(f"Starting {len(specs)} engines ...")
        with engines(specs) as running:
            for name, engine in running.items():
                result.engines[name] = engine.ready()
            prefix = "" if model is tiny else "gate "
            of_gate = {name: running[f"{prefix}{name}"] for name in names}
            result.gate = gate.examine(of_gate, tiny.folder, tiny.vocabulary)
            _check_gate(result, options, tell)
            for name in [name for name in running if name.startswith("gate ")]:
                running.pop(name).close()
            yield model, running


def _engines(arms: Collection[str]) -> list[str]:
    """What serves these arms here; the gate compares the first two in any case."""
    wanted = ["stock", "lazy"]
    # It has a worker for CUDA only.
    if report.gpus() and any(ARMS[name].engine == "materialize" for name in arms):
        wanted.append("materialize")
    return wanted


def _spec(options: Options, model: Model, engine: str, kv_bytes: int | None, exact: bool) -> Spec:
    arguments = {
        "model": str(model.folder),
        "load_format": "dummy" if model.dummy else None,
        "max_model_len": min(model.max_len, MAX_LEN),
        "max_num_seqs": 64,
        "max_num_batched_tokens": 8192,
        "kv_cache_memory_bytes": kv_bytes,
        "gpu_memory_utilization": options.memory_share,
        "enforce_eager": options.eager or None,
        **options.engine_args,
    }
    return Spec(engine, arguments, exact, options.capture_sizes)


def _check_gate(result: Result, options: Options, tell: Callable[[str], None]) -> None:
    for check in result.gate:
        tell(f"{'ok  ' if check.passed else 'FAIL'} {check.name}: {check.deviation:.2e}, bound {check.bound:.2e}")
    failed = [check.name for check in result.gate if not check.passed]
    _save(result, options)
    if failed:
        raise GateError(
            f"{len(failed)} of {len(result.gate)} checks of the answers failed; no figure is measured.",
            why=f"Failed: {'; '.join(failed)}.",
        )


def _measure(
    bench: Bench,
    tasks: Sequence[tuple[Metric, Case]],
    model: Model,
    options: Options,
    result: Result,
    tell: Callable[[str], None],
) -> None:
    done: set[tuple[str, str]] = set()
    for metric, case in tasks:
        kind, workload = case
        if (metric.name, workload.name) in done:
            continue
        unfit = _unfit(workload, model, result)
        if not unfit and not bench.deadline.allows():
            unfit = "time was up"
        if not unfit:
            try:
                readings = bench.read(metric, case)
            except NotMeasuredError as error:
                unfit = str(error)
        if unfit:
            result.skipped.append((metric.name, workload.name, unfit))
            tell(f"{metric.name}: {workload.name}: not measured: {unfit}")
        else:
            for name, of_metric in readings.items():
                summaries = {arm: Summary.of(of_arm) for arm, of_arm in of_metric.items()}
                unit = "tok/s" if kind == "throughput" else METRICS[name].unit
                rows = report.rows(name, workload.name, unit, METRICS[name].compare, summaries)
                if name in options.metrics:
                    result.rows += rows
                    for line in report.arm_lines(rows):
                        tell(" | ".join((name, *line)))
                done.add((name, workload.name))
        _save(result, options)


def _unfit(workload: Workload, model: Model, result: Result) -> str:
    """Why these engines cannot run a workload; empty if they can."""
    limit = min(model.max_len, MAX_LEN)
    if workload.num_tokens > limit:
        return f"{workload.num_tokens} tokens a request, and the engines take {limit}"
    if workload.pool:
        return ""
    held = min(facts["kv_tokens"] for name, facts in result.engines.items() if not name.startswith("gate "))
    if workload.num_cached_tokens * MARGIN > held:
        return f"{workload.num_cached_tokens} tokens must be cached, and the KV pool holds {held}"
    return ""


def _save(result: Result, options: Options) -> None:
    if options.out is not None:
        result.save(options.out)
