"""Published figures are those of the measured run that is kept beside the code."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean

from lazyrag.bench.metrics import METRICS
from lazyrag.quality.evaluate import FULL, NONE, Result, Score

SPEED, FROM_TIERS = "lazyrag/bench/results/h200.json", "lazyrag/bench/results/h200-tiers.json"
QUALITY = "benchmarks/quality"
SHOWN = (
    ("ttft_hot", "lazy"),
    ("ttft_hot_literals", "lazy"),
    ("ttft_first_k", "first-k"),
    ("decode_step", "lazy"),
)


def values(root: Path, file: str) -> dict[tuple[str, str, str], float]:
    rows = json.loads((root / file).read_text(encoding="utf-8"))["rows"]
    return {(row["metric"], row["workload"], row["arm"]): row["value"] for row in rows}


def test_the_readmes_table_is_made_of_the_measured_rows(root: Path) -> None:
    readme = (root / "README.md").read_text(encoding="utf-8")
    value = values(root, SPEED)
    for metric, ours in SHOWN:
        shown = dict.fromkeys(workload for name, workload, _ in value if name == metric)
        assert shown
        for workload in shown:
            cells = [value.get((metric, workload, arm)) for arm in (ours, "perfect", "prefix")]
            texts = ["" if ms is None else f"{ms:.1f}" for ms in cells]
            ratio = value[metric, workload, ours] / value[metric, workload, "perfect"]
            assert f"| {metric}, {workload} | {' | '.join(texts)} | {ratio:.2f} |\n" in readme


def test_the_readmes_figures_of_tiers_and_new_documents_are_the_measured_ones(root: Path) -> None:
    value = values(root, SPEED)
    readme = " ".join((root / "README.md").read_text(encoding="utf-8").split())
    ms = {arm: round(time) for (metric, _, arm), time in values(root, FROM_TIERS).items() if metric == "tier_ttft"}
    for figure in (
        f"in the engine's pool {ms['hot']} ms, in host memory {ms['host']} ms",
        f"the pool's time, are {ms['floor']})",
        f"named 200 ms before {ms['prefetched']} ms, on that machine's disk {ms['disk']} ms",
        f"and took {ms['disk rule']} ms. Stock vLLM computing everything: {ms['recompute']} ms",
    ):
        assert figure in readme
    for arm in ("lazy", "recompute"):
        first, second, third = (time for (metric, _, name), time in value.items() if (metric, name) == ("cold", arm))
        assert f"{first:.1f}, {second:.1f} and {third:.1f}" in readme
    ingest = {arm: rate for (metric, _, arm), rate in value.items() if metric == "ingest"}
    assert f"{ingest['lazy'] / ingest['stock']:.2f} of stock prefill" in readme


def test_the_readmes_figures_of_many_requests_are_the_measured_ones(root: Path) -> None:
    readme = " ".join((root / "README.md").read_text(encoding="utf-8").split())
    value = {(metric, arm): number for (metric, _, arm), number in values(root, SPEED).items()}

    def both(arm: str, between: str = "s and") -> str:
        return f"{value['table11_ttft', arm] / 1e3:.1f} {between} {value['table11_throughput', arm]:.2f}"

    for figure in (
        f"first token after {both('lazy', 's on average,')} requests a second",
        f"Block-Attention does, {both('materialize')} ({both('materialize-ordered')} in LazyRAG's order)",
        f"in which they came, {both('lazy-in-turn')}; stock vLLM {both('prefix')}",
        f"documents sorted {both('prefix-reorder')}. ",
    ):
        assert figure in readme
    rates = {key[1:]: rate for key, rate in values(root, SPEED).items() if key[0] == "rate_at_slo"}
    for drawn, skew in (("all as likely", "0"), *((f"by Zipf's law, exponent {s}", s) for s in ("1.1", "2.1"))):
        workload = f"5x2048+64, pool 100, zipf {skew}, KV 24 GB"
        cells = [f"{rates[workload, arm]:.1f}" for arm in ("lazy", "materialize", "prefix")]
        assert f"| {drawn} | {' | '.join(cells)} |" in readme


def test_most_is_found_where_chunks_are_used_in_place(root: Path) -> None:
    value = values(root, SPEED)
    budgets = dict.fromkeys(workload for metric, workload, _ in value if metric == "hit_ratio")
    assert len(budgets) == 4 * 3
    for workload in budgets:
        ours = value["hit_ratio", workload, "lazy"]
        assert ours > max(value["hit_ratio", workload, arm] for arm in ("prefix", "prefix-reorder", "materialize"))
        assert ours >= 0.99 * value["hit_ratio", workload, "documents"]


def test_each_row_has_what_it_needs_to_be_believed(root: Path) -> None:
    speed, tiers = (json.loads((root / file).read_text(encoding="utf-8")) for file in (SPEED, FROM_TIERS))
    assert {row["run"] for row in speed["rows"]} == set(range(len(speed["runs"])))
    simulated = {row["run"] for row in speed["rows"] if row["metric"] == "hit_ratio"}
    for number, run in enumerate([*speed["runs"], tiers]):
        assert run["machine"]["commit"] not in ("", "unknown")
        assert not run["machine"]["commit"].endswith("-dirty")
        assert number in simulated or (run["machine"]["gpu"] and run["machine"]["versions"]["vllm"])
        assert run["gate"] or number in simulated or "note" in run
        assert all(check["passed"] for check in run["gate"])
    keys = {"workload", "metric", "arm", "value", "unit", "baseline", "ratio", "n", "min", "max"}
    assert all(keys <= row.keys() for row in [*speed["rows"], *tiers["rows"]])


def test_every_metric_of_the_comparison_is_published(root: Path) -> None:
    published = {metric for metric, _, _ in values(root, SPEED) | values(root, FROM_TIERS)}
    assert published == METRICS.keys() - {"ttft_few_shot"}


def test_the_readmes_figures_of_tuning_are_those_of_the_answers(root: Path) -> None:
    result = json.loads((root / "benchmarks/tune-smollm2-135m-h200.json").read_text(encoding="utf-8"))
    readme = " ".join((root / "README.md").read_text(encoding="utf-8").split())
    test = result["tests"]["nq"]
    scores = {(who, score["mode"]): score for who, found in test["scores"].items() for score in found}

    def kept(who: str, mode: str) -> float:
        means = {name: fmean(reply[0] for reply in replies) for name, replies in test["replies"][who].items()}
        share = (means[mode] - means["none"]) / (means["exact"] - means["none"])
        assert abs(share - scores[who, mode]["kept"]["value"]) < 1e-3
        return share

    def interval(mode: str) -> str:
        bounds = scores["tuned", mode]["kept"]
        return f"{kept('tuned', mode):.1%} ({bounds['low']:.1%} to {bounds['high']:.1%})"

    f1 = {mode: fmean(reply[1] for reply in replies) for mode, replies in test["replies"]["tuned"].items()}
    for figure in (
        f"{len(test['ids'])} Natural Questions",
        f"`sink` keeps {interval('sink')}",
        f"`lazy` {interval('lazy')}",
        f"untuned it is {kept('stock', 'sink'):.1%} and {kept('stock', 'lazy'):.1%}",
        f"full attention {f1['exact']:.3f}, `sink` {f1['sink']:.3f}, `lazy` {f1['lazy']:.3f}",
        f"there were {len(result['tests']['2wiki_lazyattn_demo_20']['ids'])} (2WikiMultihopQA)",
    ):
        assert figure in readme


def kept(score: Score) -> tuple[float, float, float]:
    """Value and bounds of the share of the passages' benefit that a mode keeps."""
    lost = score.benefit_lost
    assert lost is not None
    return 1 - lost.value, 1 - lost.high, 1 - lost.low


