"""Llama 2, 3, 3.1 to 3.3, and what is built like it: TinyLlama, SmolLM2, Vicuna, ..."""

from tokenweave.config.family import Family

IDS = {"bos_token_id": 1, "eos_token_id": 2}

FAMILY = Family(
    architecture="LlamaForCausalLM",
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    mlp_bias="mlp_bias",
    defaults=IDS,
)
