"""The command line: read arguments, call the client, print. Exit codes: 0 all well, 1 something failed, 2 wrong usage.

What a command answers goes to stdout (with `--json` as one document), everything else to stderr. Whatever is heavy is
imported by the command that needs it, so that `--help` is quick.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from enum import Enum
from functools import wraps
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, ParamSpec, Protocol, TypeAlias

import typer

from lazyrag._version import __version__
from lazyrag.errors import ConfigError, EngineDeadError, InputError, LazyRAGError, MissingExtraError, MissingStoreError
from lazyrag.modes import AUTO, EXACT

if TYPE_CHECKING:
    from lazyrag.backend.engine import Delta
    from lazyrag.client import LazyRAG
    from lazyrag.config import Config
    from lazyrag.explain import Row
    from lazyrag.ingest import Difference, Progress, Summary
    from lazyrag.loaders import Failure
    from lazyrag.quality.data import DataSet
    from lazyrag.retrievers.store import Store, StoredDocument
    from lazyrag.transfer import Moved
    from lazyrag.types import Chunk, Hit, PromptPlan

P = ParamSpec("P")
Show: TypeAlias = "Callable[[Countable], None]"

FAILED, USAGE, INTERRUPTED = 1, 2, 130
PLAIN_EVERY_S = 10
EXCERPT = 48  # characters of a piece that `explain` shows

logger = logging.getLogger("lazyrag")


class KV(str, Enum):
    """When the KV of chunks is computed."""

    now = "now"
    none = "none"


class PassageOrder(str, Enum):
    """In which order a question's passages stand."""

    given = "given"
    shuffled = "shuffled"


class Measured(str, Enum):
    """What a mode may lose."""

    likelihood = "likelihood"
    f1 = "f1"


class Countable(Protocol):
    """A step of something long: `done` of `total`, in a stage of it."""

    @property
    def stage(self) -> str: ...
    @property
    def done(self) -> int: ...
    @property
    def total(self) -> int: ...


app = typer.Typer(
    help="RAG without the waiting: documents in, answers out, every chunk's KV computed once and reused.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
config_app = typer.Typer(help="The settings.", no_args_is_help=True)
app.add_typer(config_app, name="config")
kv_app = typer.Typer(help="The chunks' KV.", no_args_is_help=True)
app.add_typer(kv_app, name="kv")
bench_app = typer.Typer(invoke_without_command=True)
app.add_typer(bench_app, name="bench")

# Text, not a Path: an empty one would be the current folder, and is a mistake.
StoreOption = Annotated[str | None, typer.Option("--store", metavar="PATH", help="Folder of the store.")]
ModelOption = Annotated[str | None, typer.Option("--model", help="Model folder or name. [the store's]")]
ModeOption = Annotated[
    str | None,
    typer.Option(
        "--mode",
        help="auto, exact, lazy, sink or prefix; also lazy+first_k=32, ... [auto: as calibrated, or else exact]",
    ),
]
PreambleOption = Annotated[
    str | None, typer.Option("--preamble", help="Fixed beginning of every prompt, for mode prefix.")
]
EmbedderOption = Annotated[str | None, typer.Option("--embedder", help="Embedding model. [minilm]")]
NamespaceOption = Annotated[str | None, typer.Option("--namespace", help="Whose documents.")]
FileOption = Annotated[Path | None, typer.Option("--config", help="Settings file. [lazyrag.toml here or in the store]")]
JsonOption = Annotated[bool, typer.Option("--json", help="Answer with one JSON document.")]


def main() -> None:
    """The entry point of the command `lazyrag`."""
    app(prog_name="lazyrag")


def print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"lazyrag {__version__}")
        raise typer.Exit


@app.callback()
def begin(
    version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Log everything, and show tracebacks.")] = False,
) -> None:
    if debug:
        log_to_stderr(logging.DEBUG)
    # vLLM logs to stdout unless it is told otherwise, and stdout is for answers.
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")


def guarded(command: Callable[P, None]) -> Callable[P, None]:
    """Let a command end in one clear block on stderr instead of a traceback."""

    @wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except LazyRAGError as error:
            logger.debug("The error came from:", exc_info=True)
            say("\n  ".join(part for part in (f"error: {error.what}", error.why, error.fix) if part))
            usage = isinstance(error, (ConfigError, InputError, MissingExtraError, MissingStoreError))
            raise typer.Exit(USAGE if usage else FAILED) from None
        except KeyboardInterrupt:
            say("Interrupted.")
            raise typer.Exit(INTERRUPTED) from None

    return run


# ---------------------------------------------------------------- documents in


