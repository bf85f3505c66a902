"""Qwen 3 with experts, in every layer or every few."""

from tokenweave.config.families import qwen3
from tokenweave.config.family import Family, Windows, windows_everywhere
from tokenweave.config.fields import Fields
from tokenweave.config.model import ExpertsConfig


def windows(fields: Fields) -> Windows:
    """In all layers: unlike Qwen 3 itself it knows no types of layers."""
    everywhere = windows_everywhere(fields)
    fields.get("max_window_layers")  # in its published configs, and without effect
    return everywhere if fields.switch("use_sliding_window") else ()


def experts(fields: Fields) -> ExpertsConfig | None:
    """None where no layer has any."""
    count = fields.integer("num_local_experts", fields.integer("num_experts", 128))  # transformers 5 writes the former
    step, dense = fields.integer("decoder_sparse_step", 1), fields.integers("mlp_only_layers")
    layers = tuple(
        count > 0 and i not in dense and (i + 1) % step == 0 for i in range(fields.integer("num_hidden_layers"))
    )
    per_token, size = fields.integer("num_experts_per_tok", 8), fields.integer("moe_intermediate_size", 768)
    normalised = fields.switch("norm_topk_prob")
    if not any(layers):
        return None
    return ExpertsConfig(count=count, per_token=per_token, intermediate_size=size, normalised=normalised, layers=layers)


FAMILY = Family(
    architecture="Qwen3MoeForCausalLM",
    qkv_bias=qwen3.FAMILY.qkv_bias,
    output_bias=qwen3.FAMILY.output_bias,
    qk_norm=True,
    windows=windows,
    experts=experts,
)
