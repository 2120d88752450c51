"""The command line: what each command prints where, and what it ends with."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lazyrag import cli, client
from lazyrag.backend.fake import FakeEngine
from lazyrag.cli import app, size
from lazyrag.client import LazyRAG
from lazyrag.config import Config
from lazyrag.ingest import Progress
from lazyrag.retrievers import embed
from lazyrag.retrievers.store import FILE_NAME

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXTS = {
    "fox.txt": "The quick brown fox jumps over the lazy dog, and the dog sleeps on until the evening comes again.",
    "nobel.md": "# Physics\n\nIn 1901 the first Nobel Prize in Physics was awarded to Wilhelm Conrad Röntgen.",
}

Run = Callable[..., Any]


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No settings of the developer's, and a working folder without any."""
    for variable in [name for name in os.environ if name.startswith("LAZYRAG_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("LAZYRAG_EMBEDDER", "hash")
    monkeypatch.setenv("LAZYRAG_MODE", "lazy")
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FakeEngine]]:
    """The engines that commands have started; they need no model's weights."""
    started: list[FakeEngine] = []

    def start(config: Config, model: Path) -> FakeEngine:
        started.append(FakeEngine(model, mode=config.mode))
        if config.kv_dir is not None:  # what an engine leaves there tells the next ingest what need not be computed
            folder = config.kv_dir / ("0" * 16) / ("0" * 16) / "00"
            folder.mkdir(parents=True, exist_ok=True)
            for number in range(64):
                (folder / f"{number}.safetensors").touch()
        return started[-1]

    monkeypatch.setattr(client, "start_engine", start)
    yield started
    client.close_engines()


@pytest.fixture
def model(model_folder: Callable[..., Path]) -> Path:
    folder = model_folder("byte-level", chat_template=TEMPLATE)
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 4096}))
    return folder


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    folder = tmp_path / "docs"
    folder.mkdir()
    for name, text in TEXTS.items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


@pytest.fixture
def run(engines: list[FakeEngine]) -> Run:
    """Run a command; its result has stdout, stderr and exit_code."""

    def invoke(*arguments: object, stdin: str | bytes | None = None) -> Any:
        result = CliRunner().invoke(app, [str(argument) for argument in arguments], input=stdin)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return invoke


@pytest.fixture
def store(run: Run, docs: Path, model: Path, tmp_path: Path) -> Path:
    """A store with both documents, their KV computed."""
    folder = tmp_path / "kb"
    assert run("ingest", docs, "--store", folder, "--model", model).exit_code == 0
    return folder


# ---------------------------------------------------------------- ingest


def test_ingest_shows_the_plan_first_and_answers_with_the_counts(run: Run, docs: Path, model: Path) -> None:
    result = run("ingest", docs, "--store", "kb", "--model", model)
    assert result.exit_code == 0
    assert result.stderr.startswith("plan: added 2, changed 0, unchanged 0, missing 0, failed 0; ")
    assert result.stdout.startswith("documents: added 2, changed 0, unchanged 0, deleted 0, failed 0; chunks: added ")


def test_ingest_again_does_nothing_again(run: Run, store: Path, docs: Path) -> None:
    result = run("ingest", docs, "--store", store, "--json")
    summary = json.loads(result.stdout)
    assert {name for name, value in summary.items() if value} == {"unchanged"}
    assert summary["unchanged"] == 2


def test_ingest_without_kv_starts_no_engine(run: Run, docs: Path, model: Path, engines: list[FakeEngine]) -> None:
    result = run("ingest", docs, "--store", "kb", "--model", model, "--kv", "none", "--json")
    assert json.loads(result.stdout)["warmed"] == 0
    assert engines == []


@pytest.mark.parametrize(("paths", "folder"), [("", "kb"), ("docs", "")], ids=["no path", "no store"])
def test_an_empty_path_is_never_the_working_folder(
    run: Run, docs: Path, model: Path, tmp_path: Path, paths: str, folder: str
) -> None:
    result = run("ingest", paths, "--store", folder, "--model", model)
    assert result.exit_code == 2
    assert "empty" in result.stderr
    assert not list(tmp_path.glob("*.sqlite3"))


