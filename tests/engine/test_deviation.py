"""How much a chunk's reused KV differs, against the whole model's own cache and a rotation that nobody spared."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from engines import Text

from lazyrag.deviation import LAYERS, Deviations
from lazyrag.errors import ConfigError
from lazyrag.kernels import reference

NUM_LAYERS = LAYERS + 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """More layers than are looked at."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
    )
    folder = tmp_path_factory.mktemp("deviation")
    LlamaForCausalLM(config).float().save_pretrained(folder)
    return folder


def expected(model: Path, before: list[int], passage: list[int], chunk: list[int]) -> list[float]:
    from transformers import AutoModelForCausalLM

    whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    inv_freq = whole.model.rotary_emb.inv_freq.double()

    def cached(front: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        with torch.no_grad():
            cache = whole(torch.tensor([front + chunk])).past_key_values
        return [(layer.keys[0, :, len(front) :], layer.values[0, :, len(front) :]) for layer in cache.layers]

    shift = len(passage) - len(before)
    total = torch.zeros(len(chunk))
    for layer, ((k, v), (k_there, v_there)) in enumerate(zip(cached(before), cached(passage), strict=True)):
        if not 1 <= layer < LAYERS:
            continue
        turned = reference.rotate(k.transpose(0, 1), shift, inv_freq).transpose(0, 1)
        difference = (turned - k_there).square().sum((0, 2)) + (v - v_there).square().sum((0, 2))
        total += difference / (k.square() + v.square()).sum((0, 2)).mean()
    return total.tolist()


@pytest.mark.parametrize("num_before", [0, 4, 40])
def test_scores_are_the_difference_of_the_first_layers_keys_and_values(model: Path, num_before: int) -> None:
    text = Text(3)
    before, passage, chunk = text(num_before), text(23), text(50)
    scores = Deviations(model, passage).scores(chunk, before)
    np.testing.assert_allclose(scores, expected(model, before, passage, chunk), rtol=2e-3)


def test_behind_the_same_text_nothing_differs(model: Path) -> None:
    text = Text(4)
    passage, chunk = text(23), text(50)
    assert max(Deviations(model, passage).scores(chunk, passage)) < 1e-6 < min(Deviations(model, passage).scores(chunk))


def test_a_model_that_cannot_be_loaded_is_refused_with_a_way_out(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="first_k"):
        Deviations(tmp_path, [1]).scores([1, 2])
