"""Qwen 2 and 2.5: biases of queries, keys and values; a window in the later layers where it is switched on."""

from tokenweave.config.family import Family, windows_switched

FAMILY = Family(architecture="Qwen2ForCausalLM", qkv_bias=True, windows=windows_switched)
