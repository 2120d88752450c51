"""Each family of models that is supported, small and random, gives the answers that the oracle gives.

What a family has of its own is also taken away, from the oracle or from the engine: then they must disagree, for else
the models here would not show that it is missing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from engines import Config, Text, assert_agrees
from oracle import Oracle, Prompt, Use

from lazyrag.backend.plugin.rotary import check_rotation
from lazyrag.kernels.rope import Rope

SHAPE = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 1000000.0, "factor": 4.0, "original_max_position_embeddings": 256}
UNSCALED = {"rope_type": "default", "rope_theta": 1000000.0}


@dataclass(frozen=True, eq=False)
class Family:
    """How a model of the family is made, and how it is spoilt.

    Attributes:
        name: of the family.
        kind: of transformers' classes.
        rope: its rotary embedding.
        settings: what else its config has.
        drawn: ends of names of weights that transformers makes all alike, drawn at random here.
        faults: each takes something that is the family's own away from a model, and returns whether it was there.
    """

    name: str
    kind: str
    rope: dict[str, Any]
    settings: dict[str, Any] = field(default_factory=dict)
    drawn: tuple[str, ...] = ()
    faults: tuple[Callable[[Any], bool], ...] = ()

    def __str__(self) -> str:
        return self.name

    def other_frequencies(self, num_pairs: int) -> torch.Tensor:
        """Of the same embedding without its scaling, or with the base that most models have."""
        theta = 10000.0 if self.rope["rope_type"] == "default" else self.rope["rope_theta"]
        return theta ** -(torch.arange(num_pairs, dtype=torch.float64) / num_pairs)

    def other_rotation(self, model: Any) -> bool:
        """A fault that each family can have."""
        rotary = model.model.rotary_emb
        before = rotary.inv_freq.clone()
        rotary.inv_freq.copy_(self.other_frequencies(before.numel()))
        return not torch.allclose(before, rotary.inv_freq)


def weights(model, ending):
    return [p for name, p in model.named_parameters() if name.endswith(ending)]


def all_alike(ending, value):
    def fault(model):
        found = weights(model, ending)
        for p in found:
            p.fill_(value)
        return bool(found)

    return fault


def no_attention_factor(model):
    rotary = model.model.rotary_emb
    before, rotary.attention_scaling = rotary.attention_scaling, 1.0
    return before > 1.1


def scores_scaled_by_hidden_size(model):
    layers, config = model.model.layers, model.config
    before, scale = layers[0].self_attn.scaling, (config.hidden_size // config.num_attention_heads) ** -0.5
    for layer in layers:
        layer.self_attn.scaling = scale
    return before != scale


BIASES = ("q_proj.bias", "k_proj.bias", "v_proj.bias")
NO_BIASES = tuple(all_alike(ending, 0.0) for ending in BIASES)
NORMS = ("q_norm.weight", "k_norm.weight")
NO_NORMS = tuple(all_alike(ending, 1.0) for ending in NORMS)

FAMILIES = [
    Family("llama3", "Llama", LLAMA3),
    Family("llama-linear", "Llama", LINEAR),
    Family("llama-yarn", "Llama", YARN, faults=(no_attention_factor,)),
    Family("qwen2", "Qwen2", UNSCALED, drawn=BIASES, faults=NO_BIASES),
    Family("qwen2.5-yarn", "Qwen2", YARN, {"tie_word_embeddings": True}, BIASES, (*NO_BIASES, no_attention_factor)),
    Family("qwen3", "Qwen3", UNSCALED, drawn=NORMS, faults=NO_NORMS),
    Family(
        "mistral",
        "Mistral",
        UNSCALED,
        {"head_dim": 64, "sliding_window": None},
        faults=(scores_scaled_by_hidden_size,),
    ),
    Family(
        "smollm2",
        "Llama",
        UNSCALED | {"rope_theta": 100000.0},
        {
            "hidden_size": 288,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "initializer_range": 0.1,
            "tie_word_embeddings": True,
        },
    ),
    Family(
        "phi3-partial",
        "Phi3",
        UNSCALED | {"partial_rotary_factor": 0.5},
        {"sliding_window": None, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    ),
]
pytestmark = pytest.mark.parametrize(
    ("family", "engine"), [(f, Config(f.name)) for f in FAMILIES], ids=map(str, FAMILIES), indirect=True
)


@pytest.fixture(scope="session")
def family(request):
    return request.param


@pytest.fixture(scope="session")
def tiny_model(family, tmp_path_factory):
    import transformers

    torch.manual_seed(0)
    config_class, model_class = (getattr(transformers, family.kind + what) for what in ("Config", "ForCausalLM"))
    model = model_class(config_class(**SHAPE | {"rope_parameters": family.rope} | family.settings)).float()
    with torch.no_grad():
        for ending in family.drawn:
            for p in weights(model, ending):
                p.normal_()
    folder = tmp_path_factory.mktemp("models") / family.name
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_oracle(tiny_model):
    """Not the shared fixture: pytest would keep the one of an earlier file, with that file's model."""
    return Oracle(tiny_model)


BEHIND = {"alone": {}, "behind-19": {"prefix": 19}, "sink-4": {"sink": 4}}


def two_orders(seed, behind=None):
    """Prompts of 300 tokens, with the same chunks between other literals."""
    text = Text(seed)
    first = {name: text(n) for name, n in (behind or {}).items()}
    a, b, c = (Use(text(n)) for n in (37, 90, 130))
    return (
        Prompt([text(11), a, text(5), b, text(3), c, text(21)], **first),
        Prompt([text(7), c, a, text(30), b, text(9)], **first),
    )


@pytest.mark.parametrize("behind", BEHIND.values(), ids=BEHIND)
def test_chunks_are_reused_in_another_order(engine, behind):
    cold, hot = two_orders(sum(behind.values()), behind)
    engine.check(cold, children=3 + len(behind))
    (result,) = engine.check(hot, children=0)
    assert result.report["sources"] == ["hbm"] * 3


def test_the_oracle_disagrees_without_what_the_family_has_of_its_own(engine, family, tiny_model):
    prompts = two_orders(1)
    results = [*engine.check(prompts[0]), *engine.check(prompts[1], children=0)]
    for fault in (family.other_rotation, *family.faults):
        oracle = Oracle(tiny_model)
        with torch.no_grad():
            assert fault(oracle.model)
        for prompt, result in zip(prompts, results, strict=True):
            with pytest.raises(AssertionError):
                assert_agrees(oracle, prompt, result)


def test_chunks_turned_otherwise_than_the_model_turns_are_noticed(engine, family):
    worker = engine.worker
    _, rope = next(iter(worker.layers().values())).impl.bound
    other = Rope(family.other_frequencies(rope.inv_freq.numel()), rope.head_size, rope.neox)
    last = worker.model_config.max_model_len - 1
    assert check_rotation(worker._dry_run, rope, last) is None
    assert "In 3 of the model's 3 layers" in check_rotation(worker._dry_run, other, last)

    cold, hot = two_orders(2)
    engine.check(cold)
    worker.bind(other)
    try:
        (result,) = engine.generate(hot)
    finally:
        worker.bind(rope)
        assert engine.llm.reset_prefix_cache()
    assert result.report["sources"] == ["hbm"] * 3
    with pytest.raises(AssertionError):
        engine.assert_agrees(hot, result)
    engine.check(hot, children=3)