@app.command()
@guarded
def ingest(
    paths: Annotated[list[str], typer.Argument(help="Files, folders, patterns, or - for standard input.")],
    store: StoreOption = None,
    model: ModelOption = None,
    mode: ModeOption = None,
    preamble: PreambleOption = None,
    embedder: EmbedderOption = None,
    chunk_size: Annotated[int | None, typer.Option("--chunk-size", help="Tokens in a chunk, at most. [256]")] = None,
    chunk_overlap: Annotated[
        int | None, typer.Option("--chunk-overlap", help="Tokens that neighbours share. [0]")
    ] = None,
    namespace: NamespaceOption = None,
    kv: Annotated[KV, typer.Option("--kv", help="Compute the chunks' KV now, or when they are first used.")] = KV.now,
    sync: Annotated[bool, typer.Option("--sync", help="Delete documents whose files under PATHS are gone.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and stop.")] = False,
    fail_fast: Annotated[bool, typer.Option("--fail-fast", help="Stop at the first document that fails.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show no plan and no progress.")] = False,
    server: Annotated[
        str | None,
        typer.Option("--server", metavar="URL", help="Into a running server. Its key: variable LAZYRAG_API_KEY."),
    ] = None,
    file: FileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Take documents in: split and embed them, and compute their chunks' KV.

    Run again, it takes up what is new or changed, and what failed or was interrupted before.
    """
    from lazyrag.client import LazyRAG

    settings: dict[str, Any] = {
        "store": store,
        "model": model,
        "mode": mode,
        "preamble": preamble,
        "embedder": embedder,
        "chunk_size": chunk_size,
        "chunk_overlap": chunk_overlap,
        "namespace": namespace,
    }
    if server is not None:
        if given := [name for name, value in settings.items() if value is not None]:
            raise ConfigError(f"With --server, {' and '.join(given)} cannot be set:", why="the server decides.")
        feed_server(server, paths, kv, sync, dry_run, fail_fast, quiet, as_json)
    config = load(file, **settings)
    rag = LazyRAG(config)
    if kv is KV.now and config.mode != AUTO:
        rag.engine_config  # noqa: B018  (a mode that no engine can have is refused before files are read)
    if dry_run:
        with TemporaryDirectory() as folder:  # for a store that does not exist yet, and shall not
            plan = (rag if rag.store else LazyRAG(replace(config, store=Path(folder)))).plan_ingest(paths)
        reply(plan_values(plan), as_json, lambda: plan_lines(plan, sync))
        list_failures(plan.failed)
        raise typer.Exit(FAILED if plan.failed else 0)
    plan = rag.plan_ingest(paths)
    if not quiet:
        say(*plan_lines(plan, sync))
        if kv is KV.now and rag.needs_warming(plan):
            say_starting(rag)
        elif kv is KV.now and rag.choice.mode == EXACT:
            say("No KV is computed: mode exact reuses none.")
    run_ingest(plan, rag.ingest(plan=plan, sync=sync, warm=kv is KV.now), fail_fast, quiet, as_json)


def feed_server(
    url: str, paths: list[str], kv: KV, sync: bool, dry_run: bool, fail_fast: bool, quiet: bool, as_json: bool
) -> NoReturn:
    from lazyrag.backend.remote import RemoteRAG
    from lazyrag.backend.server.feed import compare, feed

    with closing(RemoteRAG(url, os.environ.get("LAZYRAG_API_KEY", ""))) as remote:
        found = compare(remote, paths)
        if dry_run:
            reply(plan_values(found), as_json, lambda: plan_lines(found, sync))
            list_failures(found.failed)
            raise typer.Exit(FAILED if found.failed else 0)
        if not quiet:
            say(*plan_lines(found, sync))
        run_ingest(found, feed(remote, found, sync=sync, warm=kv is KV.now), fail_fast, quiet, as_json)


def run_ingest(
    plan: Difference, events: Iterator[Progress | Summary], fail_fast: bool, quiet: bool, as_json: bool
) -> NoReturn:
    """Run an ingest to its end, an interruption, or (if it shall be so) its first failure."""
    from lazyrag.ingest import Summary

    failed, stored, summary = list(plan.failed), 0, None
    try:
        with progress(quiet) as show:
            for event in events if not (fail_fast and failed) else ():
                if isinstance(event, Summary):
                    summary = event
                    continue
                show(event)
                failed += event.failures
                stored = event.done if event.stage == "store" else stored
                if fail_fast and failed:
                    break
    except KeyboardInterrupt:
        list_failures(failed)
        say(f"Interrupted: {stored} documents were stored. The same command goes on from here.")
        raise typer.Exit(INTERRUPTED) from None
    except EngineDeadError:
        list_failures(failed)
        say(f"Broken off: {stored} documents were stored. The same command goes on from here.")
        raise
    list_failures(failed)
    if summary is None:
        say(f"Stopped at a failure: {stored} documents were stored. The same command goes on from here.")
        raise typer.Exit(FAILED)
    reply(summary_values(summary), as_json, lambda: [summary_line(summary)])
    raise typer.Exit(summary.exit_code)


@contextmanager
def progress(quiet: bool) -> Iterator[Show]:
    """Something to show the steps of an ingest with: bars on a terminal, elsewhere a line now and then."""
    if quiet:
        yield lambda step: None
    elif sys.stderr.isatty():
        with _bars() as show:
            yield show
    else:
        yield _lines()


@contextmanager
def _bars() -> Iterator[Show]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description:6}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, console=Console(stderr=True)) as bars:

        def show(step: Countable) -> None:
            if step.stage not in tasks:
                tasks[step.stage] = bars.add_task(step.stage)
            bars.update(tasks[step.stage], completed=step.done, total=step.total)

        yield show


def _lines() -> Show:
    last = time.monotonic()

    def show(step: Countable) -> None:
        nonlocal last
        if time.monotonic() - last >= PLAIN_EVERY_S:
            last = time.monotonic()
            say(f"{step.stage} {step.done}/{step.total}")

    return show


def plan_lines(plan: Difference, sync: bool) -> list[str]:
    missing = f"missing {len(plan.missing)}"
    if plan.missing:
        missing += " (to be deleted)" if sync else " (kept; --sync deletes them)"
    counts = f"added {len(plan.added)}, changed {len(plan.changed)}, unchanged {len(plan.unchanged)}, {missing}"
    lines = [f"plan: {counts}, failed {len(plan.failed)}; {size(plan.num_bytes)} to read"]
    if not (plan.added or plan.changed or plan.unchanged or plan.failed):
        lines.append("nothing was found that can be ingested")
    if plan.skipped:
        lines.append(f"passed over {len(plan.skipped)} hidden files and files of unknown type")
    if plan.interrupted:
        lines.append("the run before this one did not come to its end; this one goes on from there")
    return lines


def plan_values(plan: Difference) -> dict[str, Any]:
    return {
        "added": [source.id for source in plan.added],
        "changed": [source.id for source in plan.changed],
        "unchanged": len(plan.unchanged),
        "missing": list(plan.missing),
        "failed": failure_values(plan.failed),
        "skipped": list(plan.skipped),
        "bytes": plan.num_bytes,
    }


def summary_line(summary: Summary) -> str:
    s = summary
    documents = f"documents: added {s.added}, changed {s.changed}, unchanged {s.unchanged}, deleted {s.deleted}"
    chunks = f"chunks: added {s.chunks_added}, removed {s.chunks_removed}, embedded {s.embedded}, KV {s.warmed}"
    return f"{documents}, failed {len(s.failed)}; {chunks}"


def summary_values(summary: Summary) -> dict[str, Any]:
    return {**asdict(replace(summary, failed=())), "failed": failure_values(summary.failed)}


def failure_values(failures: Iterable[Failure]) -> list[dict[str, str]]:
    return [{"source": failure.source, "error": str(failure.error)} for failure in failures]


def list_failures(failures: Iterable[Failure]) -> None:
    say(*(f"failed: {failure.source}: {failure.error.why or failure.error.what}" for failure in failures))


# ---------------------------------------------------------------- answers out


@app.command()
@guarded
def query(
    question: Annotated[str, typer.Argument(help="What is to be answered from the documents.")],
    store: StoreOption = None,
    k: Annotated[int, typer.Option("-k", "--k", min=1, help="Passages to retrieve.")] = 4,
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", help="Length of the answer, at most. [256]")] = None,
    stream: Annotated[bool, typer.Option("--stream/--no-stream", help="Print the answer while it is written.")] = True,
    show_prompt: Annotated[bool, typer.Option("--show-prompt", help="Print the prompt first.")] = False,
    model: ModelOption = None,
    mode: ModeOption = None,
    preamble: PreambleOption = None,
    namespace: NamespaceOption = None,
    file: FileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Answer a question from the store, with sources and with what was reused."""
    from lazyrag.backend.engine import joined
    from lazyrag.client import LazyRAG

    config = load(
        file, store=store, max_tokens=max_tokens, model=model, mode=mode, preamble=preamble, namespace=namespace
    )
    rag = LazyRAG(config)
    prompt, hits = rag.question(question, k)
    say_starting(rag)
    rag.info  # noqa: B018  (a plan fits the engine's block size)
    plan = rag.plan(prompt)
    if show_prompt and not as_json:
        typer.echo(plan.text + "\n")
    deltas = []
    for delta in rag.stream(plan):
        deltas.append(delta)
        if stream and not as_json:
            typer.echo(delta.text, nl=False)
    whole = joined(deltas)
    values = answer_values(whole, plan, hits)
    if show_prompt:
        values["prompt"] = plan.text
    reply(values, as_json, lambda: ["" if stream else whole.text, "", *source_lines(hits), reuse_line(whole)])


def say_starting(rag: LazyRAG) -> None:
    rag.engine_config  # noqa: B018  (settings that no engine can have are refused before)
    say("Starting the engine ...")


def answer_values(whole: Delta, plan: PromptPlan, hits: Iterable[Hit]) -> dict[str, Any]:
    reuse = whole.reuse
    tiers = dict(zip((segment.chunk_id for segment in plan.segments), reuse.sources if reuse else (), strict=False))
    return {
        "answer": whole.text,
        "finish_reason": whole.finish_reason,
        "sources": [
            {**place_values(hit.chunk), "score": hit.score, "kv": tiers.get(hit.chunk.id)}
            | ({"also": [place_values(chunk) for chunk in hit.also]} if hit.also else {})
            for hit in hits
        ],
        "prompt_tokens": reuse and reuse.prompt_tokens,
        "reused_tokens": reuse and reuse.reused_tokens,
        "computed_tokens": reuse and reuse.computed_tokens,
        "generated_tokens": len(whole.token_ids),
        "ttft_s": whole.ttft_s,
        "mode": whole.mode and whole.mode.mode,
        "mode_why": whole.mode and whole.mode.reason,
    }


def place_values(chunk: Chunk) -> dict[str, Any]:
    names = ("id", "document_id", "source", "title", "page", "start", "end", "num_tokens")
    return {name: getattr(chunk, name) for name in names}


def source_lines(hits: Iterable[Hit]) -> list[str]:
    lines = []
    for number, hit in enumerate(hits, 1):
        chunk = hit.chunk
        page = f", page {chunk.page}" if chunk.page is not None else ""
        also = f", and {len(hit.also)} more" if hit.also else ""
        lines.append(f"[{number}] {chunk.source}{page}, characters {chunk.start}-{chunk.end}{also} ({hit.score:.2f})")
    return lines


def reuse_line(whole: Delta) -> str:
    reuse = whole.reuse
    if reuse is None:
        return "The engine did not say what it reused."
    tiers = ", ".join(f"{count} {tier}" for tier, count in sorted(Counter(reuse.sources).items()))
    first = f"; first token after {whole.ttft_s:.2f} s" if whole.ttft_s is not None else ""
    mode = f"; mode {whole.mode.mode}: {whole.mode.reason}" if whole.mode is not None else ""
    reused = f"reused {reuse.reused_tokens} of {reuse.prompt_tokens} prompt tokens (chunks: {tiers or 'none'})"
    return f"{reused}{first}{mode}"


@app.command()
@guarded
def explain(
    prompt: Annotated[
        typer.FileBinaryRead, typer.Argument(metavar="PROMPT_FILE", help="The prompt as UTF-8 text; - reads stdin.")
    ],
    store: StoreOption = None,
    run: Annotated[bool, typer.Option("--run", help="Run it, to see where each chunk's KV comes from.")] = False,
    model: ModelOption = None,
    mode: ModeOption = None,
    preamble: PreambleOption = None,
    namespace: NamespaceOption = None,
    file: FileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show which parts of a prompt are known chunks, and why the others are not."""
    from lazyrag.client import LazyRAG

    config = load(file, store=store, model=model, mode=mode, preamble=preamble, namespace=namespace)
    try:
        text = prompt.read().decode()
    except UnicodeDecodeError:
        raise InputError("The prompt cannot be read:", why="it is not UTF-8 text.") from None
    except OSError as error:
        raise InputError("The prompt cannot be read:", why=f"{error.strerror}.") from None
    if not text:
        raise InputError("The prompt is empty.")
    rag = LazyRAG(config)
    if run:
        say_starting(rag)
    rows = rag.explain(text, run=run)
    reply(row_values(rows), as_json, lambda: row_lines(rows))


def row_values(rows: Iterable[Row]) -> list[dict[str, Any]]:
    values, start = [], 0
    for row in rows:
        end = start + len(row.piece.text)
        values.append(
            {
                "kind": row.kind,
                "start": start,
                "end": end,
                "num_tokens": row.num_tokens,
                "chunk_id": row.piece.chunk_id,
                "reusable": row.piece.reuse,
                "reused": row.reused,
                "kv": row.source or None,
                "reason": row.reason or None,
                "nearest": row.nearest,
            }
        )
        start = end
    return values


def row_lines(rows: list[Row]) -> list[str]:
    table = [("part", "tokens", "reuse", "text", "why not")]
    for row in rows:
        state = row.source or ("yes" if row.piece.reuse else "-")
        text = " ".join(row.piece.text.split())
        excerpt = text if len(text) <= EXCERPT else f"{text[: EXCERPT - 3]}..."
        table.append((row.kind, str(row.num_tokens), state, excerpt, row.reason))
    total, reusable = sum(row.num_tokens for row in rows), sum(row.num_tokens for row in rows if row.piece.reuse)
    return [*columns(table), f"{reusable} of {total} tokens are in chunks that can be reused"]


@app.command()
@guarded
def serve(
    store: StoreOption = None,
    model: ModelOption = None,
    mode: ModeOption = None,
    preamble: PreambleOption = None,
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port; 0: a free one.")] = 8000,
    api_keys: Annotated[
        Path | None, typer.Option("--api-keys", metavar="FILE", help="Keys and their namespaces. [this machine only]")
    ] = None,
    max_prompts: Annotated[
        int, typer.Option("--max-prompts", min=1, help="Prompts, searches and writes at a time; more get status 429.")
    ] = 256,
    max_body: Annotated[int, typer.Option("--max-body", min=1, help="MiB of one request; larger get status 413.")] = 16,
    rebuild_kv: Annotated[
        bool, typer.Option("--rebuild-kv", help="Compute the KV that is not on disk for this model in the background.")
    ] = False,
    file: FileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Serve the model and the store over HTTP, for OpenAI's clients and LazyRAG's own."""
    config = load(file, store=store, model=model, mode=mode, preamble=preamble)
    try:
        from lazyrag.backend.server.app import bound, create_app, run
    except ImportError as error:
        raise MissingExtraError(
            "The server is not installed.", why=f"{error}.", fix='Type: pip install "lazyrag[server]".'
        ) from error
    from lazyrag.backend.server.auth import Keys
    from lazyrag.backend.server.service import Limits
    from lazyrag.backend.server.supervisor import SupervisedEngine
    from lazyrag.client import LazyRAG, start_engine, with_pins

    keys = Keys.load(api_keys) if api_keys is not None else Keys()
    embedded = LazyRAG(config)
    folder = embedded.model  # which names what is missing before a mode is chosen for it
    config = embedded.engine_config
    with bound(host, port, keys) as listener:
        say("Starting the engine ...")
        engine = SupervisedEngine(lambda: with_pins(start_engine(config, folder), config))
        try:
            rag = LazyRAG(embedded.config, engine=engine)
            limits = Limits(body_bytes=max_body << 20, places=max_prompts)
            application = create_app(rag, keys=keys, limits=limits, engine=engine)
            say(*application.state.service.look_at_kv(rebuild=rebuild_kv))
            name, number = listener.getsockname()[:2]
            url = f"http://{f'[{name}]' if ':' in name else name}:{number}"
            run(
                application,
                listener,
                started=lambda: reply({"url": url}, as_json, lambda: [f"Serving on {url}"]),
                stopping=engine.stop_restarting,
            )
        finally:
            engine.close()


# ---------------------------------------------------------------- tuning


@app.command()
@guarded
def tune(
    data: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[DATA.jsonl...]", help="Questions, answers and passages, one a line."),
    ] = None,
    model: ModelOption = None,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder of the tuned model.")] = Path("tuned"),
    modes: Annotated[
        str, typer.Option("--modes", metavar="NAMES", help="What to tune for, with commas: lazy, sink+first_k=16, ...")
    ] = "lazy,sink",
    synthetic: Annotated[
        Path | None,
        typer.Option(
            "--synthetic",
            metavar="STORE|FILE",
            help="Make questions about these passages, too. A store's model is the one to tune, if none is named.",
        ),
    ] = None,
    cloze: Annotated[
        int | None, typer.Option("--cloze", min=0, help="Questions to make. [1000 with --synthetic, else 0]")
    ] = None,
    lora: Annotated[int, typer.Option("--lora", min=1, metavar="RANK", help="Rank of the update of each layer.")] = 32,
    full: Annotated[bool, typer.Option("--full", help="Train all weights instead.")] = False,
    distill: Annotated[
        bool, typer.Option("--distill/--no-distill", help="Stay near to what the model says with full attention.")
    ] = True,
    docs: Annotated[int, typer.Option("--docs", min=1, help="Documents of a prompt.")] = 10,
    steps: Annotated[int | None, typer.Option("--steps", min=1, help="Updates of the weights. [3 epochs]")] = None,
    epochs: Annotated[float | None, typer.Option("--epochs", help="Times that each question is seen.")] = None,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Questions of a step.")] = 32,
    lr: Annotated[float | None, typer.Option("--lr", help="Learning rate. [1e-3; 2e-5 with --full]")] = None,
    exact_share: Annotated[
        float, typer.Option("--exact-share", min=0, max=1, help="Share of the questions seen with full attention.")
    ] = 0.2,
    held_out: Annotated[
        float, typer.Option("--held-out", min=0, max=0.9, help="Share of the questions to measure with, by document.")
    ] = 0.1,
    measure: Annotated[int, typer.Option("--measure", min=0, help="Held-out questions to ask, at most.")] = 100,
    seed: Annotated[int, typer.Option("--seed", help="Of all that is drawn.")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where the same command was interrupted.")] = False,
    save_every: Annotated[int, typer.Option("--save-every", min=1, help="Steps between checkpoints.")] = 50,
    pass_tokens: Annotated[
        int, typer.Option("--pass-tokens", min=1, help="Tokens of a forward pass: memory against speed.")
    ] = 8192,
    device: Annotated[str | None, typer.Option("--device", help="Of torch. [cuda if there is one, else cpu]")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show no progress.")] = False,
    namespace: NamespaceOption = None,
    file: FileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Fine-tune a model for documents that do not see each other, and measure it on documents held out."""
    from lazyrag.client import LazyRAG
    from lazyrag.quality.data import load as load_questions

    if steps is not None and epochs is not None:
        raise ConfigError("Both steps and epochs are given.", fix="Give one of them.")
    store = synthetic if synthetic is not None and synthetic.is_dir() else None
    config = load(file, model=model, namespace=namespace, store=store)
    asked = [question for path in data or () for question in load_questions(path).questions]
    if not asked and synthetic is None:
        raise InputError("There is nothing to train on.", fix="Name a file of questions, or passages: --synthetic.")
    model_folder = LazyRAG(config).model

    from lazyrag.tune import run  # torch, after what can be refused without it
    from lazyrag.tune.train import Recipe

    made = run.passages(synthetic, config.namespace) if synthetic is not None else []
    count = cloze if cloze is not None else 1000 if made else 0
    if not asked and not (made and count):
        raise InputError("There is nothing to train on:", why=f"{synthetic} gives no questions.")
    recipe = Recipe(
        modes=tuple(name.strip() for name in modes.split(",")),
        exact_share=exact_share,
        docs=docs,
        batch=batch,
        lr=lr if lr is not None else 2e-5 if full else 1e-3,
        lora=None if full else lora,
        distill=float(distill),
        seed=seed,
        steps=steps or 1,
    )
    options = run.Options(
        model=model_folder,
        out=out,
        recipe=recipe,
        epochs=None if steps is not None else epochs if epochs is not None else 3,
        asked=asked,
        synthetic=made,
        cloze=count,
        held_out=held_out,
        evaluated=measure,
        resume=resume,
        save_every=save_every,
        pass_tokens=pass_tokens,
        device=device,
    )
    result = None
    with progress(quiet) as show_step:
        for event in run.tune(options, say if not quiet else lambda line: None):
            if isinstance(event, run.Result):
                result = event
            else:
                show_step(event)
    assert result is not None
    reply(result.values(), as_json, lambda: [*run.table(result), f"The tuned model is in {result.out}."])


# ---------------------------------------------------------------- what there is


@app.command()
@guarded
def stats(
    store: StoreOption = None, namespace: NamespaceOption = None, file: FileOption = None, as_json: JsonOption = False
) -> None:
    """Count what a store holds: documents, chunks, KV on disk."""
    from lazyrag.client import LazyRAG

    values = LazyRAG(load(file, store=store, namespace=namespace, of_store=True)).stats()
    table = [
        (part, name, size(count) if name == "bytes" else str(count))
        for part, counts in values.items()
        for name, count in counts.items()
    ]
    reply(values, as_json, lambda: columns(table))


@app.command("ls")
@guarded
def list_documents(
    store: StoreOption = None, namespace: NamespaceOption = None, file: FileOption = None, as_json: JsonOption = False
) -> None:
    """List the documents of a store."""
    from lazyrag.retrievers.store import Store

    config = load(file, store=store, namespace=namespace, of_store=True)
    assert config.store is not None
    with Store.open(config.store) as opened:
        documents = list(opened.documents(config.namespace))
    values = [document_values(document) for document in documents]
    rows = [(d.source, d.title or "", "pinned" if d.pinned else "") for d in documents]
    reply(values, as_json, lambda: columns(rows))


def document_values(document: StoredDocument) -> dict[str, Any]:
    names = ("id", "source", "title", "mtime", "pinned")
    return {**{name: getattr(document, name) for name in names}, "metadata": dict(document.metadata)}


@app.command()
@guarded
def doctor(
    model: ModelOption = None,
    store: StoreOption = None,
    full: Annotated[bool, typer.Option("--full", help="Import vLLM and the plugin, too (about 20 s).")] = False,
    file: FileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check that this machine, the model and the store are fit."""
    from lazyrag.doctor import examine

    rows = []
    for row in examine(load(file, model=model, store=store), full=full):
        rows.append(row)
        if not as_json:
            fix = f"\n{'':18}-> {row.fix}" if row.status != "ok" and row.fix else ""
            typer.echo(f"{row.status:5} {row.name:11} {row.found}{fix}")
    if as_json:
        reply([asdict(row) for row in rows], True, list)
    if any(row.status == "fail" for row in rows):
        raise typer.Exit(FAILED)


# ---------------------------------------------------------------- care of a store


@app.command()
@guarded
def rm(
    names: Annotated[list[str], typer.Argument(metavar="ID|PATH...", help="Documents, by id or path.")],
    store: StoreOption = None,
    recursive: Annotated[bool, typer.Option("--recursive", "-r", help="Of a folder, all documents below it.")] = False,
    namespace: NamespaceOption = None,
    file: FileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Delete documents, and the chunks that only they hold with all their KV on disk."""
    from lazyrag.care import delete

    with opened(file, store, namespace) as (held, owner):
        found = [match(held, owner, name, recursive=recursive) for name in names]
        gone = delete(held, (id for ids in found for id in ids), owner)
    line = f"deleted {gone.documents} documents, {gone.chunks} chunks, {gone.kv_files} KV files"
    reply(asdict(gone), as_json, lambda: [line])


@app.command()
@guarded
def pin(
    names: Annotated[list[str], typer.Argument(metavar="ID|PATH...", help="Documents, by id or path.")],
    store: StoreOption = None,
    recursive: Annotated[bool, typer.Option("--recursive", "-r", help="Of a folder, all documents below it.")] = False,
    namespace: NamespaceOption = None,
    file: FileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Keep the KV of documents' chunks in every tier, whatever is evicted; of later versions, too."""
    set_pinned(names, store, recursive, namespace, file, as_json, pinned=True)


@app.command()
@guarded
def unpin(
    names: Annotated[list[str], typer.Argument(metavar="ID|PATH...", help="Documents, by id or path.")],
    store: StoreOption = None,
    recursive: Annotated[bool, typer.Option("--recursive", "-r", help="Of a folder, all documents below it.")] = False,
    namespace: NamespaceOption = None,
    file: FileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Let the KV of pinned documents be evicted again."""
    set_pinned(names, store, recursive, namespace, file, as_json, pinned=False)


def set_pinned(
    names: Iterable[str],
    store: str | None,
    recursive: bool,
    namespace: str | None,
    file: Path | None,
    as_json: bool,
    *,
    pinned: bool,
) -> None:
    with opened(file, store, namespace) as (held, owner):
        found = [match(held, owner, name, recursive=recursive) for name in names]
        changed = held.pin((id for ids in found for id in ids), owner, pinned=pinned)
    reply({"changed": changed}, as_json, lambda: [f"{'pinned' if pinned else 'unpinned'} {changed} documents"])


@app.command()
@guarded
def show(
    name: Annotated[str, typer.Argument(metavar="ID|PATH", help="A document, by id or path, or a chunk's id.")],
    store: StoreOption = None,
    namespace: NamespaceOption = None,
    file: FileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show a document and its chunks, or the places of a chunk, and what KV is kept of them."""
    from lazyrag.care import what_is_kept

    with opened(file, store, namespace) as (held, owner):
        places = held.spans_of([name], owner).get(name)
        if places is None:
            (id, *others) = match(held, owner, name)
            if others:
                raise InputError(f"{name} holds {len(others) + 1} documents.", fix="Name one: lazyrag ls shows them.")
            places = held.chunks_of(id, owner)
            document = next(document for document in held.documents(owner) if document.id == id)
            values = document_values(document)
        else:
            values = {"id": name}
        kept = {chunk.id: chunk for chunk in what_is_kept(held, (chunk.id for chunk in places), owner)}
    values["kv_bytes"] = sum(chunk.kv_bytes for chunk in kept.values())
    values["chunks"] = [
        {**place_values(chunk), "places": (k := kept[chunk.id]).places, "kv_bytes": k.kv_bytes, "warm": k.is_warm}
        for chunk in places
        if chunk.id in kept
    ]
    table: list[tuple[str, ...]] = [("chunk", "document", "characters", "tokens", "places", "KV", "warm")]
    for row in values["chunks"]:
        where = f"{row['start']}-{row['end']}"
        warm = "yes" if row["warm"] else "no"
        cells = (row["id"], row["document_id"], where, row["num_tokens"], row["places"], size(row["kv_bytes"]), warm)
        table.append(tuple(map(str, cells)))
    reply(values, as_json, lambda: columns(table))


@app.command()
@guarded
def gc(
    store: StoreOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be removed, and stop.")] = False,
    other_models: Annotated[
        bool, typer.Option("--other-models", help="KV of models other than the last ingest's, too.")
    ] = False,
    file: FileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Remove what no document of the store needs: KV, caches, what interrupted writers left.

    KV of texts that were registered by hand is such; it is computed again when it is used.
    """
    from lazyrag.care import collect, find_waste, remove_doomed_kv

    with opened(file, store) as (held, _):
        waste = find_waste(held, other_models=other_models)
        if not dry_run:
            collect(held, waste)
            remove_doomed_kv(held)
    values = [{"kind": item.kind, "path": str(item.path), "bytes": item.num_bytes} for item in waste]
    total = f"{'would remove' if dry_run else 'removed'} {len(waste)} ({size(sum(w.num_bytes for w in waste))})"
    kinds = Counter(item.kind for item in waste)
    reply(values, as_json, lambda: [*(f"{kind}: {count}" for kind, count in sorted(kinds.items())), total])


@app.command()
@guarded
def verify(
    store: StoreOption = None,
    repair: Annotated[bool, typer.Option("--repair", help="Remove what is damaged, so that it is made again.")] = False,
    file: FileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Read all of a store, every byte of its KV included, and say what is wrong with it."""
    from lazyrag import care

    with opened(file, store) as (held, _):
        flaws = list(care.verify(held, repair=repair))
    lines = [
        f"{'mended' if flaw.mended else 'note' if flaw.harmless else 'wrong':6}  {flaw.where}: {flaw.what}"
        for flaw in flaws
    ]
    reply([asdict(flaw) for flaw in flaws], as_json, lambda: lines or ["nothing is wrong"])
    if left := sum(not flaw.mended and not flaw.harmless for flaw in flaws):
        say(f"{left} flaws are left." + ("" if repair else " Type the command again with --repair."))
        raise typer.Exit(FAILED)


@kv_app.command("rebuild")
@guarded
def kv_rebuild(
    store: StoreOption = None,
    everything: Annotated[bool, typer.Option("--all", help="Remove all KV of the namespace first.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show no progress.")] = False,
    model: ModelOption = None,
    mode: ModeOption = None,
    preamble: PreambleOption = None,
    namespace: NamespaceOption = None,
    file: FileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compute the chunks' KV that is not on disk."""
    from lazyrag.client import LazyRAG
    from lazyrag.ingest import Summary

    config = load(file, store=store, model=model, mode=mode, preamble=preamble, namespace=namespace, of_store=True)
    summary = Summary()
    with progress(quiet) as show_step:
        for event in LazyRAG(config).rebuild_kv(everything=everything):
            if isinstance(event, Summary):
                summary = event
            else:
                show_step(event)
    list_failures(summary.failed)
    values = {"warmed": summary.warmed, "failed": failure_values(summary.failed)}
    reply(values, as_json, lambda: [f"computed the KV of {summary.warmed} chunks"])
    raise typer.Exit(summary.exit_code)


@app.command("export")
@guarded
def export_to(
    target: Annotated[Path, typer.Argument(metavar="DIR|FILE.tar", help="What is to be written; must not exist.")],
    store: StoreOption = None,
    with_kv: Annotated[bool, typer.Option("--kv/--no-kv", help="With the chunks' KV.")] = True,
    file: FileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write a store, with all its namespaces, to a folder or a tar file."""
    from lazyrag.transfer import export_store

    with opened(file, store) as (held, _):
        moved = export_store(held, target, kv=with_kv)
    reply(asdict(moved), as_json, lambda: [f"exported {moved_line(moved)}"])


@app.command("import")
@guarded
def import_from(
    source: Annotated[Path, typer.Argument(metavar="DIR|FILE.tar", help="What `lazyrag export` has written.")],
    store: StoreOption = None,
    file: FileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make a new store from an exported one."""
    from lazyrag.transfer import import_store

    config = load(file, store=store, of_store=True)
    assert config.store is not None
    moved = import_store(source, config.store)
    reply(asdict(moved), as_json, lambda: [f"imported {moved_line(moved)}"])


def moved_line(moved: Moved) -> str:
    damaged = f", {moved.damaged} damaged ones left out" if moved.damaged else ""
    kv = f"{moved.kv_files} KV files{damaged}"
    return f"{moved.documents} documents, {moved.chunks} chunks, {kv}; {size(moved.num_bytes)}"


@contextmanager
def opened(file: Path | None, store: str | None, namespace: str | None = None) -> Iterator[tuple[Store, str]]:
    """The store that a command is about, and the namespace."""
    from lazyrag.retrievers.store import Store

    config = load(file, store=store, namespace=namespace, of_store=True)
    assert config.store is not None
    with Store.open(config.store) as held:
        yield held, config.namespace


def match(store: Store, namespace: str, name: str, *, recursive: bool = False) -> list[str]:
    """The ids of the documents that a name means: an id, a file's path, or (if it may) a folder's.

    Raises:
        InputError: none.
    """
    ids = [document.id for document in store.documents(namespace)]
    path = os.path.abspath(name)
    found = [id for id in ids if id in (name, path)]
    found = found or [id for id in ids if id.startswith(f"{path}#")]  # the records of a file of records
    below = [id for id in ids if id.startswith(os.path.join(path, ""))]
    if found or (recursive and below):
        return found or below
    raise InputError(
        f"There is no document {name} in the store:",
        why=f"it is a folder with {len(below)} documents." if below else "no id and no path is that.",
        fix="Add --recursive for all of them." if below else "lazyrag ls shows what there is.",
    )


# ---------------------------------------------------------------- speed


ShapeOption = Annotated[
    str | None, typer.Option("--shape", help="llama-8b or tiny; chooses the workloads, too. [tiny without a GPU]")
]
FolderOption = Annotated[Path | None, typer.Option("--model", help="Folder of a model with weights. [the shape's]")]
QuickOption = Annotated[bool, typer.Option("--quick", help="Less of everything, for a first look.")]
RoundsOption = Annotated[int | None, typer.Option("--rounds", min=1, help="Repetitions of each arm. [13; quick: 3]")]
KVOption = Annotated[float | None, typer.Option("--kv-gb", help="KV pool of each of the two engines, in GB.")]
MemoryOption = Annotated[
    float, typer.Option("--memory-share", help="Part of the GPU's memory that must be free when an engine starts.")
]
SizesOption = Annotated[
    str | None, typer.Option("--capture-sizes", metavar="SIZES", help="Batches with CUDA graphs, with commas.")
]
EagerOption = Annotated[bool, typer.Option("--eager", help="Neither compile nor use CUDA graphs.")]
EngineArgsOption = Annotated[
    str | None, typer.Option("--engine-args", metavar="JSON", help="Arguments of vLLM for all engines.")
]
GrowingOption = Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Write the JSON here as it grows.")]


@bench_app.callback()
@guarded
def bench(
    context: typer.Context,
    shape: ShapeOption = None,
    model: FolderOption = None,
    metrics: Annotated[
        str | None, typer.Option("--metrics", metavar="NAMES", help="With commas, in order of weight. [all]")
    ] = None,
    only: Annotated[
        str | None, typer.Option("--only", metavar="TEXT", help="Only workloads with this in their name: 'zipf 1.1'.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Few repetitions, and no arrivals at chosen rates.")] = False,
    rounds: RoundsOption = None,
    time_limit: Annotated[
        float | None, typer.Option("--time-limit", metavar="SECONDS", help="Begin nothing after so long.")
    ] = None,
    kv_gb: KVOption = None,
    memory_share: MemoryOption = 0.2,
    capture_sizes: SizesOption = None,
    eager: EagerOption = False,
    engine_args: EngineArgsOption = None,
    out: GrowingOption = None,
    plot: Annotated[Path | None, typer.Option("--plot", metavar="FILE.svg", help="Draw the medians.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure LazyRAG against the same vLLM without it, after a check of the answers."""
    if context.invoked_subcommand is not None:
        given = (p for p in context.command.params if context.params.get(p.name or "") not in (p.default, None))
        if wrong := [p.opts[0] for p in given]:
            last = context.invoked_subcommand
            raise InputError(f"{', '.join(wrong)} cannot stand before {last}.", fix=f"Type it behind {last}.")
        return
    from lazyrag.bench import report, run

    check_drawable(plot)
    options = run.options(
        shape=shape,
        model=model,
        metrics=metrics,
        only=only,
        quick=quick,
        rounds=rounds,
        limit_s=time_limit,
        kv_gb=kv_gb,
        memory_share=memory_share,
        capture_sizes=capture_sizes,
        eager=eager,
        engine_args=engine_args,
        out=out,
        command=typed(),
    )
    result = run.bench(options, say)
    if plot is not None:
        report.plot(result.rows, plot)
    reply(result.values(), as_json, lambda: [*report.facts(result), "", *report.tables(result)])


@bench_app.command("profile")
@guarded
def bench_profile(
    shape: ShapeOption = None,
    model: FolderOption = None,
    quick: QuickOption = False,
    rounds: RoundsOption = None,
    kv_gb: KVOption = None,
    memory_share: MemoryOption = 0.2,
    capture_sizes: SizesOption = None,
    eager: EagerOption = False,
    engine_args: EngineArgsOption = None,
    out: GrowingOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure where the milliseconds of a hot request go, in LazyRAG and in the same vLLM without it."""
    from lazyrag.bench import report, run

    options = run.options(
        shape=shape,
        model=model,
        quick=quick,
        rounds=rounds,
        kv_gb=kv_gb,
        memory_share=memory_share,
        capture_sizes=capture_sizes,
        eager=eager,
        engine_args=engine_args,
        out=out,
        command=typed(),
    )
    result = run.profile(options, say)
    reply(result.values(), as_json, lambda: [*report.facts(result), "", *report.tables(result)])


@bench_app.command("segment")
@guarded
def bench_segment(
    quick: QuickOption = False,
    rounds: Annotated[int | None, typer.Option("--rounds", min=1, help="Prompts of each kind of corpus. [300]")] = None,
    out: GrowingOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure how fast the chunks of a prompt are found, and what their index costs. Starts no engine."""
    from lazyrag.bench import segment

    check_writable(out)
    options = segment.QUICK if quick else segment.FULL
    result = segment.bench(options, say, prompts=rounds, out=out, command=typed())
    reply(asdict(result), as_json, lambda: segment.tables(result))


@bench_app.command("ingest")
@guarded
def bench_ingest(
    metrics: Annotated[
        str | None, typer.Option("--metrics", metavar="NAMES", help="stand-ins, embedding, prefill; with commas. [all]")
    ] = None,
    model: ModelOption = None,
    quick: QuickOption = False,
    out: GrowingOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure whether an ingest is as fast as the slower of embedding and prefill, in flat memory.

    Its engine is set by variables: LAZYRAG_ENGINE_ARGS, ...
    """
    from lazyrag.bench import ingest

    check_writable(out)
    cases = ingest.CASES if metrics is None else split_names(metrics)
    chunks = ingest.QUICK if quick else ingest.FULL
    result = ingest.bench(cases, chunks, say, model=load(None, model=model).model, out=out, command=typed())
    reply(asdict(result), as_json, lambda: ingest.tables(result))


def typed() -> str:
    """The command as it was typed."""
    return " ".join(["lazyrag", *sys.argv[1:]])


# ---------------------------------------------------------------- quality

DocsOption = Annotated[int, typer.Option("--docs", min=1, help="Passages a question.")]
SeedOption = Annotated[int, typer.Option("--seed", help="Of orders, and of passages that are added.")]
TextOption = Annotated[bool, typer.Option("--text", help="Ask in one text, not in a chat.")]
OutOption = Annotated[
    Path | None, typer.Option("--out", metavar="FILE", help="For the JSON; what it holds is not measured anew.")
]


@app.command("eval")
@guarded
def evaluate_modes(
    data: Annotated[Path, typer.Argument(metavar="DATA.jsonl", help="Questions, answers and passages, one a line.")],
    modes: Annotated[
        str, typer.Option("--modes", metavar="NAMES", help="With commas; exact is always there.")
    ] = "lazy,sink,sink+first_k=16",
    store: Annotated[
        str | None, typer.Option("--store", metavar="PATH", help="Whose model, preamble and sink; no passages.")
    ] = None,
    model: ModelOption = None,
    preamble: PreambleOption = None,
    docs: DocsOption = 10,
    order: Annotated[PassageOrder, typer.Option("--order", help="Of the passages.")] = PassageOrder.given,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Questions, at most. [all]")] = None,
    seed: SeedOption = 0,
    unseen_by: Annotated[
        Path | None,
        typer.Option("--unseen-by", metavar="DIR", help="Only questions this tuned model did not see. [the model]"),
    ] = None,
    as_text: TextOption = False,
    out: OutOption = None,
    plot: Annotated[Path | None, typer.Option("--plot", metavar="FILE.svg", help="Draw quality against cost.")] = None,
    file: FileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure what each mode costs in answers, against full attention and against no passages at all."""
    from lazyrag.client import LazyRAG, start_engine
    from lazyrag.quality import report
    from lazyrag.quality.data import draw
    from lazyrag.quality.data import load as load_questions
    from lazyrag.quality.evaluate import evaluate

    check_writable(out)
    check_drawable(plot)
    rag = LazyRAG(load(file, store=store, model=model, preamble=preamble))
    if store is not None and rag.store is None:
        raise MissingStoreError(f"There is no store in {store}.", fix="Name another one, or a model: --model.")
    found = load_questions(data)
    found = without_seen(found, unseen_by or rag.model)
    result = evaluate(
        rag.config,
        rag.model,
        draw(found, passages=docs, order=order.value, limit=limit, seed=seed),
        split_names(modes),
        chat=not as_text,
        data={"name": found.name, "digest": found.digest, "passages": docs, "order": order.value, "seed": seed},
        out=out,
        command=typed(),
        tell=say,
        start=start_engine,
    )
    if plot is not None:
        report.plot(result.scores, plot)
    reply(result.values(), as_json, lambda: report.lines(result))


@app.command("calibrate")
@guarded
def calibrate_model(
    data: Annotated[
        Path | None,
        typer.Argument(
            metavar="[DATA.jsonl]", help="Questions, answers and passages. [made from the store's documents]"
        ),
    ] = None,
    store: StoreOption = None,
    model: ModelOption = None,
    preamble: PreambleOption = None,
    namespace: NamespaceOption = None,
    modes: Annotated[
        str | None, typer.Option("--modes", metavar="NAMES", help="With commas, from cheap to dear. [all kinds]")
    ] = None,
    measure: Annotated[Measured, typer.Option("--measure", help="Of what the loss is measured.")] = Measured.likelihood,
    bound: Annotated[
        float | None,
        typer.Option(
            "--bound",
            help="What may be lost: of what passages add (0.02), or of F1, which is 0 to 1 (0.01). "
            "It needs 183 questions for 0.02, 368 for 0.01.",
        ),
    ] = None,
    docs: DocsOption = 10,
    limit: Annotated[int, typer.Option("--limit", min=1, help="Questions, at most.")] = 400,
    seed: SeedOption = 0,
    as_text: TextOption = False,
    out: OutOption = None,
    file: FileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Find the cheapest mode that costs this model no answers, for everything that runs in mode auto."""
    from lazyrag import calibration
    from lazyrag.client import LazyRAG, start_engine
    from lazyrag.quality import report
    from lazyrag.quality.calibrate import CANDIDATES, DEFAULT_BOUND, Bound, calibrate, questions_of_store
    from lazyrag.quality.data import draw
    from lazyrag.quality.data import load as load_questions

    check_writable(out)
    rag = LazyRAG(load(file, store=store, model=model, preamble=preamble, namespace=namespace))
    found = load_questions(data) if data is not None else questions_of_store(rag, limit, seed)
    found = without_seen(found, rag.model)
    calibrated, result = calibrate(
        rag.config,
        rag.model,
        draw(found, passages=docs, limit=limit, seed=seed),
        modes=split_names(modes) if modes is not None else CANDIDATES,
        bound=Bound(measure.value, bound if bound is not None else DEFAULT_BOUND[measure.value]),
        chat=not as_text,
        data={"name": found.name, "digest": found.digest, "passages": docs, "seed": seed},
        out=out,
        tell=say,
        start=start_engine,
    )
    path = calibration.save(calibrated, rag.config, rag.model)
    values = {**asdict(calibrated), "file": str(path), "result": result.values()}
    found_out = f"mode {calibrated.mode}: {calibrated.why}"
    then = (
        []
        if calibrated.mode == "exact"
        else ["KV that was computed in another mode is computed anew: lazyrag kv rebuild"]
    )
    reply(values, as_json, lambda: [*report.lines(result), "", found_out, *then])


def without_seen(found: DataSet, model: Path) -> DataSet:
    """The questions about passages that a model was not tuned on."""
    from lazyrag.tune import record

    unseen = record.unseen(found.questions, model)
    if left_out := len(found.questions) - len(unseen):
        say(f"{left_out} questions are left out: {model.name} was tuned on their passages.")
    return replace(found, questions=tuple(unseen))


def check_writable(*paths: Path | None) -> None:
    """Find out before a long run that its findings could not be written.

    Raises:
        InputError: a path is a folder, or in no folder.
    """
    for path in filter(None, paths):
        if path.is_dir() or not path.parent.is_dir():
            raise InputError(f"{path} cannot be written:", why="it is a folder, or its folder does not exist.")


def check_drawable(path: Path | None) -> None:
    """Find out before a long run that its plot could not be drawn.

    Raises:
        InputError: as of `check_writable`.
        MissingExtraError: matplotlib is not installed.
    """
    from lazyrag.optional import need

    if path is not None:
        check_writable(path)
        need("matplotlib", extra="plot")


def split_names(names: str) -> list[str]:
    """Names with commas between them."""
    return [name.strip() for name in names.split(",")]


@config_app.command("show")
@guarded
def config_show(store: StoreOption = None, file: FileOption = None, as_json: JsonOption = False) -> None:
    """Print every setting, its value and where it came from."""
    from lazyrag.client import LazyRAG

    rows = LazyRAG(load(file, store=store)).config.rows()
    rows = [replace(row, value=str(row.value)) if isinstance(row.value, Path) else row for row in rows]
    values = [asdict(row) for row in rows]
    table = [(row.name, "-" if row.value is None else repr(row.value), row.origin, row.help) for row in rows]
    reply(values, as_json, lambda: columns([("setting", "value", "from", "meaning"), *table]))


# ---------------------------------------------------------------- settings and output


def load(file: Path | None, *, of_store: bool = False, **arguments: Any) -> Config:
    """The settings of a command, with its logging set up.

    Args:
        file: settings file, None for the usual ones.
        of_store: whether the command is about a store.
        **arguments: settings by name; None means not given.
    """
    from lazyrag.config import Config

    config = Config.load(file, **arguments)
    if of_store and config.store is None:
        raise ConfigError("No store is named.", fix="Name its folder: --store DIR, or the variable LAZYRAG_STORE.")
    log_to_stderr(config.log_level.upper())
    return config


def log_to_stderr(level: int | str) -> None:
    """Log to stderr; where `--debug` was given, its level stays."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    logger.handlers = [handler]
    if logger.level != logging.DEBUG:
        logger.setLevel(level)


def reply(values: Any, as_json: bool, lines: Callable[[], Iterable[str]]) -> None:
    """Answer a command on stdout, for programs or for people."""
    # What JSON has no form for, such as a date in engine_args, is shown as text.
    typer.echo(json.dumps(values, indent=2, ensure_ascii=False, default=str) if as_json else "\n".join(lines()))


def say(*lines: str) -> None:
    """Tell what is not the answer, on stderr."""
    for line in lines:
        typer.echo(line, err=True)


def columns(table: Sequence[tuple[str, ...]]) -> list[str]:
    """Rows with their cells below each other."""
    widths = [max(map(len, cells)) for cells in zip(*table, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in table]


def size(num_bytes: float) -> str:
    """Bytes for people: "3.4 MiB"."""
    for unit in ("bytes", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.1f} {unit}" if unit != "bytes" else f"{num_bytes} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} GiB"
