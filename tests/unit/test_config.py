"""Settings: where they come from, what they may be, and what a mistake is answered with."""

from __future__ import annotations

import copy
import os
import pickle
from dataclasses import FrozenInstanceError, fields
from pathlib import Path

import pytest

from lazyrag.config import OTHER_VARIABLES, Config
from lazyrag.errors import ConfigError


@pytest.fixture(autouse=True)
def elsewhere(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder of its own, so that no lazyrag.toml of the developer is read."""
    folder = tmp_path_factory.mktemp("cwd")
    monkeypatch.chdir(folder)
    return folder


def write(folder: Path, text: str) -> Path:
    path = folder / "lazyrag.toml"
    path.write_text(text, encoding="utf-8")
    return path


# ---------------------------------------------------------------- sources


def test_without_any_source_every_setting_is_its_default() -> None:
    config = Config.load(env={})
    assert config == Config()
    assert {row.origin for row in config.rows()} == {"default"}


def test_arguments_beat_variables_beat_the_file(elsewhere: Path) -> None:
    path = write(elsewhere, 'mode = "exact"\nchunk_size = 64\nmax_tokens = 7\n')
    env = {"LAZYRAG_CHUNK_SIZE": "128", "LAZYRAG_MAX_TOKENS": "8", "HOME": "/root"}
    config = Config.load(env=env, max_tokens=9)
    assert (config.mode, config.chunk_size, config.max_tokens) == ("exact", 128, 9)
    assert config.origin("mode") == str(Path(path.name))
    assert config.origin("chunk_size") == "LAZYRAG_CHUNK_SIZE"
    assert config.origin("max_tokens") == "argument"
    assert config.origin("model") == "default"


def test_the_process_environment_is_read_when_none_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in [name for name in os.environ if name.startswith("LAZYRAG_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("LAZYRAG_MODEL", "some/model")
    assert Config.load().model == "some/model"


def test_an_argument_of_none_means_not_given() -> None:
    assert Config.load(env={"LAZYRAG_MODE": "exact"}, mode=None, store=None).mode == "exact"


def test_an_empty_variable_means_not_set() -> None:
    assert Config.load(env={"LAZYRAG_MAX_TOKENS": ""}).max_tokens == 256


def test_the_store_holds_its_own_file(tmp_path: Path) -> None:
    path = write(tmp_path, 'model = "of/the-store"\n')
    for config in (Config.load(env={}, store=tmp_path), Config.load(env={"LAZYRAG_STORE": str(tmp_path)})):
        assert config.model == "of/the-store"
        assert config.origin("model") == str(path)
        assert config.store == tmp_path


def test_the_working_folders_file_comes_before_the_stores(elsewhere: Path, tmp_path: Path) -> None:
    write(elsewhere, 'model = "here"\n')
    write(tmp_path, 'model = "there"\n')
    assert Config.load(env={}, store=tmp_path).model == "here"


def test_relative_paths_in_a_file_start_at_its_folder(tmp_path: Path) -> None:
    path = write(tmp_path, 'store = "data"\nmodel = "./weights"\nembedder = "some/name"\n')
    config = Config.load(path, env={})
    assert config.store == tmp_path / "data"
    assert Path(config.model) == tmp_path / "weights"
    assert config.embedder == "some/name"


def test_an_empty_store_is_refused_wherever_it_stands(tmp_path: Path) -> None:
    (tmp_path / "lazyrag.toml").write_text('store = ""')
    for given in ({"file": tmp_path / "lazyrag.toml"}, {"store": ""}):
        with pytest.raises(ConfigError, match=r"store = '' .* must be a path, and not an empty one"):
            Config.load(env={}, **given)


def test_engine_args_come_as_a_table_as_json_or_as_a_mapping(tmp_path: Path) -> None:
    path = write(tmp_path, "[engine_args]\nmax_num_seqs = 4\n")
    for config in (
        Config.load(path, env={}),
        Config.load(env={"LAZYRAG_ENGINE_ARGS": '{"max_num_seqs": 4}'}),
        Config(engine_args={"max_num_seqs": 4}),
    ):
        assert config.engine_args == {"max_num_seqs": 4}


@pytest.mark.parametrize(
    ("text", "value"), [("1", True), ("true", True), ("ON", True), ("0", False), ("no", False), ("False", False)]
)
def test_flags_are_read_in_the_usual_spellings(text: str, value: bool) -> None:
    assert Config.load(env={"LAZYRAG_KV_DISK": text}).kv_disk is value


@pytest.mark.parametrize(
    ("text", "value"), [("1024", 1024), ("20GiB", 20 * 2**30), ("1.5 GB", 1_500_000_000), ("512mib", 512 * 2**20)]
)
def test_bytes_may_have_a_unit(text: str, value: int, tmp_path: Path) -> None:
    assert Config.load(env={"LAZYRAG_KV_DISK_BYTES": text}).kv_disk_bytes == value
    assert Config.load(write(tmp_path, f'kv_cache_bytes = "{text}"\n'), env={}).kv_cache_bytes == value
    assert Config(kv_disk_bytes=text).kv_disk_bytes == value  # type: ignore[arg-type]


# ---------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("env", "named"),
    [
        ({"LAZYRAG_EMBEDER": "x"}, "Did you mean LAZYRAG_EMBEDDER"),
        ({"LAZYRAG_MAX_TOKENS": "many"}, "a whole number"),
        ({"LAZYRAG_MAX_TOKENS": "1.5"}, "a whole number"),
        ({"LAZYRAG_MAX_TOKENS": "true"}, "a whole number"),
        ({"LAZYRAG_TEMPERATURE": "warm"}, "a number"),
        ({"LAZYRAG_KV_DISK": "maybe"}, "true or false"),
        ({"LAZYRAG_KV_DISK_BYTES": "20 bananas"}, "1GiB"),
        ({"LAZYRAG_ENGINE_ARGS": "[1]"}, "a table"),
        ({"LAZYRAG_ENGINE_ARGS": "{"}, "a table"),
        ({"LAZYRAG_MODE": "lzy"}, "LAZYRAG_MODE"),
        ({"LAZYRAG_CHUNK_SIZE": "0"}, "LAZYRAG_CHUNK_SIZE"),
    ],
)
def test_a_malformed_or_unknown_variable_is_an_error(env: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigError, match=named) as raised:
        Config.load(env=env)
    assert next(iter(env)) in str(raised.value)


def test_variables_that_are_no_settings_are_left_alone() -> None:
    assert Config.load(env=dict.fromkeys(OTHER_VARIABLES, "1")) == Config()


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"mode": "lzy"}, "exact, lazy, sink, prefix"),
        ({"mode": "prefix"}, "preamble"),
        ({"log_level": "loud"}, "debug, info, warning, error"),
        ({"chunk_size": 16, "chunk_overlap": 16}, "chunk_size"),
        ({"chunk_overlap": -1}, "0 or more"),
        ({"temperature": -0.1}, "0 or more"),
        ({"temperature": float("nan")}, "0 or more"),
        ({"max_model_len": 0}, "1 or more"),
        ({"kv_cache_bytes": -5}, "1 or more"),
        ({"model": 5}, "text"),
        ({"store": 5}, "a path"),
        ({"store": ""}, "not an empty one"),
        ({"namespace": "tenant \ud800"}, "lone surrogate"),
        ({"preamble": "Be \ud800"}, "lone surrogate"),
        ({"chunk_size": 1 << 80}, "16777216 at most"),
        ({"block_size": 10**30}, "16777216 at most"),
        ({"kv_cache_bytes": 1 << 80}, "at most"),
        ({"kv_disk_bytes": f"{'9' * 400}GiB"}, "a number of bytes"),
        ({"temperature": 10**400}, "a number"),
        ({"chunk_size": True}, "a whole number"),
        ({"engine_args": {"dtype": "bfloat16"}}, "Set dtype instead"),
        ({"engine_args": {"kv_cache_memory_bytes": 1}}, "Set kv_cache_bytes instead"),
    ],
)
def test_a_setting_that_cannot_be_is_refused_when_built(settings: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        Config(**settings)  # type: ignore[arg-type]


def test_a_store_that_is_no_path_is_refused_before_its_file_is_looked_for() -> None:
    with pytest.raises(ConfigError, match="a path"):
        Config.load(env={}, store=5)


def test_an_unknown_argument_names_the_nearest_setting() -> None:
    with pytest.raises(ConfigError, match="Did you mean embedder"):
        Config.load(env={}, embeder="minilm")


def test_an_unknown_key_in_a_file_names_the_file_and_the_nearest_setting(tmp_path: Path) -> None:
    path = write(tmp_path, "chunksize = 3\n")
    with pytest.raises(ConfigError, match="Did you mean chunk_size") as raised:
        Config.load(path, env={})
    assert str(path) in str(raised.value)


def test_a_name_near_to_nothing_is_told_where_the_list_is() -> None:
    with pytest.raises(ConfigError, match="config show"):
        Config.load(env={}, qqqqqq=1)


def test_a_file_that_cannot_be_used_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        Config.load(tmp_path / "absent.toml", env={})
    with pytest.raises(ConfigError, match="not a TOML file"):
        Config.load(write(tmp_path, "model = \n"), env={})
    with pytest.raises(ConfigError, match="nested too deeply"):
        Config.load(write(tmp_path, f"model = {'[' * 10_000}{']' * 10_000}\n"), env={})
    with pytest.raises(ConfigError, match="not text"):
        Config.load(5, env={})  # type: ignore[arg-type]
    (tmp_path / "lazyrag.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not a TOML file"):
        Config.load(tmp_path / "lazyrag.toml", env={})


def test_an_error_never_shows_the_preamble() -> None:
    with pytest.raises(ConfigError) as raised:
        Config(preamble=["secret words"])  # type: ignore[arg-type]
    assert "secret" not in str(raised.value)


# ---------------------------------------------------------------- the value itself


def test_a_config_is_read_only_hashable_and_can_be_copied() -> None:
    config = Config("m", engine_args={"max_num_seqs": 1})
    with pytest.raises(FrozenInstanceError):
        config.mode = "exact"  # type: ignore[misc]
    assert hash(config) == hash(Config("m", engine_args={"max_num_seqs": 1}))
    assert pickle.loads(pickle.dumps(config)) == copy.deepcopy(config) == config


def test_engine_keys_are_equal_exactly_if_one_engine_can_serve_both(tmp_path: Path) -> None:
    base = Config("m", store=tmp_path)
    for same in ({"max_tokens": 5}, {"temperature": 1.0}, {"namespace": "x"}, {"preamble": "x"}, {"chunk_size": 5}):
        assert Config("m", store=tmp_path, **same).engine_key() == base.engine_key()
    for other in (
        {"mode": "exact"},
        {"dtype": "float32"},
        {"max_model_len": 128},
        {"block_size": 32},
        {"kv_disk": False},
        {"kv_cache_bytes": 1},
        {"engine_args": {"max_num_seqs": 1}},
    ):
        assert Config("m", store=tmp_path, **other).engine_key() != base.engine_key()
    assert hash(base.engine_key()) == hash(Config("m", store=tmp_path).engine_key())


def test_kv_lies_in_the_store_unless_it_is_switched_off(tmp_path: Path) -> None:
    assert Config(store=tmp_path).kv_dir == tmp_path / "kv"
    assert Config(store=tmp_path, kv_disk=False).kv_dir is None
    assert Config().kv_dir is None


def test_every_setting_has_a_row_with_variable_and_meaning() -> None:
    rows = {row.name: row for row in Config().rows()}
    assert set(rows) == {f.name for f in fields(Config)} - {"origins"}
    assert rows["kv_disk_bytes"].variable == "LAZYRAG_KV_DISK_BYTES"
    assert all(row.help.endswith(".") for row in rows.values())
