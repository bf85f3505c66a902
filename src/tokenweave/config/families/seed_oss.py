"""Seed-OSS: biases of queries, keys and values apart from the output's."""

from tokenweave.config.family import Family

FAMILY = Family(
    architecture="SeedOssForCausalLM",
    qkv_bias="attention_bias",
    output_bias="attention_out_bias",
    mlp_bias="mlp_bias",
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 128,
        "attention_bias": True,
        "bos_token_id": 0,
        "eos_token_id": 2,
    },
)
