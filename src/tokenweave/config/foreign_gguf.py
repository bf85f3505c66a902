"""GGUF metadata to the fields of a Hugging Face config.json, which `config.foreign` then reads and checks."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "seed_oss": "SeedOssForCausalLM",
}

# GGUF key, after the architecture's name -> config.json field
_FIELDS = {
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "context_length": "max_position_embeddings",
    "attention.sliding_window": "sliding_window",
    "expert_count": "num_local_experts",
}
_REQUIRED = (
    "embedding_length", "feed_forward_length", "block_count", "attention.head_count", "context_length",
    "attention.layer_norm_rms_epsilon",
)  # fmt: skip
# Read elsewhere in this file, or without effect on results.
_OTHERS = (
    "vocab_size", "attention.layer_norm_rms_epsilon", "attention.value_length", "rope.dimension_count",
    "rope.freq_base", "rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length",
    "rope.scaling.finetuned", "expert_used_count", "tensor_data_layout",
)  # fmt: skip

# A GGUF file holds Llama 3's stretched frequencies as a table, not the numbers behind it; these are the same in every
# published model, and the fourth, the factor, is the table's last entry.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def config_fields(
    metadata: Mapping[str, Any],
    shapes: Mapping[str, Sequence[int]],
    rope_factors: Sequence[float] | None = None,
) -> dict[str, Any]:
    """What config.json would say of the model in a GGUF file.

    shapes: every tensor's, by GGUF name, rows first. rope_factors: the tensor rope_freqs.weight where there is one.
    Raises ValueError that names an unsupported architecture or key, or a missing one.
    """
    name = metadata.get("general.architecture")
    if name not in ARCHITECTURES:
        raise ValueError(f"GGUF architecture {name!r} is not supported; supported: {', '.join(ARCHITECTURES)}")
    own = {key.removeprefix(f"{name}."): value for key, value in metadata.items() if key.startswith(f"{name}.")}
    for key, value in own.items():
        if key not in _FIELDS and key not in _OTHERS and value:
            raise ValueError(f"GGUF key {name}.{key} ({value!r}) is not supported; leaving it out would change results")
    for key in _REQUIRED:
        if key not in own:
            raise ValueError(f"GGUF key {name}.{key} is missing")
    if "token_embd.weight" not in shapes:
        raise ValueError("GGUF tensor token_embd.weight is missing")
    fields = {field: own[key] for key, field in _FIELDS.items() if key in own}
    windowed = bool(own.get("attention.sliding_window"))
    if windowed and name != "llama":
        raise ValueError(f"GGUF key {name}.attention.sliding_window is not supported; supported: with llama")
    fields["attention_bias"] = "blk.0.attn_output.bias" in shapes
    if name == "seed_oss":  # has a field of its own for the output's
        fields["attention_out_bias"] = fields["attention_bias"]
        fields["attention_bias"] = "blk.0.attn_q.bias" in shapes
    return fields | {
        "architectures": ["MistralForCausalLM" if windowed else ARCHITECTURES[name]],
        "model_type": "mistral" if windowed else name,
        "hidden_act": "silu",
        "vocab_size": shapes["token_embd.weight"][0],
        "mlp_bias": "blk.0.ffn_down.bias" in shapes,
        "tie_word_embeddings": "output.weight" not in shapes,
        "head_dim": _head_dim(name, own),
        # float32 in the file: 9.9999997e-6 was 1e-5
        "rms_norm_eps": float(f"{own['attention.layer_norm_rms_epsilon']:.7g}"),
        "rope_parameters": _rope(name, own, rope_factors),
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": eos_token_ids(metadata),
    }


def eos_token_ids(metadata: Mapping[str, Any]) -> list[int]:
    """Ids that end an answer: end of text, end of turn, end of message."""
    keys = (f"tokenizer.ggml.{kind}_token_id" for kind in ("eos", "eot", "eom"))
    return list(dict.fromkeys(metadata[key] for key in keys if key in metadata))


def _head_dim(name: str, own: Mapping[str, Any]) -> int:
    heads = own["attention.head_count"]
    if not isinstance(heads, int) or heads < 1:
        raise ValueError(f"GGUF key {name}.attention.head_count must be a positive integer, got {heads!r}")
    size = own.get("attention.key_length", own["embedding_length"] // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if own.get(key, size) != size:
            raise ValueError(f"GGUF key {name}.{key} ({own[key]}) is not supported; supported: the head size, {size}")
    return size


def _rope(name: str, own: Mapping[str, Any], factors: Sequence[float] | None) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": own.get("rope.freq_base", 10000.0)}
    kind = own.get("rope.scaling.type", "none")
    if kind != "none":
        rope |= {"rope_type": kind, "factor": own.get("rope.scaling.factor", 1.0)}
        if "rope.scaling.original_context_length" in own:
            rope["original_max_position_embeddings"] = own["rope.scaling.original_context_length"]
    if factors is None:
        return rope
    table = {"factor": float(f"{factors[-1]:.5g}"), **_LLAMA3}
    expected = _llama3_factors(rope["rope_theta"], 2 * len(factors), **table)
    close = (math.isclose(a, b, rel_tol=1e-3) for a, b in zip(factors, expected, strict=True))
    if kind != "none" or not all(close):
        raise ValueError("GGUF tensor rope_freqs.weight is not supported; supported: Llama 3's table")
    return rope | {"rope_type": "llama3"} | table


def _llama3_factors(theta: float, size: int, **llama3: float) -> list[float]:
    """What each frequency is divided by."""
    low, high, factor = llama3["low_freq_factor"], llama3["high_freq_factor"], llama3["factor"]
    divisors = []
    for dim in range(0, size, 2):
        turns = llama3["original_max_position_embeddings"] / (2 * math.pi * theta ** (dim / size))
        smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
        divisors.append(1 / ((1 - smooth) / factor + smooth))
    return divisors
