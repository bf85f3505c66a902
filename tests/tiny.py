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
    seed: int = 0  # one by which the two best tokens are never so close that rounding decides


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


def _context(positions: int) -> dict[str, Any]:
    return dict(max_position_embeddings=positions)


def _rope(kind: str) -> dict[str, Any]:
    return dict(rope_type=kind, rope_theta=10000.0, factor=8.0)


_LLAMA3_ROPE = dict(
    rope_type="llama3",
    rope_theta=10000.0,
    factor=4.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
_YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=32)
_TIED = dict(tie_word_embeddings=True)
_QWEN_WINDOW = dict(use_sliding_window=True, sliding_window=7, max_window_layers=1)
_MOE = dict(num_experts=5, num_experts_per_tok=3, moe_intermediate_size=31)


def _heads(heads: int, kv_heads: int, size: int = 8) -> dict[str, Any]:
    return dict(num_attention_heads=heads, num_key_value_heads=kv_heads, hidden_size=heads * size)


FAMILIES = [
    Tiny("llama", "LlamaConfig", seed=1),
    Tiny("llama-odd", "LlamaConfig", _TIED | _heads(9, 3)),
    Tiny("llama-bias", "LlamaConfig", dict(attention_bias=True, mlp_bias=True, num_key_value_heads=1)),
    Tiny("llama3-rope", "LlamaConfig", _heads(5, 1, 12) | dict(rope_parameters=_LLAMA3_ROPE)),
    Tiny("llama-gelu", "LlamaConfig", dict(hidden_act="gelu_pytorch_tanh", mlp_bias=True, vocab_size=32003), seed=2),
    Tiny("linear-rope", "LlamaConfig", _heads(5, 5) | _context(16) | dict(rope_parameters=_rope("linear"))),
    Tiny("dynamic-rope", "LlamaConfig", _context(16) | dict(rope_parameters=_rope("dynamic")), seed=1),
    Tiny(
        "dynamic-long",
        "Qwen3Config",
        _heads(5, 1) | _context(60) | dict(rope_parameters=_rope("dynamic"), head_dim=24),
        seed=1,
    ),
    Tiny("yarn-rope", "Qwen2Config", _heads(6, 2) | _context(32) | dict(rope_parameters=_YARN), seed=2),
    Tiny("mistral", "MistralConfig", _heads(6, 3) | dict(sliding_window=9)),
    Tiny("mistral-plain", "MistralConfig", _TIED | dict(sliding_window=None, head_dim=24), seed=1),
    Tiny("qwen2", "Qwen2Config"),
    Tiny("qwen2-tied", "Qwen2Config", _TIED | dict(num_attention_heads=8, num_key_value_heads=4)),
    Tiny("qwen2-window", "Qwen2Config", _QWEN_WINDOW | _heads(7, 1), seed=2),
    Tiny("qwen3", "Qwen3Config", dict(head_dim=24)),
    Tiny("qwen3-tied", "Qwen3Config", _TIED | _heads(6, 3) | dict(head_dim=16, vocab_size=32001)),
    Tiny("mixtral", "MixtralConfig", _heads(6, 2) | dict(num_local_experts=4, num_experts_per_tok=2, sliding_window=9)),
    Tiny(
        "qwen3-moe", "Qwen3MoeConfig", _MOE | _heads(5, 5) | dict(head_dim=16, norm_topk_prob=True, mlp_only_layers=[1])
    ),
    Tiny(
        "qwen3-moe-sums", "Qwen3MoeConfig", _MOE | dict(head_dim=16, decoder_sparse_step=2, attention_bias=True), seed=1
    ),
    Tiny("phi3", "Phi3Config", _heads(6, 3, 10) | dict(sliding_window=9, pad_token_id=0), seed=4),
    Tiny("phi3-tied", "Phi3Config", _TIED | dict(pad_token_id=0), seed=1),
    Tiny("arcee", "ArceeConfig", dict(mlp_bias=True)),
    Tiny("arcee-gelu", "ArceeConfig", _heads(6, 6) | dict(hidden_act="gelu"), seed=1),
    Tiny("seed-oss", "SeedOssConfig", _heads(6, 3) | dict(head_dim=24), seed=3),
    Tiny(
        "seed-oss-bias",
        "SeedOssConfig",
        _TIED | _heads(5, 1, 12) | dict(head_dim=16, attention_out_bias=True, mlp_bias=True, vocab_size=511),
        seed=4,
    ),
]


def build(tiny: Tiny, dtype: torch.dtype = torch.float32) -> Any:
    """The transformers model: random weights large enough that every part matters, biases and norms not trivial."""
    import transformers

    config = getattr(transformers, tiny.config_class)(**{**BASE, **tiny.changes})
    torch.manual_seed(tiny.seed)
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    )
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
