"""Tiny random checkpoints, made and read by transformers, which is the oracle of the model tests."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class Tiny:
    """A tiny model: transformers' config class by name, and what differs from BASE."""

    name: str
    config_class: str
    changes: dict[str, Any] = field(default_factory=dict)
    seed: int = 0


BASE: dict[str, Any] = dict(
    vocab_size=509,
    hidden_size=64,
    intermediate_size=150,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    bos_token_id=1,
    eos_token_id=2,
    tie_word_embeddings=False,
)

_LLAMA3_ROPE = dict(
    rope_type="llama3",
    rope_theta=10000.0,
    factor=4.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
_TIED = dict(tie_word_embeddings=True)

FAMILIES = [
    Tiny("llama", "LlamaConfig"),
    Tiny("llama-odd", "LlamaConfig", _TIED | dict(num_attention_heads=9, num_key_value_heads=3, hidden_size=72)),
    Tiny("llama-bias", "LlamaConfig", dict(attention_bias=True, mlp_bias=True, num_key_value_heads=1)),
    Tiny("llama3-rope", "LlamaConfig", dict(rope_parameters=_LLAMA3_ROPE)),
    Tiny("qwen2", "Qwen2Config"),
    Tiny("qwen2-tied", "Qwen2Config", _TIED | dict(num_attention_heads=8, num_key_value_heads=4)),
    Tiny("qwen3", "Qwen3Config", dict(head_dim=24)),
    Tiny("qwen3-tied", "Qwen3Config", _TIED | dict(head_dim=16, num_attention_heads=6, num_key_value_heads=3)),
]


def build(tiny: Tiny, dtype: torch.dtype = torch.float32) -> Any:
    """The transformers model: random weights large enough that every part matters, biases and norms not trivial."""
    import transformers

    config = getattr(transformers, tiny.config_class)(**{**BASE, **tiny.changes})
    torch.manual_seed(tiny.seed)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.5)
            else:
                parameter.normal_(0, 0.15)
    return model.to(dtype).eval()


def save(tiny: Tiny, directory: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Write the checkpoint as users have it and return its directory."""
    path = directory / tiny.name
    build(tiny, dtype).save_pretrained(path)
    return path
