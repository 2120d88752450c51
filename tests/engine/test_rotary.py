"""Which rotary embeddings are taken, and that the tables agree with what vLLM computes for each."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding import get_rope

from lazyrag.backend.plugin.rotary import Seen, check_rotation, find_rope

KNOWN = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "yarn": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 512},
    "ntk": {"rope_type": "ntk", "rope_theta": 10000.0, "factor": 4.0},
    "mixed ntk": {"rope_type": "ntk", "rope_theta": 10000.0, "factor": 4.0, "mixed_b": 0.6},
    "partial": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}
REFUSED = {
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    "mrope": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]},
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 16,
        "long_factor": [2.0] * 16,
        "original_max_position_embeddings": 512,
    },
}


def model_with(*parameters, neox=True):
    config = VllmConfig()
    config.model_config = SimpleNamespace(max_model_len=2048)
    with set_current_vllm_config(config):
        ropes = [get_rope(32, 2048, neox, dict(p), torch.float32) for p in parameters]
    return nn.ModuleList([nn.Linear(2, 2), *ropes])


def turned(module, x, start):
    """Queries [T, heads, 32] as the model has them at positions from `start` on."""
    positions = torch.arange(start, start + x.shape[0])
    return module.forward_native(positions, x.flatten(1), None)[0].view(x.shape)


@pytest.mark.parametrize("neox", [True, False], ids=["neox", "interleaved"])
@pytest.mark.parametrize("name", KNOWN)
def test_a_shift_moves_what_the_model_rotated(name, neox):
    model = model_with(KNOWN[name], neox=neox)
    rope, reason = find_rope(model)
    assert reason is None
    x = torch.randn(6, 2, 32)
    cos, sin = rope.tables([1500])
    moved = rope.rotate(turned(model[1], x, 40), cos, sin)
    # vLLM's tables are made in fp32: 1e-4 radians at position 2000.
    assert_close(moved, turned(model[1], x, 1540), rtol=0, atol=1e-3)


@pytest.mark.parametrize("name", REFUSED)
def test_other_kinds_are_refused_by_name(name):
    model = model_with(REFUSED[name])
    rope, reason = find_rope(model)
    assert rope is None
    assert type(model[1]).__name__ in reason
    assert "Use a model with one plain rotary embedding" in reason


def test_a_model_without_rotation_or_with_two_kinds_is_refused():
    assert "has no rotary embedding" in find_rope(nn.Linear(2, 2))[1]
    assert "2 rotary embeddings that differ" in find_rope(model_with(KNOWN["default"], KNOWN["llama3"]))[1]
    assert find_rope(model_with(KNOWN["default"], KNOWN["default"]))[1] is None


# ---------------------------------------------------------------- the dry run


def dry_run(layer):
    """A model of two layers; `layer(x, positions)` gives the second one's queries and keys."""
    model = model_with(KNOWN["default"])
    x = torch.randn(8, 2, 32)

    def run(positions):
        right = turned(model[1], x, int(positions[0]))
        odd = layer(model[1], x, int(positions[0]))
        return {"layers.0": Seen(right, right, x), "layers.1": odd}

    return run, find_rope(model)[0]


def test_a_model_that_rotates_all_layers_is_taken():
    run, rope = dry_run(lambda m, x, start: Seen(turned(m, x, start), turned(m, x, start), x))
    assert check_rotation(run, rope, 2047) is None


ODD = {
    "a layer without rotation": lambda m, x, start: Seen(x, x, x),
    "queries only": lambda m, x, start: Seen(turned(m, x, start), x, x),
    "weights behind the rotation": lambda m, x, start: Seen(
        turned(m, x, start), turned(m, x, start) * torch.linspace(0.5, 2, 32), x
    ),
    "absolute positions": lambda m, x, start: Seen(turned(m, x, start), turned(m, x, start), x + start / 1000),
}


@pytest.mark.parametrize("name", ODD)
def test_a_layer_that_does_otherwise_is_found(name):
    run, rope = dry_run(ODD[name])
    reason = check_rotation(run, rope, 2047)
    assert "In 1 of the model's 2 layers (layers.1, ...)" in reason