def test_the_readmes_quality_is_that_of_the_measured_replies(root: Path) -> None:
    readme = (root / "README.md").read_text(encoding="utf-8")
    results = [Result.load(root / QUALITY / f"smollm2-135m{of}-nq10.json") for of in ("", "-tuned")]
    by_mode = [{score.mode: score for score in result.scores if score.mode != NONE} for result in results]
    assert results[0].data["ids"] == results[1].data["ids"]
    assert len(by_mode[0]) > 9
    for mode, stock in by_mode[0].items():
        cells = [f"{stock.recomputed:.0%}"]
        for score in (stock, by_mode[1].get(mode)):
            if score is None:
                cells += ["", ""]
            elif mode == FULL:
                cells += ["100%", f"{score.f1.value:.1%}"]
            else:
                cells += ["{:.1%} [{:.1%}, {:.1%}]".format(*kept(score)), f"{score.f1.value:.1%}"]
        assert f"| {mode} | {' | '.join(cells)} |\n" in readme
    prose = " ".join(readme.split())
    stock, tuned = results
    assert f"add {stock.benefit.value:.2f} nats a token ({tuned.benefit.value:.2f} once it is tuned)" in prose
    assert f"{len(stock.arms[FULL].replies)} questions of NQ Open" in prose
    first_screen = prose[: prose.index("## Install")]
    for mode, figure in (("lazy", by_mode[0]), ("sink", by_mode[0]), ("prefix", by_mode[0]), ("sink", by_mode[1])):
        assert f"{kept(figure[mode])[0]:.0%}" in first_screen


