"""Tiny GGUF files, written by the gguf package from transformers' models as llama.cpp's converter lays them out."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
SEED_OSS_NAMES = NAMES | {"post_attention_layernorm": "post_attention_norm"}


def gguf_name(name: str, model_type: str) -> str:
    names = SEED_OSS_NAMES if model_type == "seed_oss" else NAMES
    stem, kind = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        _, _, layer, stem = stem.split(".", 3)
        return f"blk.{layer}.{names[stem]}.{kind}"
    return f"{names[stem]}.{kind}"


def interleave(tensor: np.ndarray, heads: int) -> np.ndarray:
    """How llama.cpp's converter stores the rows of a Llama model's query and key projections."""
    size = tensor.shape[0] // heads
    rows = [head * size + half * (size // 2) + i for head in range(heads) for i in range(size // 2) for half in (0, 1)]
    return tensor[rows]


def write(
    path: Path,
    model: Any,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    tokens: dict[str, Any] | None = None,
    extra: dict[str, np.ndarray] | None = None,
) -> Path:
    """The file of a transformers model; matrices whose rows fit the quantisation's blocks are of type `kind`.

    tokens: arguments of GGUFWriter.add_*, e.g. {"tokenizer_model": "gpt2"}. extra: further tensors.
    """
    config = model.config
    writer = gguf.GGUFWriter(path, config.model_type)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    for key, value in (tokens or {}).items():
        getattr(writer, f"add_{key}")(value)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    for name, tensor in model.state_dict().items():
        if name in tied:
            continue
        values, own_name = tensor.to(torch.float32).numpy(), gguf_name(name, config.model_type)
        if config.model_type == "llama" and "q_proj" in name:
            values = interleave(values, config.num_attention_heads)
        if config.model_type == "llama" and "k_proj" in name:
            values = interleave(values, config.num_key_value_heads)
        block, _ = gguf.GGML_QUANT_SIZES[kind]
        if values.ndim == 2 and values.shape[1] % block == 0:
            writer.add_tensor(own_name, gguf.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(own_name, values)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
