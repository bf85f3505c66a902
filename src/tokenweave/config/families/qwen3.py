"""Qwen 3: queries and keys normalised head by head."""

from tokenweave.config.family import Family, windows_switched

FAMILY = Family(
    architecture="Qwen3ForCausalLM",
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    qk_norm=True,
    windows=windows_switched,
    defaults={"head_dim": 128},
)
