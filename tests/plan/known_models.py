"""Dimensions of public models, from their config.json."""

from dataclasses import replace

from tokenweave.config import ModelConfig
from tokenweave.config.model import ExpertsConfig

LLAMA_70B = ModelConfig(
    architecture="LlamaForCausalLM", vocab_size=128256, hidden_size=8192, intermediate_size=28672,
    num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8, head_dim=128, max_position_embeddings=131072,
)  # fmt: skip
QWEN_72B = replace(LLAMA_70B, vocab_size=152064, intermediate_size=29568)
SMOLLM = ModelConfig(
    architecture="LlamaForCausalLM", vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
    num_attention_heads=9, num_key_value_heads=3, head_dim=64, max_position_embeddings=8192, tie_word_embeddings=True,
)  # fmt: skip
MIXTRAL_8X22B = ModelConfig(
    architecture="MixtralForCausalLM", vocab_size=32768, hidden_size=6144, intermediate_size=16384,
    num_hidden_layers=56, num_attention_heads=48, num_key_value_heads=8, head_dim=128, max_position_embeddings=65536,
    experts=ExpertsConfig(count=8, per_token=2, intermediate_size=16384, normalised=True, layers=(True,) * 56),
)  # fmt: skip
