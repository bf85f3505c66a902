"""Models by their dimensions alone, for benchmarks on random weights; from their config.json files."""

import json
import os
from pathlib import Path
from typing import Any

from tokenweave.config.cache import cache_root

_LLAMA3_ROPE = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
DIMENSIONS: dict[str, dict[str, Any]] = {
    "Llama-3.3-70B": dict(
        architectures=["LlamaForCausalLM"], model_type="llama", hidden_size=8192, intermediate_size=28672,
        num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8, vocab_size=128256, rope_theta=500000.0,
        rope_scaling=_LLAMA3_ROPE, max_position_embeddings=131072, rms_norm_eps=1e-5,
    ),
    "Qwen2.5-72B": dict(
        architectures=["Qwen2ForCausalLM"], model_type="qwen2", hidden_size=8192, intermediate_size=29568,
        num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8, vocab_size=152064, rope_theta=1000000.0,
        max_position_embeddings=32768, rms_norm_eps=1e-6,
    ),
    "Mixtral-8x22B": dict(
        architectures=["MixtralForCausalLM"], model_type="mixtral", hidden_size=6144, intermediate_size=16384,
        num_hidden_layers=56, num_attention_heads=48, num_key_value_heads=8, vocab_size=32768, rope_theta=1000000.0,
        num_local_experts=8, num_experts_per_tok=2, max_position_embeddings=65536, rms_norm_eps=1e-5,
    ),
    "Llama-3.1-8B": dict(
        architectures=["LlamaForCausalLM"], model_type="llama", hidden_size=4096, intermediate_size=14336,
        num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, vocab_size=128256, rope_theta=500000.0,
        rope_scaling=_LLAMA3_ROPE, max_position_embeddings=131072, rms_norm_eps=1e-5,
    ),
}  # fmt: skip


def model_directory(name: str, *, layers: int | None = None) -> Path:
    """A directory in the user's cache with the config.json of a model of DIMENSIONS, with `layers` layers if given.
    Raises ValueError for another name."""
    if name not in DIMENSIONS:
        raise ValueError(f"dimensions are known of {', '.join(DIMENSIONS)}, not of {name!r}")
    facts = DIMENSIONS[name] | {"torch_dtype": "bfloat16", "tie_word_embeddings": False, "bos_token_id": 1}
    facts |= {} if layers is None else {"num_hidden_layers": layers}
    directory = cache_root() / "dimensions" / f"{name}-{facts['num_hidden_layers']}-layers"
    directory.mkdir(parents=True, exist_ok=True)
    fresh = directory / f"config.json.{os.getpid()}"
    fresh.write_text(json.dumps(facts))
    fresh.replace(directory / "config.json")  # whole for the ranks that write and read it at the same time
    return directory
