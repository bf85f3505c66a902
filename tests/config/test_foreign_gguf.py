"""GGUF metadata to ModelConfig."""

from typing import Any

import pytest
import torch

from tokenweave.config import ModelConfig
from tokenweave.config.foreign import model_config
from tokenweave.config.foreign_gguf import config_fields

METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 3,
    "llama.context_length": 131072,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 150,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 9.999999747378752e-06,  # 1e-5 in float32
    "llama.rope.freq_base": 500000.0,
    "llama.rope.dimension_count": 16,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
}
SHAPES = {"token_embd.weight": (509, 64)}


def read(changes: dict | None = None, shapes: dict | None = None, factors: Any = None) -> ModelConfig:
    metadata = {key: value for key, value in {**METADATA, **(changes or {})}.items() if value is not None}
    return model_config(config_fields(metadata, {**SHAPES, **(shapes or {})}, factors))


def test_plain() -> None:
    config = read()
    assert (config.architecture, config.vocab_size, config.hidden_size) == ("LlamaForCausalLM", 509, 64)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 2, 16)
    assert (config.rope.kind, config.rope.theta, config.rms_norm_eps) == ("default", 500000.0, 1e-5)
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2,))
    assert config.tie_word_embeddings and not (config.qkv_bias or config.mlp_bias)


def test_facts_from_tensors() -> None:
    assert not read(shapes={"output.weight": (509, 64)}).tie_word_embeddings
    config = read(shapes={"blk.0.attn_output.bias": (64,), "blk.0.ffn_down.bias": (64,)})
    assert config.qkv_bias and config.output_bias and config.mlp_bias


def test_other_keys() -> None:
    assert read({"llama.attention.head_count_kv": None}).num_key_value_heads == 4
    assert read({"llama.attention.key_length": 24, "llama.rope.dimension_count": 24}).head_dim == 24
    assert read({"llama.rope.freq_base": None}).rope.theta == 10000.0
    assert read({"tokenizer.ggml.eot_token_id": 7, "tokenizer.ggml.eom_token_id": 2}).eos_token_ids == (2, 7)
    assert read({"llama.expert_count": 0, "llama.rope.scaling.type": "none"}) == read()


def test_stretched_rope() -> None:
    scaling = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0,
               "llama.rope.scaling.original_context_length": 32768}  # fmt: skip
    rope = read(scaling).rope
    assert (rope.kind, rope.factor, rope.original_max_position_embeddings) == ("yarn", 4.0, 32768)
    linear = read({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0})
    assert (linear.rope.kind, linear.rope.factor, linear.max_position_embeddings) == ("linear", 2.0, 262144)


def test_window() -> None:
    """llama.cpp has no name of its own for Mistral."""
    config = read({"llama.attention.sliding_window": 4096})
    assert (config.architecture, config.windows) == ("MistralForCausalLM", (4096,) * 3)
    metadata = {key.replace("llama.", "qwen2."): value for key, value in METADATA.items()}
    metadata |= {"general.architecture": "qwen2", "qwen2.attention.sliding_window": 4096}
    with pytest.raises(ValueError, match="qwen2.attention.sliding_window is not supported"):
        config_fields(metadata, SHAPES)


def test_qwen3() -> None:
    metadata = {key.replace("llama.", "qwen3."): value for key, value in METADATA.items()}
    metadata |= {"general.architecture": "qwen3", "qwen3.attention.key_length": 16}
    config = model_config(config_fields(metadata, SHAPES))
    assert config.architecture == "Qwen3ForCausalLM" and config.qk_norm and config.head_dim == 16


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_table(factor: float) -> None:
    """The table is what transformers' frequencies differ by from plain ones."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": factor, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}  # fmt: skip
    theirs = LlamaConfig(hidden_size=64, num_attention_heads=1, rope_parameters=rope, max_position_embeddings=131072)
    stretched, _ = ROPE_INIT_FUNCTIONS["llama3"](theirs, "cpu")
    plain = 1.0 / 500000.0 ** (torch.arange(0, 64, 2) / 64)
    table = (plain / stretched).tolist()
    changes = {"llama.attention.head_count": 1, "llama.attention.head_count_kv": 1, "llama.rope.dimension_count": 64}
    found = read(changes, factors=table).rope
    assert {"rope_type": found.kind, "rope_theta": found.theta} == {k: rope[k] for k in ("rope_type", "rope_theta")}
    assert found.factor == pytest.approx(factor) and found.original_max_position_embeddings == 8192
    with pytest.raises(ValueError, match="rope_freqs.weight is not supported"):
        read(changes, factors=[1.0, *table[:-1]])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general.architecture": "gemma3"}, "architecture 'gemma3' is not supported; supported: llama, qwen2, qwen3"),
        ({"general.architecture": None}, "architecture None"),
        ({"llama.logit_scale": 0.5}, "llama.logit_scale .0.5. is not supported"),
        ({"llama.expert_count": 8}, "num_local_experts 8 is not supported"),
        ({"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 4.0}, "rope type 'longrope' is not"),
        ({"llama.rope.dimension_count": 8}, "llama.rope.dimension_count .8. is not supported; supported: .*16"),
        ({"llama.attention.head_count": [4, 4, 2]}, "head_count must be a positive integer"),
        ({"llama.context_length": None}, "llama.context_length is missing"),
    ],
)
def test_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(changes)


def test_no_embedding() -> None:
    with pytest.raises(ValueError, match="token_embd.weight is missing"):
        config_fields(METADATA, {})