def test_the_readmes_figures_of_other_passages_are_those_of_the_replies(root: Path) -> None:
    prose = " ".join((root / "README.md").read_text(encoding="utf-8").split())

    def shown(file: str, mode: str) -> str:
        return "{:.0%} ({:.0%} to {:.0%})".format(*kept(Result.load(root / QUALITY / file).score(mode)))

    for figure in (
        f"with 5 passages `sink` keeps {shown('smollm2-135m-tuned-nq5.json', 'sink')}",
        f"with 20 {shown('smollm2-135m-tuned-nq20.json', 'sink')}",
        f"`lazy` keeps {shown('smollm2-135m-tuned-musique.json', 'lazy')}",
        f"and `sink` {shown('smollm2-135m-tuned-musique.json', 'sink')}",
        f"of the untuned model `sink` keeps {shown('smollm2-135m-few-shot.json', 'sink')}",
        f"of what they add, `lazy` {shown('smollm2-135m-few-shot.json', 'lazy')}",
    ):
        assert figure in prose


def test_the_readmes_figures_of_finding_chunks_are_the_measured_ones(root: Path) -> None:
    result = json.loads((root / "lazyrag/bench/results/segment.json").read_text(encoding="utf-8"))
    assert result["machine"]["commit"] not in ("", "unknown")
    assert not result["machine"]["commit"].endswith("-dirty")
    assert {"numpy", "daachorse"} <= result["machine"]["versions"].keys()
    readme = (root / "README.md").read_text(encoding="utf-8")
    prose = " ".join(readme.split())
    by_corpus: dict[str, dict[str, dict[str, float]]] = {}
    for row in result["rows"]:
        by_corpus.setdefault(row["corpus"], {})[row["arm"]] = row
    for corpus, rows in by_corpus.items():
        ours = rows["lazyrag"]
        medians = [rows[arm]["p50"] for arm in rows if arm != "lazyrag"]
        cells = " | ".join(f"{ms:.2f}" for ms in (ours["p50"], ours["p99"], *medians))
        assert f"| {result['costs'][corpus]['chunks']:,}, {corpus} | {cells} |\n" in readme
    costs = result["costs"]["ordinary"]
    assert f"the index takes {costs['index_bytes'] / 1e6:.0f} MB and {costs['build_s']:.0f} s to make" in prose
    add = [seconds / costs["build_s"] for seconds in costs["add_s"]]
    assert f"adding 1000 chunks takes {fmean(add):.1%} of the making on average, {max(add):.1%} at most" in prose
