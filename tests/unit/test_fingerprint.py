import json
import subprocess
import sys
from pathlib import Path

import pytest

from lazyrag.backend.fingerprint import model_fingerprint
from lazyrag.errors import ConfigError


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    config = {"model_type": "llama", "rope_theta": 10000.0, "hidden_size": 64, "transformers_version": "5.0"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')
    (folder / "tokenizer_config.json").write_text('{"chat_template": "x"}')
    (folder / "model-1.safetensors").write_bytes(bytes(3_000_000))
    (folder / "model-2.safetensors").write_bytes(bytes(range(256)) * 8)
    return folder


def fingerprint(model: Path, **changes: object) -> str:
    return model_fingerprint(model, **{"dtype": "bfloat16", **changes})


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_the_same_model_has_one_fingerprint_in_every_process_and_folder(model: Path, tmp_path: Path) -> None:
    moved = model.rename(tmp_path / "moved")
    code = (
        "import sys; from lazyrag.backend.fingerprint import *; print(model_fingerprint(sys.argv[1], dtype='bfloat16'))"
    )
    prints = {
        subprocess.run(
            [sys.executable, "-c", code, moved],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("0", "1")
    }
    assert prints == {fingerprint(moved)}
    assert len(fingerprint(moved)) == 64


@pytest.mark.parametrize("position", [0, 1_500_000, 2_999_999])
def test_one_flipped_bit_in_the_weights_changes_it(model: Path, position: int) -> None:
    before = fingerprint(model)
    data = bytearray((model / "model-1.safetensors").read_bytes())
    data[position] ^= 1
    (model / "model-1.safetensors").write_bytes(data)
    assert fingerprint(model) != before


@pytest.mark.parametrize(
    "change",
    [
        lambda model: edit(model / "config.json", rope_theta=500000.0),
        lambda model: edit(model / "config.json", rope_scaling={"rope_type": "llama3", "factor": 8.0}),
        lambda model: (model / "tokenizer.json").write_text("{}"),
        lambda model: (model / "model-2.safetensors").rename(model / "model-3.safetensors"),
        lambda model: (model / "model-2.safetensors").unlink(),
    ],
    ids=["rope theta", "rope scaling", "vocabulary", "weight file renamed", "weight file gone"],
)
def test_what_kv_depends_on_changes_it(model: Path, change) -> None:
    before = fingerprint(model)
    change(model)
    assert fingerprint(model) != before


def test_how_the_model_is_run_changes_it(model: Path) -> None:
    engine_args: list[dict[str, object]] = [
        {"hf_overrides": {"rope_parameters": {"rope_theta": 500.0}}},
        {"hf_overrides": {"rms_norm_eps": 0.1}},
        {"load_format": "dummy"},
        {"load_format": "dummy", "seed": 1},
        {"quantization": "fp8"},
        {"what_a_later_vllm_adds": 1},
    ]
    ways = [{}, {"dtype": "float16"}, {"kv_cache_dtype": "fp8"}, *({"engine_args": given} for given in engine_args)]
    assert len({fingerprint(model, **way) for way in ways}) == len(ways)


def test_how_much_runs_at_once_leaves_it(model: Path) -> None:
    given = {"max_num_seqs": 3, "enforce_eager": False, "block_size": 16, "tensor_parallel_size": 2}
    assert fingerprint(model, engine_args=given) == fingerprint(model)


def test_what_kv_does_not_depend_on_leaves_it(model: Path) -> None:
    before = fingerprint(model)
    edit(model / "config.json", transformers_version="6.0", _name_or_path="elsewhere", torch_dtype="float32")
    (model / "tokenizer_config.json").write_text('{"chat_template": "y"}')
    (model / "README.md").write_text("words")
    (model / "training_args.bin").write_bytes(b"not weights beside safetensors")
    assert fingerprint(model) == before == fingerprint(model, kv_cache_dtype="bfloat16")


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda model: [path.unlink() for path in model.glob("*.safetensors")], "no weights"),
        (lambda model: (model / "config.json").unlink(), "cannot be read"),
        (lambda model: (model / "config.json").write_text("[]"), "not a model configuration"),
        (lambda model: (model / "config.json").write_text("{"), "not a model configuration"),
    ],
    ids=["no weights", "no configuration", "a list", "torn"],
)
def test_an_incomplete_checkpoint_is_refused(model: Path, spoil, says: str) -> None:
    spoil(model)
    with pytest.raises(ConfigError, match=says):
        fingerprint(model)


def test_an_unresolved_dtype_is_refused(model: Path) -> None:
    with pytest.raises(ConfigError, match="auto"):
        fingerprint(model, dtype="auto")


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        fingerprint(tmp_path / "nowhere")