def test_a_mistyped_path_makes_no_store(run: Run, model: Path, tmp_path: Path) -> None:
    result = run("ingest", tmp_path / "dcos", tmp_path / "typo.md", "--store", tmp_path / "kb", "--model", model)
    assert result.exit_code == 2
    for name in ("dcos", "typo.md"):
        assert f"{tmp_path / name} cannot be read: it does not exist." in result.stderr
    assert not (tmp_path / "kb").exists()


def test_an_empty_prompt_is_not_explained(run: Run, model: Path, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").touch()
    result = run("explain", tmp_path / "prompt.txt", "--model", model)
    assert (result.exit_code, result.stderr) == (2, "error: The prompt is empty.\n")


def test_an_emptied_store_is_damaged(run: Run, tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).touch()
    result = run("ls", "--store", tmp_path)
    assert result.exit_code == 1
    assert "damaged or no store" in result.stderr


def test_a_bad_file_is_listed_and_the_rest_goes_on(run: Run, docs: Path, model: Path) -> None:
    (docs / "bad.pdf").write_bytes(b"\x00\x01 no pdf")
    result = run("ingest", docs, "--store", "kb", "--model", model, "--json")
    assert result.exit_code == 1
    summary = json.loads(result.stdout)
    assert summary["added"] == 2
    assert [failure["source"] for failure in summary["failed"]] == [str(docs / "bad.pdf")]
    assert f"failed: {docs / 'bad.pdf'}: " in result.stderr


def test_fail_fast_stops_at_the_first_failure(run: Run, docs: Path, model: Path) -> None:
    (docs / "a.pdf").write_bytes(b"\x00\x01 no pdf")
    result = run("ingest", docs, "--store", "kb", "--model", model, "--fail-fast")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert "Stopped at a failure" in result.stderr
    assert json.loads(run("stats", "--store", "kb", "--json").stdout)["store"]["documents"] < 2


def test_a_dry_run_changes_nothing(run: Run, docs: Path, model: Path, engines: list[FakeEngine]) -> None:
    plan = json.loads(run("ingest", docs, "--store", "kb", "--model", model, "--dry-run", "--json").stdout)
    assert sorted(plan["added"]) == sorted(str(docs / name) for name in TEXTS)
    assert not Path("kb").exists()
    assert engines == []


def test_an_unchanged_ingest_starts_no_engine(run: Run, store: Path, docs: Path, engines: list[FakeEngine]) -> None:
    client.LazyRAG._shared.clear()
    client._engines.clear()
    engines.clear()
    again = run("ingest", docs, "--store", store)
    assert "Starting the engine" not in again.stderr
    assert engines == []
    assert "unchanged" in again.stdout


def test_a_folder_without_documents_makes_no_store(run: Run, model: Path) -> None:
    Path("odd").mkdir()
    Path("odd", "notes.xyz").touch()
    result = run("ingest", "odd", "--store", "kb", "--model", model)
    assert result.exit_code == 2
    assert "none is of a known type (.htm" in result.stderr
    assert not Path("kb").exists()


@pytest.fixture
def no_embedder(monkeypatch: pytest.MonkeyPatch, store: Path) -> None:
    """From now on the embedder, which takes 10 s to load, must not be."""
    monkeypatch.setattr(embed, "embedder_name", lambda setting: setting)  # as of a model's, not asked for its own
    monkeypatch.setattr(embed, "load_embedder", lambda name: pytest.fail("the embedder was loaded"))


@pytest.mark.usefixtures("no_embedder")
def test_a_namespace_without_documents_is_not_searched(run: Run, store: Path) -> None:
    result = run("query", "Who?", "--store", store, "--namespace", "nobody")
    assert result.exit_code == 2
    assert "no documents in its namespace 'nobody'" in result.stderr


@pytest.mark.usefixtures("no_embedder")
def test_a_store_of_another_embedder_is_not_searched(run: Run, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAZYRAG_EMBEDDER", "minilm")
    result = run("query", "Who?", "--store", store)
    assert result.exit_code == 2
    assert "cannot be searched with the embedder 'minilm'" in result.stderr


@pytest.mark.usefixtures("no_embedder")
@pytest.mark.parametrize("path", ["nowhere", "empty", "docs"])
def test_an_ingest_of_nothing_new_loads_no_embedder(path: str, run: Run, store: Path) -> None:
    Path("empty").mkdir()
    result = run("ingest", path, "--store", store)
    assert result.exit_code == (1 if path == "nowhere" else 0)
    assert ("nothing was found" in result.stderr) is (path == "empty")


@pytest.mark.parametrize("command", [("stats",), ("query", "Who?"), ("explain", "prompt.txt")])
def test_a_store_that_does_not_exist_is_named(run: Run, command: tuple[str, ...]) -> None:
    Path("prompt.txt").write_text("Who?")
    result = run(*command, "--store", "nowhere")
    assert result.exit_code == 2
    assert "There is no store in nowhere" in result.stderr


def test_what_is_not_unicode_is_refused_before_an_engine_starts(
    run: Run, store: Path, engines: list[FakeEngine]
) -> None:
    started = len(engines)
    for arguments in (("\udcff",), ("Who?", "--preamble", "\udcff"), ("Who?", "--namespace", "\udcff")):
        result = run("query", *arguments, "--store", store)
        assert result.exit_code == 2
        assert "lone surrogate" in result.stderr
        assert "Starting the engine" not in result.stderr
    assert len(engines) == started


def test_a_prompt_file_that_cannot_be_read_is_named(run: Run, model: Path) -> None:
    if not Path("/proc/self/mem").exists():
        pytest.skip("this system has no /proc/self/mem, whose beginning cannot be read")
    result = run("explain", "/proc/self/mem", "--model", model)
    assert result.exit_code == 2
    assert "The prompt cannot be read:" in result.stderr


def test_settings_that_json_has_no_form_for_are_shown_as_text(run: Run) -> None:
    Path("lazyrag.toml").write_text("engine_args = {when = 1979-05-27}\n")
    rows = json.loads(run("config", "show", "--json").stdout)
    assert {row["name"]: row["value"] for row in rows}["engine_args"] == {"when": "1979-05-27"}


def test_a_question_without_passages_is_not_answered(run: Run, store: Path) -> None:
    empty = run("query", "Who?", "--store", store, "--namespace", "other")
    assert "nothing to answer from" in empty.stderr
    blank = run("query", " ", "--store", store)
    assert "question is empty" in blank.stderr
    assert empty.exit_code == blank.exit_code == 2


def test_documents_are_deleted_only_when_asked(run: Run, store: Path, docs: Path) -> None:
    (docs / "fox.txt").unlink()
    kept = run("ingest", docs, "--store", store)
    assert "missing 1 (kept; --sync deletes them)" in kept.stderr
    assert "deleted 0" in kept.stdout
    deleted = run("ingest", docs, "--store", store, "--sync")
    assert "missing 1 (to be deleted)" in deleted.stderr
    assert "deleted 1" in deleted.stdout


def test_quiet_says_nothing_on_stderr(run: Run, docs: Path, model: Path) -> None:
    assert run("ingest", docs, "--store", "kb", "--model", model, "--quiet").stderr == ""


def test_standard_input_is_a_document(run: Run, model: Path) -> None:
    result = run("ingest", "-", "--store", "kb", "--model", model, "--json", stdin=TEXTS["fox.txt"])
    assert json.loads(result.stdout)["added"] == 1


def test_interrupted_it_says_what_is_done_and_the_same_command_goes_on(
    run: Run, docs: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = LazyRAG.ingest

    def interrupted(self: LazyRAG, **arguments: Any) -> Iterator[Any]:
        for event in stock(self, **arguments):
            yield event
            if isinstance(event, Progress) and event.stage == "store":
                raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(LazyRAG, "ingest", interrupted)
        result = run("ingest", docs, "--store", "kb", "--model", model)
    assert result.exit_code == 130
    assert "Interrupted: 1 documents were stored." in result.stderr
    again = run("ingest", docs, "--store", "kb", "--model", model)
    assert again.exit_code == 0
    assert "the run before this one did not come to its end" in again.stderr
    assert "added 1, changed 0, unchanged 1" in again.stdout


def test_ctrl_c_while_kv_is_computed_keeps_what_was_computed(run: Run, docs: Path, model: Path, tmp_path: Path) -> None:
    """A real signal to a real process: the engine answers so slowly that it always comes in the middle."""
    for number in range(40):
        (docs / f"{number}.txt").write_text(f"Passage {number}: {TEXTS['fox.txt']}")
    script = (
        "from lazyrag import client, cli\nfrom lazyrag.backend.fake import FakeEngine\n"
        "client.start_engine = lambda config, model: FakeEngine(model, delay_s=0.5)\ncli.PLAIN_EVERY_S = 0\ncli.main()"
    )
    command = [sys.executable, "-c", script, "ingest", str(docs), "--store", "kb", "--model", str(model)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("warm "):
            process.send_signal(signal.SIGINT)
            break
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, output) == (130, "")
    assert "Interrupted: 42 documents were stored. The same command goes on from here." in errors
    again = json.loads(run("ingest", docs, "--store", "kb", "--model", model, "--json").stdout)
    assert again["unchanged"] == 42
    assert 0 < again["warmed"] < 42


def test_progress_is_bars_on_a_terminal_and_a_line_now_and_then_elsewhere(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with cli.progress(False) as show:
        for done in range(1, 31):
            now += 1.0
            show(Progress("warm", done, 30, 0))
    assert capsys.readouterr().err == "warm 10/30\nwarm 20/30\nwarm 30/30\n"
    monkeypatch.undo()

    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with cli.progress(False) as show:
        show(Progress("embed", 3, 7, 0))
    assert "embed" in (bars := capsys.readouterr().err)
    assert "3/7" in bars

    with cli.progress(True) as show:
        show(Progress("embed", 3, 7, 0))
    assert capsys.readouterr().err == ""


# ---------------------------------------------------------------- query


def test_query_prints_answer_sources_and_reuse(run: Run, store: Path) -> None:
    result = run("query", "Who got the first Nobel Prize?", "--store", store)
    assert result.exit_code == 0
    answer, _, rest = result.stdout.partition("\n\n")
    assert len(answer.split()) == 8  # the fake engine's words
    sources = [line for line in rest.splitlines() if line.startswith("[")]
    assert len(sources) == 2
    assert any("nobel.md, characters 0-" in line for line in sources)
    assert "prompt tokens (chunks: 2 hbm); first token after" in rest
    assert "; mode lazy: " in rest


def test_query_needs_no_model_once_the_store_knows_it(run: Run, store: Path, model: Path) -> None:
    rows = json.loads(run("config", "show", "--store", store, "--json").stdout)
    (row,) = (row for row in rows if row["name"] == "model")
    assert (row["value"], row["origin"]) == (str(model), str(store))


def test_query_as_json_is_one_document_with_spans_and_tiers(run: Run, store: Path, docs: Path) -> None:
    result = run("query", "fox and dog", "--store", store, "-k", "1", "--json", "--show-prompt")
    values = json.loads(result.stdout)
    (source,) = values["sources"]
    assert source["source"] == str(docs / "fox.txt")
    assert TEXTS["fox.txt"][source["start"] : source["end"]] in values["prompt"]
    assert source["kv"] == "hbm"
    assert values["prompt_tokens"] == values["reused_tokens"] + values["computed_tokens"]
    assert values["reused_tokens"] == source["num_tokens"]
    assert values["finish_reason"] == "stop"
    assert (values["mode"], values["mode_why"]) == ("lazy", "set by LAZYRAG_MODE")


@pytest.mark.parametrize("flag", ["--stream", "--no-stream"])
def test_query_prints_the_same_with_and_without_streaming(flag: str, run: Run, store: Path) -> None:
    once = run("query", "fox", "--store", store, flag).stdout.partition("; first token")[0]
    assert once == run("query", "fox", "--store", store).stdout.partition("; first token")[0]


def test_show_prompt_prints_the_prompt_before_the_answer(run: Run, store: Path) -> None:
    shown = run("query", "fox", "--store", store, "--show-prompt").stdout
    assert shown.startswith("<|im_start|>system\n")
    assert TEXTS["fox.txt"] in shown


def test_max_tokens_limits_the_answer(run: Run, store: Path) -> None:
    values = json.loads(run("query", "fox", "--store", store, "--max-tokens", "2", "--json").stdout)
    assert (values["generated_tokens"], values["finish_reason"]) == (2, "length")


# ---------------------------------------------------------------- explain


def test_explain_shows_chunks_and_literals_without_an_engine(
    run: Run, store: Path, tmp_path: Path, engines: list[FakeEngine]
) -> None:
    started = len(engines)
    prompt = f"Read this:\n{TEXTS['fox.txt']}\nWhat does the dog do?"
    (tmp_path / "prompt.txt").write_text(prompt, encoding="utf-8")
    rows = json.loads(run("explain", tmp_path / "prompt.txt", "--store", store, "--json").stdout)
    assert [row["kind"] for row in rows] == ["literal", "chunk", "literal"]
    assert "".join(prompt[row["start"] : row["end"]] for row in rows) == prompt
    assert prompt[rows[1]["start"] : rows[1]["end"]] == TEXTS["fox.txt"]
    assert (rows[1]["reusable"], rows[1]["kv"]) == (True, None)
    assert len(engines) == started


def test_explain_can_run_the_prompt(run: Run, store: Path) -> None:
    prompt = f"{TEXTS['fox.txt']}\n?"
    rows = json.loads(run("explain", "-", "--store", store, "--run", "--json", stdin=prompt).stdout)
    assert (rows[0]["reused"], rows[0]["kv"]) == (True, "hbm")
    text = run("explain", "-", "--store", store, "--run", stdin=prompt).stdout
    assert "hbm" in text
    assert text.splitlines()[-1].endswith("tokens are in chunks that can be reused")


def test_explain_takes_the_prompt_as_it_is(run: Run, store: Path) -> None:
    windows = TEXTS["nobel.md"].replace("\n", "\r\n").encode()
    rows = json.loads(run("explain", "-", "--store", store, "--json", stdin=windows).stdout)
    assert rows[0]["end"] == len(windows.decode())
    assert rows[0]["chunk_id"] is None  # not what was ingested, and nothing repairs it silently
    assert run("explain", "-", "--store", store, stdin=b"\xff\xfe\x00").exit_code == 2


# ---------------------------------------------------------------- what there is


def test_stats_and_ls_show_what_the_store_holds(run: Run, store: Path, docs: Path) -> None:
    values = json.loads(run("stats", "--store", store, "--json").stdout)
    assert values["store"]["documents"] == 2
    assert "KiB" in run("stats", "--store", store).stdout
    listed = json.loads(run("ls", "--store", store, "--json").stdout)
    assert {document["source"] for document in listed} == {str(docs / name) for name in TEXTS}
    assert f"{docs / 'nobel.md'}  Physics" in run("ls", "--store", store).stdout.splitlines()
    assert run("ls", "--store", store, "--namespace", "other").stdout.strip() == ""


def test_config_show_prints_value_and_origin(run: Run, tmp_path: Path) -> None:
    (tmp_path / "lazyrag.toml").write_text('store = "kb"\n')
    lines = run("config", "show").stdout.splitlines()
    assert any(line.split()[:3] == ["embedder", "'hash'", "LAZYRAG_EMBEDDER"] for line in lines)
    rows = {row["name"]: row for row in json.loads(run("config", "show", "--json").stdout)}
    assert (rows["store"]["value"], rows["store"]["origin"]) == ("kb", "lazyrag.toml")


def test_doctor_ends_with_1_if_something_does_not_fit(run: Run, model: Path, tmp_path: Path) -> None:
    rows = json.loads(run("doctor", "--model", model, "--json").stdout)
    assert {"python", "machine", "vllm", "torch", "model", "tokenizer", "disk"} <= {row["name"] for row in rows}
    result = run("doctor", "--model", tmp_path / "absent")
    assert result.exit_code == 1
    assert any(line.startswith("fail  model") for line in result.stdout.splitlines())
    assert "-> " in result.stdout


# ---------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["stats"], "--store DIR"),
        (["ls"], "--store DIR"),
        (["query", "q"], "--store"),
        (["query", "q", "--store", "absent"], "lazyrag ingest PATH --store absent"),
        (["ls", "--store", "absent"], "lazyrag ingest PATH --store absent"),
        (["verify", "--store", "absent"], "lazyrag ingest PATH --store absent"),
        (["ingest", ".", "--store", "kb", "--model", "absent/model"], "hf download absent/model"),
        (["ingest", ".", "--store", "kb", "--model", "m", "--mode", "lzy"], "exact, lazy, sink, prefix"),
        (["ingest", ".", "--store", "kb", "--chunk-size", "0"], "1 or more"),
        (["config", "show", "--config", "absent.toml"], "No such file"),
        (["explain", "absent.txt"], "absent.txt"),
        (["query"], "Missing argument"),
        (["ingest", ".", "--nonsense"], "--nonsense"),
    ],
)
def test_wrong_usage_is_one_clear_block_and_exit_code_2(arguments: list[str], said: str, run: Run) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert said in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_a_damaged_store_is_a_failure_not_wrong_usage(run: Run, tmp_path: Path) -> None:
    (tmp_path / "store.sqlite3").write_bytes(b"no database" * 1000)
    result = run("stats", "--store", tmp_path)
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")


def test_no_settings_variable_is_ignored(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAZYRAG_STOER", "kb")
    result = run("stats")
    assert result.exit_code == 2
    assert "Did you mean LAZYRAG_STORE?" in result.stderr


def test_debug_adds_the_traceback(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from lazyrag.cli import main; main()"]
    for flags, expected in (([], False), (["--debug"], True)):
        done = subprocess.run([*command, *flags, "stats"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert done.returncode == 2
        assert "error: No store is named." in done.stderr
        assert ("Traceback (most recent call last)" in done.stderr) is expected


def test_version_is_printed() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"lazyrag {cli.__version__}\n")


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (1024, "1.0 KiB"), (5 * 2**20, "5.0 MiB"), (3 * 2**40, "3072.0 GiB")],
)
def test_bytes_are_shown_for_people(num_bytes: int, text: str) -> None:
    assert size(num_bytes) == text


def test_each_kind_of_bench_has_its_own_help_and_options(run: Run) -> None:
    pages = {name: run("bench", *name.split(), "--help").stdout for name in ("", "profile", "segment", "ingest")}
    assert len({page.partition("Options:")[0] for page in pages.values()}) == len(pages)
    assert all(option in pages[""] for option in ("--shape", "--time-limit", "--eager"))
    assert not any(option in pages["segment"] for option in ("--shape", "--time-limit", "--eager"))
    for arguments, said in (
        (("segment", "--shape", "tiny"), "--shape"),
        (("--eager", "segment"), "--eager cannot stand before segment"),
        (("segment", "--out", "nowhere/out.json"), "its folder does not exist"),
        (("--plot", "nowhere/plot.svg"), "its folder does not exist"),
        (("--model", "nowhere"), "nowhere holds no model"),
    ):
        result = run("bench", *arguments)
        assert (result.exit_code, said in result.stderr) == (2, True), result.stderr


@pytest.mark.parametrize("command", [("query", "How high is the lamp?"), ("ingest", "docs")])
def test_a_mode_that_no_engine_can_have_is_refused_before_one_starts(
    command: tuple[str, ...], run: Run, store: Path, docs: Path
) -> None:
    (docs / "new.txt").write_text("A text that no store has seen.")
    result = run(*command, "--store", store, "--mode", "sink+first_k=7")
    assert result.exit_code == 2
    assert "plan:" not in result.stderr
    assert "sink+first_k=7" in result.stderr
    assert "Starting the engine" not in result.stderr


def test_serve_without_a_store_says_only_that(
    run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LAZYRAG_MODE")
    result = run("serve", "--store", tmp_path / "missing")
    assert result.exit_code == 2
    assert "There is no store" in result.stderr
    assert caplog.records == []
